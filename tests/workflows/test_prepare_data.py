"""The prepare stage by itself, from a run's recipe: shards, counts, report; what changes its cache key."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import Result

from tests.helpers.flyte_runs import pyflyte_run, write_prompts, write_recipe
from workflows.flyte import journal


def runs_and_hits() -> tuple[int, int]:
    mine = [e for e in journal.entries() if e.stage == "prepare_data"]
    return sum(not e.cached for e in mine), sum(e.cached for e in mine)


@pytest.fixture
def run(workplace: Path, tiny_target: Path, tmp_path: Path) -> Any:
    def prepare(sources: list[dict[str, Any]], prompts: Path | None = None, **data: Any) -> Result:
        recipe = write_recipe(
            tmp_path / "recipe.yaml", tiny_target, prompts or Path(), data={"sources": sources, **data}
        )
        if not prompts:
            settings = yaml.safe_load(recipe.read_text())
            del settings["prompts"]
            recipe.write_text(yaml.safe_dump(settings))
        return pyflyte_run(recipe, "prepare_data.py", "prepare_shards")

    return prepare


def test_sources_become_shards_with_counts_and_report(run: Any, workplace: Path, tmp_path: Path) -> None:
    chats = tmp_path / "chats.jsonl"
    chats.write_text(
        json.dumps({"conversations": [{"from": "human", "value": "x"}, {"from": "gpt", "value": "<b>"}]})
        + "\n{}\n"
    )
    sources = [{"path": str(chats), "name": "chats", "thinking": False, "regenerate": False}]
    result = run(sources, write_prompts(tmp_path / "prompts.jsonl", 0, 5))
    assert result.exit_code == 0, (result.output, result.exception)
    report = json.loads((workplace / "runs/tiny/data.json").read_text())
    assert {name: figures["rows_kept"] for name, figures in report["sources"].items()} == {
        "train": 5,
        "chats": 1,
    }
    assert report["sources"]["chats"]["dropped"] == {"no_conversation": 1}
    page = (workplace / "runs/tiny/data.html").read_text()
    assert "<mark>&lt;b&gt;" in page
    assert "chats.jsonl" not in page
    assert "1 of 2 rows (1 no_conversation)" in result.output
    assert "6 in 3 shards, 2 held out" in result.output
    # Coverage is known for the rows that keep their own answers, and for no others.
    assert list(report["vocab"]["by_source"]) == ["chats"]
    assert report["vocab"]["size"] == 64
    assert report["vocab"]["by_source"]["chats"] == [report["sources"]["chats"]["supervised_tokens"]] * 2
    assert "train: the coverage is known when the target has answered" in page


def test_only_a_change_of_content_prepares_again(run: Any, tmp_path: Path) -> None:
    one = write_prompts(tmp_path / "one.jsonl", 10, 14)
    assert run([{"path": str(one), "name": "x"}]).exit_code == 0
    assert runs_and_hits() == (1, 0)
    assert run([{"path": str(one), "name": "x"}]).exit_code == 0
    assert runs_and_hits() == (0, 1)
    write_prompts(one, 10, 15)
    assert run([{"path": str(one), "name": "x"}]).exit_code == 0
    assert runs_and_hits() == (1, 0)


def test_a_moved_source_is_not_prepared_again(run: Any, tmp_path: Path) -> None:
    one, two = write_prompts(tmp_path / "one.jsonl", 30, 34), write_prompts(tmp_path / "two.jsonl", 34, 36)
    excluded = [{"path": str(two)}]
    assert run([{"path": str(one), "name": "x"}], excluded=excluded, workers=1).exit_code == 0
    (tmp_path / "elsewhere").mkdir()
    moved = one.rename(tmp_path / "elsewhere" / "one.jsonl")
    assert run([{"path": str(moved), "name": "x"}], excluded=excluded, workers=2).exit_code == 0
    assert runs_and_hits() == (0, 1)
    assert run([{"path": str(moved), "name": "y"}], excluded=excluded).exit_code == 0
    assert runs_and_hits() == (1, 0)  # the name is in the rows


def test_where_all_rows_wait_no_coverage_is_shown(run: Any, workplace: Path, tmp_path: Path) -> None:
    result = run([], write_prompts(tmp_path / "prompts.jsonl", 20, 24))
    assert result.exit_code == 0, (result.output, result.exception)
    assert "vocab" not in json.loads((workplace / "runs/tiny/data.json").read_text())
    assert (
        "train: the coverage is known when the target has answered"
        in (workplace / "runs/tiny/data.html").read_text()
    )
    assert not [e for e in journal.entries() if e.stage == "describe_rows"]


def test_nothing_to_train_on_is_an_error(run: Any) -> None:
    result = run([])
    assert result.exit_code != 0
    assert "give prompts, data.sources or both" in " ".join(result.output.split())
