"""Errors of a wrong recipe: their last words name the key and what came, before anything runs."""

import re
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.flyte_runs import ROOT, pyflyte_run, words, write_prompts, write_recipe
from workflows.flyte import journal


@pytest.fixture
def prompts(workplace: Path) -> Path:
    return write_prompts(workplace / "prompts.jsonl", 0, 4)


@pytest.mark.parametrize(
    ("file", "missing"), [("train_eagle3", "target"), ("retrain_eagle3", "target, promote")]
)
def test_missing_inputs_of_a_recipe_are_named(workplace: Path, file: str, missing: str) -> None:
    recipe = workplace / "recipe.yaml"
    recipe.write_text(f"heldout: {write_prompts(workplace / 'heldout.jsonl', 0, 2)}")
    said = words(pyflyte_run(recipe, f"{file}.py", file))
    assert said.endswith(f"{file} needs {missing}: add to the recipe, or give --target")


@pytest.mark.parametrize(
    ("blocks", "said"),
    [
        ({"train": {"epohcs": 3}}, "train.epohcs: no such setting, correct or remove it, got 3"),
        (
            {"resources": {"engine": {"mem": 8}}},
            'resources.engine.mem: a quantity of bytes must have a unit, got 8; write "8Gi"',
        ),
    ],
)
def test_a_wrong_setting_ends_in_one_line(
    workplace: Path, prompts: Path, blocks: dict[str, Any], said: str
) -> None:
    result = pyflyte_run(write_recipe(workplace / "recipe.yaml", workplace, prompts, **blocks))
    assert words(result).endswith(said)
    assert "Running Execution" not in result.output


@pytest.mark.parametrize("workflow", ["train_eagle3", "until_train", "train_from_states"])
def test_a_run_name_that_leads_elsewhere_is_refused_before_anything_is_written(
    workplace: Path, tiny_target: Path, prompts: Path, workflow: str
) -> None:
    recipe = write_recipe(workplace / "recipe.yaml", tiny_target, prompts)
    recipe.write_text(recipe.read_text().replace("run_name: tiny", 'run_name: ".."'))
    more = ["--shards", '["nowhere"]'] if workflow == "train_from_states" else []
    said = words(pyflyte_run(recipe, workflow=workflow, more=more))
    assert "run_name must be the name of a directory in runs/" in said
    assert "got '..'; choose another" in said
    assert not journal.entries()
    assert not (workplace / "runs").exists()


def test_a_missing_file_ends_with_the_message_in_the_docs(workplace: Path, prompts: Path) -> None:
    docs = (ROOT / "docs/cluster.md").read_text()
    (unconverted,) = re.findall(r"`(Cannot convert from <file> to [^`]*)`", docs)
    (invalid,) = re.findall(r"`(Invalid value for '--heldout': [^`]*<file>)`", docs)
    without_prompts = write_recipe(workplace / "recipe.yaml", workplace, workplace / "nowhere.jsonl")
    said = words(pyflyte_run(without_prompts))
    assert unconverted.replace("<file>", str(workplace / "nowhere.jsonl")) in said
    assert "'prompts'" in said
    without_heldout = write_recipe(workplace / "recipe.yaml", workplace, prompts)
    without_heldout.with_suffix(".heldout.jsonl").unlink()
    heldout = without_heldout.with_suffix(".heldout.jsonl")
    assert invalid.replace("<file>", str(heldout)) in words(pyflyte_run(without_heldout))
