"""The whole chain through the real `pyflyte run --remote`: what runs again, what a killed pod costs, what an error says.

The cluster is a stand-in inside this process (control_plane.py); every task runs by its own container command
in a process of its own, with the code that pyflyte uploaded. The target is named by its path: pods are
processes of this machine and can read it.
"""

import re
from collections import Counter

import pytest

from tests.flyte_stand_in.remote_runs import Accidents, Cluster, Run, succeeded
from tests.helpers.flyte_runs import pyflyte_run

pytestmark = [pytest.mark.remote, pytest.mark.slow]

UNCACHED = Counter(
    {
        "resolve_inputs",
        "fetch_target_node",
        "prepare_data_node",
        "regenerate_responses",
        "gather_token_shards",
        "extract_hidden_states",
        "gather_hidden_states",
        "train_draft_node",
        "evaluate_draft_node",
        "summarize_run",
    }
)
CACHED = {
    "fetch_target",
    "prepare_data",
    "build_vocab",
    "train_draft",
    "export_draft",
    "evaluate_draft",
    "describe_rows",
}
PER_SHARD = {"regenerate_shard", "extract_shard"}
AFTER_EXTRACTION = {"train_draft", "export_draft", "evaluate_draft"}


def test_a_first_run_makes_everything(first: Run) -> None:
    assert first.tasks("OK") == UNCACHED + Counter(CACHED) + Counter(dict.fromkeys(PER_SHARD, 2))
    assert {entry.state for entry in first.entries} == {"OK"}


@pytest.fixture(scope="module")
def other_rate(cluster: Cluster, first: Run) -> Run:
    """Another learning rate, on other machines."""
    return succeeded(
        cluster.run(
            train={"learning_rate": 2e-3},
            fanout={"tensor_parallel_size": 2},
            resources={"engine": {"pod_template": "gpu-pool"}},
        )
    )


def test_another_learning_rate_trains_exports_and_evaluates(first: Run, other_rate: Run) -> None:
    assert set(other_rate.tasks("OK") - UNCACHED) == AFTER_EXTRACTION
    assert other_rate.output("export_draft")["digest"] != first.output("export_draft")["digest"]


def test_pods_get_the_gpus_and_the_pod_template_of_the_recipe(other_rate: Run) -> None:
    def requested(task: str) -> set[tuple[int, str, str]]:
        made = [e for e in other_rate.entries if e.task == task and e.state == "OK"]
        return {(e.retries, e.resources["gpu"], e.pod_template) for e in made}

    assert requested("evaluate_draft") == {(3, "2", "gpu-pool")}
    assert requested("train_draft") == {(3, "1", "")}


def test_appended_prompts_are_answered_and_extracted_in_new_shards_only(cluster: Cluster, first: Run) -> None:
    appended = succeeded(cluster.run(num_prompts=11))
    for task in PER_SHARD:
        assert Counter(map(tuple, appended.states_of(task))) == {("CACHE_HIT",): 2, ("OK",): 1}
    assert appended.tasks("OK")["fetch_target"] == 0


