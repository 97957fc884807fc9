"""Runs that stop after a stage or start from what exists: what they leave, what comes from the cache, what is
refused."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from eagle3.shards.tokens import TokenRow, read_token_shard, write_token_shard
from tests.helpers.flyte_runs import pyflyte_run, write_prompts, write_recipe
from workflows import train_eagle3
from workflows.flyte import journal

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("light")]
STOPS = ("until_regenerate", "until_extract", "until_train", "until_export")


class Squeezed:
    """Text in which phrases are found whatever the white space."""

    def __init__(self, text: str) -> None:
        self.text = "".join(text.split())

    def __contains__(self, phrase: str) -> bool:
        return "".join(phrase.split()) in self.text

    def __repr__(self) -> str:
        return self.text


class Runs:
    """Workflows of train_eagle3.py on one recipe in one workplace."""

    def __init__(self, workplace: Path, target: Path) -> None:
        self.workplace, self.target = workplace, target
        self.prompts = write_prompts(workplace / "prompts.jsonl", 0, 10)

    def run(self, workflow: str, shards: Any = None, **blocks: Any) -> dict[str, tuple[int, int]]:
        """Executions and cache hits by stage."""
        result = self.attempt(workflow, shards, **blocks)
        assert result.exit_code == 0, (result.output, result.exception)
        stages = {e.stage for e in journal.entries()}
        return {s: (self._count(s, False), self._count(s, True)) for s in stages}

    def attempt(self, workflow: str, shards: Any = None, **blocks: Any) -> Any:
        recipe = write_recipe(self.workplace / "recipe.yaml", self.target, self.prompts, **blocks)
        return pyflyte_run(
            recipe, workflow=workflow, more=[] if shards is None else ["--shards", json.dumps(shards)]
        )

    def listed(self, kind: str) -> list[str]:
        content = json.loads((self.workplace / f"runs/tiny/{kind}.json").read_text())
        return [shard["place"] for shard in content["shards"]]

    def refusal(self, workflow: str, shards: Any, **blocks: Any) -> "Squeezed":
        result = self.attempt(workflow, shards, **blocks)
        assert result.exit_code != 0
        assert not {e.stage for e in journal.entries()} & {
            "regenerate_responses",
            "extract_hidden_states",
            "train_draft",
        }
        # Wrapped anywhere, even inside words.
        return Squeezed(f"{result.output} {result.exception}")

    @staticmethod
    def _count(stage: str, cached: bool) -> int:
        return sum(e.stage == stage and e.cached == cached for e in journal.entries())


def ran(counts: dict[str, tuple[int, int]]) -> set[str]:
    return {stage for stage, (runs, _) in counts.items() if runs}


@pytest.fixture(scope="module")
def runs(workplace: Path, tiny_target: Path) -> Runs:
    return Runs(workplace, tiny_target)


@pytest.fixture(scope="module")
def stops(runs: Runs, workplace: Path) -> dict[str, dict[str, tuple[int, int]]]:
    """Each stop once, in order, from an empty store: what ran and what was cached."""
    from eagle3.training import launch
    from eagle3.training.loop import train

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "train_in_processes", lambda job, report: train(job))
        return {stop: runs.run(stop) for stop in STOPS}


def test_each_stop_goes_on_from_the_one_before(stops: dict[str, dict[str, tuple[int, int]]]) -> None:
    before = {"fetch_target", "prepare_data", "regenerate_responses"}
    assert ran(stops["until_regenerate"]) == before
    assert ran(stops["until_extract"]) == {"build_vocab", "extract_hidden_states"}
    assert ran(stops["until_train"]) == {"train_draft"}
    assert ran(stops["until_export"]) == {"export_draft"}


def test_the_whole_run_goes_on_from_the_last_stop(runs: Runs, stops: Any) -> None:
    assert ran(runs.run("train_eagle3")) == {"evaluate_draft", "describe_rows"}


def test_training_from_the_shards_of_a_finished_run_is_a_cache_hit(runs: Runs, stops: Any) -> None:
    assert runs.run("train_eagle3")["evaluate_draft"][1] in (0, 1)
    token_shards = runs.listed("token_shards")
    assert len(token_shards) == 3
    for shards in (["runs/tiny/token_shards.json"], token_shards):
        counts = runs.run("train_from_shards", shards)
        assert ran(counts) <= {"prepare_heldout"}
        assert counts["train_draft"] == counts["evaluate_draft"] == (0, 1)
        assert counts["extract_hidden_states"] == (0, 3)
        assert "regenerate_responses" not in counts


def test_training_from_the_states_of_a_finished_run_is_a_cache_hit(runs: Runs, stops: Any) -> None:
    runs.run("train_eagle3")
    places = runs.listed("hidden_states")
    for shards in (["runs/tiny/hidden_states.json"], places):
        counts = runs.run("train_from_states", shards)
        assert ran(counts) <= {"prepare_heldout", "build_vocab", "describe_rows"}
        assert counts["train_draft"] == counts["export_draft"] == counts["evaluate_draft"] == (0, 1)
        assert not counts.keys() & {"regenerate_responses", "extract_hidden_states"}
    summary = json.loads((runs.workplace / "runs/tiny/summary.json").read_text())
    assert summary["prompts"] == {"train": 10, "heldout": 2}


def test_states_at_another_place_train_another_draft_with_another_rate(
    runs: Runs, stops: Any, tmp_path: Path
) -> None:
    for place in runs.listed("hidden_states"):
        shutil.copytree(place, tmp_path / "moved" / Path(place).name)
    counts = runs.run("train_from_states", [str(tmp_path / "moved")], train={"learning_rate": 3e-3})
    assert ran(counts) >= {"train_draft", "export_draft", "evaluate_draft"}
    assert not counts.keys() & {"regenerate_responses", "extract_hidden_states"}


def test_prepared_shards_are_answered_first_and_share_the_whole_runs_answers(runs: Runs, stops: Any) -> None:
    result = runs.attempt("until_regenerate")
    assert result.exit_code == 0
    prepared = next((runs.workplace / "store").glob("prepare_data-*"))
    assert {p.name for p in prepared.glob("*.parquet")} >= {"heldout.parquet", "shard-00000.parquet"}
    counts = runs.run("train_from_shards", [str(prepared)])
    assert counts["regenerate_responses"] == counts["extract_hidden_states"] == (0, 3)
    assert counts["train_draft"] == (0, 1)


def test_hidden_states_that_do_not_fit_are_refused(runs: Runs, stops: Any, tmp_path: Path) -> None:
    places = runs.listed("hidden_states")

    def altered(name: str, change: Any) -> str:
        copy = tmp_path / name
        shutil.copytree(places[0], copy)
        change(copy)
        return str(copy)

    def other_target(path: Path) -> None:
        manifest = json.loads((path / "manifest.json").read_text())
        manifest["info"] |= {"target_digest": "another", "target_revision": "v0"}
        (path / "manifest.json").write_text(json.dumps(manifest))

    def cut(path: Path) -> None:
        chunk = next(path.glob("chunk-*"))
        chunk.write_bytes(chunk.read_bytes()[:-1])

    unfinished = altered("unfinished", lambda path: (path / "manifest.json").unlink())
    assert "manifest.json is missing: the shard was not finished" in runs.refusal(
        "train_from_states", [unfinished]
    )
    foreign = runs.refusal("train_from_states", [altered("foreign", other_target)])
    assert "revision v0, digest another; this run's is tiny/bytes" in foreign
    assert "bytes expected" in runs.refusal("train_from_states", [altered("cut", cut)])
    assert "are the same shard" in runs.refusal("train_from_states", [places[0], places[1], places[0]])
    layers = runs.refusal("train_from_states", places, extract={"layer_ids": [0, 1, 2]})
    assert "holds the aux layers [1, 2, 3], this run wants [0, 1, 2]" in layers
    assert "holds no finished hidden-state shard" in runs.refusal(
        "train_from_states", [str(tmp_path / "nowhere")]
    )
    assert "at least one shard must be given" in runs.refusal("train_from_states", [])
    wrong_list = runs.refusal("train_from_states", ["runs/tiny/token_shards.json"])
    assert (
        "lists token_shards, this workflow starts from hidden_states; train_from_shards takes it"
        in wrong_list
    )


def test_token_shards_that_do_not_fit_are_refused(runs: Runs, stops: Any, tmp_path: Path) -> None:
    places = runs.listed("token_shards")
    assert "are the same shard" in runs.refusal("train_from_shards", [places[0], places[0]])
    write_token_shard(tmp_path / "ids.parquet", [TokenRow("a:b", "x", [1, 10**6], [False, True])])
    assert "was prepared for another target" in runs.refusal(
        "train_from_shards", [str(tmp_path / "ids.parquet")]
    )
    (tmp_path / "torn.parquet").write_bytes(b"PAR1")
    assert "is not a readable token shard" in runs.refusal(
        "train_from_shards", [str(tmp_path / "torn.parquet")]
    )
    prepared = next((runs.workplace / "store").glob("prepare_data-*")) / "shard-00000.parquet"
    waits = runs.refusal("train_from_shards", [str(prepared)], regenerate={"enabled": False})
    assert "set regenerate.enabled to true" in waits
    heldout = read_token_shard(prepared.with_name("heldout.parquet"))
    leaked = [
        TokenRow(row.sample_id, "x", [*row.token_ids, 1], [False] * len(row.token_ids) + [True])
        for row in heldout
    ]
    write_token_shard(tmp_path / "leaked.parquet", leaked)
    assert "2 of 2 rows begin with a held-out prompt" in runs.refusal(
        "train_from_shards", [str(tmp_path / "leaked.parquet")]
    )
    listing = json.loads((runs.workplace / "runs/tiny/token_shards.json").read_text())
    listing["target"]["digest"] = "another"
    (tmp_path / "other.json").write_text(json.dumps(listing))
    assert "was made for the target" in runs.refusal("train_from_shards", [str(tmp_path / "other.json")])


def test_every_workflow_takes_the_same_recipe() -> None:
    inputs = {name: getattr(train_eagle3, name).python_interface.inputs for name in ("train_eagle3", *STOPS)}
    assert all(found == inputs["train_eagle3"] for found in inputs.values())
    for name in ("train_from_shards", "train_from_states"):
        found = dict(getattr(train_eagle3, name).python_interface.inputs)
        assert found.pop("shards") == list[str]
        assert found == inputs["train_eagle3"]
