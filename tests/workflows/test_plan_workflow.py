"""The plan workflow on a run's own recipe: it fetches no weights, and shares the cache with prepare."""

import json
import time
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result

from tests.helpers.flyte_runs import pyflyte_run, write_prompts, write_recipe
from workflows.flyte import journal, store

pytestmark = pytest.mark.slow


class Planner:
    """Plans and runs of one recipe in one workplace."""

    def __init__(self, workplace: Path, target: Path) -> None:
        self.workplace, self.target = workplace, target

    def recipe(self, **blocks: Any) -> Path:
        prompts = write_prompts(self.workplace / "prompts.jsonl", 0, 10)
        return write_recipe(self.workplace / "recipe.yaml", self.target, prompts, **blocks)

    def plan(self, **blocks: Any) -> tuple[dict[str, Any], Result]:
        result = pyflyte_run(self.recipe(**blocks), "plan.py", "plan")
        assert result.exit_code == 0, (result.output, result.exception)
        made: dict[str, Any] = json.loads((self.workplace / "runs/tiny/plan.json").read_text())
        return made, result


@pytest.fixture(scope="module")
def planner(workplace: Path, tiny_target: Path) -> Planner:
    return Planner(workplace, tiny_target)


def test_a_plan_counts_rows_and_tokens_and_shows_its_assumptions(planner: Planner) -> None:
    start = time.monotonic()
    made, result = planner.plan()
    assert time.monotonic() - start < 30
    assert (made["work"]["rows"], made["work"]["shards"], made["heldout"]) == (10, 3, 2)
    assert made["work"]["max_supervised"] == 10 * 12
    assert made["sources"][0]["basis"] == "counted"
    for text in ("10 in 3 shards", "estimates, not measurements", "assumed:", "tiny/bytes"):
        assert text in result.output
    assert not list(store.root().glob("*"))


def test_prepare_alone_and_the_whole_run_share_one_cache_entry(
    planner: Planner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """prepare_shards fetches no weights; the driver, which does, still finds its shards."""
    from eagle3.engine import engine

    def far_enough(*_: Any, **__: Any) -> None:
        raise RuntimeError("far enough")

    assert pyflyte_run(planner.recipe(), "prepare_data.py", "prepare_shards").exit_code == 0
    assert [e.cached for e in journal.entries() if e.stage == "prepare_data"] == [False]
    assert not list(store.root().glob("target-*"))
    monkeypatch.setattr(engine, "generate", far_enough)
    assert pyflyte_run(planner.recipe()).exit_code != 0
    assert [e.cached for e in journal.entries() if e.stage == "prepare_data"] == [True]
    assert list(store.root().glob("target-*/*.safetensors"))


def test_a_plan_notes_that_this_disk_is_too_small(planner: Planner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "free_bytes", lambda: 10)
    assert "a run on this machine would be refused" in planner.plan()[1].output