def test_the_same_inputs_give_the_same_draft_here_and_in_the_cluster(
    cluster: Cluster, first: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    from eagle3.evaluation import benchmark
    from eagle3.export import verify_export

    def stop(*_: object, **__: object) -> None:
        raise ValueError("the draft is there")

    monkeypatch.setattr(benchmark, "evaluate", stop)
    assert "the draft is there" in pyflyte_run(cluster.recipe()).output
    (export_dir,) = (cluster.workplace / "store").glob("export_draft-*/eagle3")
    assert verify_export(export_dir) == first.output("export_draft")["digest"]


@pytest.fixture(scope="module")
def disturbed(cluster: Cluster, first: Run) -> Run:
    """The first run's inputs once more, with accidents, and nothing known behind the answers but what
    `evaluate` measured."""
    cluster.forget("extract_shard", "train_draft", "export_draft")
    cluster.plane.store.delete("eagle3/extract_hidden_states-")
    accidents = Accidents(cluster.plane)
    with cluster.plane.watching(accidents.on_start, accidents.on_put):
        return succeeded(cluster.run())


def test_killed_pods_and_dead_engines_are_tried_again(disturbed: Run) -> None:
    assert disturbed.states_of("extract_shard") == [["ATTEMPT_0", "OK"]] * 2
    assert disturbed.states_of("train_draft") == [["ATTEMPT_0", "OK"]]
    causes = [entry.detail.partition(": ")[0] for entry in disturbed.entries if entry.state == "ATTEMPT_0"]
    assert sorted(causes) == ["Interrupted", "Interrupted", "USER:Recoverable"]


def test_an_extraction_goes_on_behind_the_chunks_of_the_killed_pod(disturbed: Run) -> None:
    chunks = Counter(
        key for key in disturbed.puts if "extract_hidden_states-" in key and key.endswith(".safetensors")
    )
    shards = Counter(key.rpartition("/")[0] for key in chunks)
    assert min(shards.values()) > 1
    assert set(chunks.values()) == {1}  # the pod was killed behind its first


def test_training_goes_on_from_the_checkpoint_of_the_killed_pod(disturbed: Run) -> None:
    (node,) = {entry.node for entry in disturbed.entries if entry.task == "train_draft"}
    started = re.search(r"(\d+) of (\d+) steps done", disturbed.log(node, attempt=1))
    assert started is not None
    assert 0 < int(started[1]) < int(started[2])


def test_a_deck_outlives_its_pod(cluster: Cluster, disturbed: Run) -> None:
    deck = cluster.plane.store.read(f"{disturbed.metadata_of('train_draft')}/0/deck.html")
    assert deck is not None
    assert b"Loss by TTT step" in deck


def test_accidents_change_nothing_in_the_draft(first: Run, disturbed: Run) -> None:
    assert disturbed.tasks("OK")["export_draft"] == disturbed.tasks("CACHE_HIT")["evaluate_draft"] == 1
    assert disturbed.output("export_draft")["digest"] == first.output("export_draft")["digest"]


@pytest.fixture(scope="module")
def again(cluster: Cluster, first: Run) -> Run:
    """The first run again, with one task forgotten; the store fails while that task's first attempt fetches
    its inputs."""

    def refuses(key: str) -> bool:
        pods = cluster.plane.pods.running
        is_fetching = any(pod.task == "describe_rows" and pod.attempt.number == 0 for pod in pods)
        return is_fetching and key.startswith("data/") and key.endswith(".parquet")

    cluster.forget("describe_rows")
    with pytest.MonkeyPatch.context() as patch, cluster.plane.watching(refuses=refuses):
        patch.setitem(cluster.plane.pods.environment, "AWS_MAX_ATTEMPTS", "1")
        return succeeded(cluster.run())


def test_a_rerun_takes_everything_from_the_cache(again: Run) -> None:
    assert again.tasks("OK") == UNCACHED + Counter(["describe_rows"])
    cached = Counter(CACHED - {"describe_rows"}) + Counter(dict.fromkeys(PER_SHARD, 2))
    assert again.tasks("CACHE_HIT") == cached


def test_a_store_that_fails_while_a_task_fetches_its_inputs_costs_an_attempt(again: Run) -> None:
    assert again.states_of("describe_rows") == [["ATTEMPT_0", "OK"]]
    (detail,) = [entry.detail for entry in again.entries if entry.state == "ATTEMPT_0"]
    assert detail.startswith("USER:Recoverable")
    assert "describe_rows: SYSTEM:DownloadDataError" in detail


def test_a_wrong_setting_fails_at_once_in_its_own_words(cluster: Cluster, first: Run) -> None:
    wrong = cluster.run(engine={"max_model_len": 512})
    assert {(entry.task, entry.state, entry.retries) for entry in wrong.entries} == {
        ("resolve_inputs", "ATTEMPT_0", 2),
        ("resolve_inputs", "FAILED", 2),
    }
    message = "ValueError: engine.max_model_len must not exceed the target's 256 positions, got 512; lower it"
    assert message in " ".join(wrong.result.output.split())
