"""Recipes: the shipped ones fit the workflow, and what does not fit is refused before anything runs."""

from pathlib import Path
from typing import Any, get_type_hints

import pytest
import yaml
from flyte_runs import ROOT, pyflyte_run, write_prompts, write_recipe

from eagle3.config import StageConfig
from workflows import journal
from workflows.train_eagle3 import train_eagle3


def refusal(result: Any) -> str:
    """What the user reads, and proof that nothing ran."""
    assert result.exit_code != 0
    assert "Running Execution" not in result.output
    return f"{result.output} {result.exception}"


@pytest.mark.parametrize("path", sorted((ROOT / "workflows/recipes").glob("*.yaml")), ids=lambda p: p.name)
def test_shipped_recipes_fit_the_workflow(path: Path) -> None:
    inputs = get_type_hints(train_eagle3._workflow_function)
    for name, value in yaml.safe_load(path.read_text()).items():
        kind = inputs[name]
        if name in ("prompts", "heldout"):
            assert (ROOT / value).exists()
        elif issubclass(kind, StageConfig):
            kind(**value)


@pytest.mark.parametrize(
    ("blocks", "complaint"),
    [
        ({"trian": {"epochs": 2}}, "--trian"),
        ({"train": {"epoch": 2}}, "epoch"),
        ({"target": {"nmae": "x"}}, "nmae"),
        ({"engine": {"engine": "tensorrt"}}, "engine"),
    ],
)
def test_unknown_keys_are_refused(workplace: Path, tmp_path: Path, blocks: dict[str, Any], complaint: str) -> None:
    prompts = write_prompts(tmp_path / "prompts.jsonl", 0, 4)
    assert complaint in refusal(pyflyte_run(write_recipe(tmp_path / "recipe.yaml", tmp_path, prompts, **blocks)))


def test_missing_prompts_are_refused(workplace: Path, tmp_path: Path) -> None:
    journal.start()
    result = pyflyte_run(write_recipe(tmp_path / "recipe.yaml", tmp_path, tmp_path / "nowhere.jsonl"))
    assert result.exit_code != 0
    assert "nowhere.jsonl" in result.output
    assert not journal.entries()


@pytest.mark.parametrize(
    ("blocks", "complaint"),
    [
        ({"vocab": {"size": 10**6}}, "lower vocab.size"),
        ({"extract": {"layer_ids": [1, 9]}}, "extract.layer_ids"),
        ({"data": {"min_shards": 3}}, "min_shards"),
        ({"target": {"public_name": ""}}, "public_name"),
        ({"target": {"name": "/nowhere/at/all"}}, "/nowhere/at/all"),
        ({"train": {"init_from": "runs/absent"}}, "a pod cannot read directories of your machine"),
    ],
)
def test_impossible_settings_are_refused_before_the_engine_starts(
    workplace: Path, tiny_target: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, blocks: dict[str, Any], complaint: str
) -> None:
    from eagle3.target import engine

    monkeypatch.setattr(engine, "_run", lambda *_, **__: pytest.fail("the engine was started"))
    prompts = write_prompts(tmp_path / "prompts.jsonl", 0, 4)
    result = pyflyte_run(write_recipe(tmp_path / "recipe.yaml", tiny_target, prompts, **blocks))
    assert result.exit_code != 0
    assert complaint in " ".join(result.output.split())
