"""The whole chain through the real `pyflyte run --remote`: what runs again, what a killed pod costs, what an error says.

The cluster is a stand-in inside this process (control_plane.py); every task runs by its own container command in a process of
its own, with the code that pyflyte uploaded. The target is named by its path: pods are processes of this machine and can read it.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgpack
import pytest
from click.testing import CliRunner, Result
from control_plane import ControlPlane, control_plane
from flyte_runs import ROOT, pyflyte_run, write_prompts, write_recipe
from flyteidl.core.literals_pb2 import LiteralMap
from flytekit.clis.sdk_in_container.pyflyte import main
from propeller import Entry

pytestmark = [pytest.mark.remote, pytest.mark.slow]

# One row in a step, so that training has steps enough to be killed between; states of a shard in several chunks.
SETTINGS: dict[str, dict[str, Any]] = {
    "train": {"pack_tokens": 32, "epochs": 4, "checkpoint_every": 1, "validation_rows": 0},
    "extract": {"encoding": "fp32", "chunk_bytes": 30_000},
}
UNCACHED = {
    "resolve_inputs",
    "regenerate_responses",
    "gather_token_shards",
    "extract_hidden_states",
    "gather_hidden_states",
    "summarize_run",
}
CACHED = {"fetch_target", "prepare_data", "build_vocab", "train_draft", "export_draft", "evaluate_draft", "sample_rows"}
PER_SHARD = {"regenerate_shard", "extract_shard"}
AFTER_EXTRACTION = {"train_draft", "export_draft", "evaluate_draft"}


@dataclass(frozen=True)
class Run:
    """One execution: what pyflyte said, and the journal's lines."""

    result: Result
    entries: list[Entry]
    plane: ControlPlane

    def tasks(self, state: str) -> Counter[str]:
        """Names of tasks with a line of this state, and how many there are."""
        return Counter(entry.task for entry in self.entries if entry.state == state)

    def states_of(self, task: str) -> list[list[str]]:
        """The states of each node of a task, in order."""
        nodes = dict.fromkeys(entry.node for entry in self.entries if entry.task == task)
        return [[entry.state for entry in self.entries if entry.node == node] for node in nodes]

    def node_of(self, task: str) -> str:
        """Where the metadata of a task's only node lie."""
        (found,) = {(entry.execution, entry.node) for entry in self.entries if entry.task == task}
        return "metadata/{}/{}/data".format(*found)

    def output(self, task: str, attempt: int = 0) -> dict[str, Any]:
        """The dataclass that a task's only node made."""
        outputs = self.plane.store.read_message(f"{self.node_of(task)}/{attempt}/outputs.pb", LiteralMap)
        assert outputs is not None
        made: dict[str, Any] = msgpack.loads(outputs.literals["o0"].scalar.binary.value)
        return made


class Cluster:
    """Starts the chain on the stand-in again and again."""

    def __init__(self, plane: ControlPlane, workplace: Path, target: Path) -> None:
        self.plane, self.workplace, self.target = plane, workplace, target

    def recipe(self, num_prompts: int = 8, **blocks: dict[str, Any]) -> Path:
        prompts = write_prompts(self.workplace / f"prompts{num_prompts}.jsonl", 0, num_prompts)
        merged = {name: SETTINGS.get(name, {}) | blocks.get(name, {}) for name in SETTINGS.keys() | blocks}
        return write_recipe(self.workplace / "recipe.yaml", self.target, prompts, **merged)

    def run(self, num_prompts: int = 8, **blocks: dict[str, Any]) -> Run:
        """`pyflyte run --remote` the chain, and wait for its end."""
        inputs = ["train_eagle3", "--inputs-file", str(self.recipe(num_prompts, **blocks))]
        return self.pyflyte_run(str(ROOT / "workflows/train_eagle3.py"), *inputs)

    def pyflyte_run(self, *what: str) -> Run:
        before = len(self.plane.journal)
        how = ["--remote", "--copy", "all", "--wait", "--poll-interval", "1"]
        result = CliRunner().invoke(main, ["run", *how, *what])
        return Run(result, self.plane.journal[before:], self.plane)


def succeeded(run: Run) -> Run:
    assert run.result.exit_code == 0, (run.result.output, run.result.exception)
    assert "has succeeded" in run.result.output, [e for e in run.entries if e.detail]
    return run


@pytest.fixture(scope="module")
def cluster(workplace: Path, tiny_target: Path) -> Iterator[Cluster]:
    with control_plane() as plane, pytest.MonkeyPatch.context() as patch:
        for name, value in plane.environment.items():
            patch.setenv(name, value)
        patch.setenv("DOCKER_HOST", "tcp://127.0.0.1:9")  # no image is looked for or built
        yield Cluster(plane, workplace, tiny_target)


@pytest.fixture(scope="module")
def first(cluster: Cluster) -> Run:
    return succeeded(cluster.run())


def test_a_first_run_makes_everything(first: Run) -> None:
    assert first.tasks("OK") == Counter(UNCACHED | CACHED) + Counter(dict.fromkeys(PER_SHARD, 2))
    assert {entry.state for entry in first.entries} == {"OK"}


def test_a_rerun_takes_everything_from_the_cache(cluster: Cluster, first: Run) -> None:
    again = succeeded(cluster.run())
    assert again.tasks("OK") == Counter(UNCACHED)
    assert again.tasks("CACHE_HIT") == Counter(CACHED) + Counter(dict.fromkeys(PER_SHARD, 2))


def test_another_learning_rate_trains_exports_and_evaluates(cluster: Cluster, first: Run) -> None:
    other = succeeded(cluster.run(train={"learning_rate": 2e-3}))
    assert set(other.tasks("OK")) - UNCACHED == AFTER_EXTRACTION
    assert other.output("export_draft")["digest"] != first.output("export_draft")["digest"]


def test_appended_prompts_are_answered_and_extracted_in_new_shards_only(cluster: Cluster, first: Run) -> None:
    appended = succeeded(cluster.run(num_prompts=11))
    for task in PER_SHARD:
        assert Counter(map(tuple, appended.states_of(task))) == {("CACHE_HIT",): 2, ("OK",): 1}
    assert appended.tasks("OK")["fetch_target"] == 0


def test_the_same_inputs_give_the_same_draft_here_and_in_the_cluster(
    cluster: Cluster, first: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EAGLE3_STORE", str(cluster.workplace / "store"))
    result = pyflyte_run(cluster.recipe())
    assert result.exit_code == 0, (result.output, result.exception)
