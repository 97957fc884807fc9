"""Errors of a wrong recipe: their last words name the key and what came, before anything runs."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.helpers.flyte_runs import ROOT, pyflyte_run, words, write_prompts, write_recipe
from workflows.flyte import journal


@pytest.fixture
def prompts(workplace: Path) -> Path:
    return write_prompts(workplace / "prompts.jsonl", 0, 4)


def test_missing_inputs_of_a_recipe_are_named(workplace: Path) -> None:
    recipe = workplace / "recipe.yaml"
    recipe.write_text("vocab: {size: 7}")
    said = words(pyflyte_run(recipe))
    assert said.endswith(
        "target must be set; add it to the recipe; heldout must be set; add it to the recipe"
    )


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


@pytest.mark.parametrize("name", ["prompts", "heldout"])
def test_a_missing_file_ends_with_the_message_in_the_docs(workplace: Path, prompts: Path, name: str) -> None:
    (message,) = re.findall(r"`(prompts must be [^`]*<file>[^`]*)`", (ROOT / "docs/cluster.md").read_text())
    recipe = write_recipe(workplace / "recipe.yaml", workplace, prompts)
    missing = workplace / "nowhere.jsonl"
    recipe.write_text(yaml.safe_dump(yaml.safe_load(recipe.read_text()) | {name: str(missing)}))
    said = words(pyflyte_run(recipe))
    assert said.endswith(message.replace("<file>", str(missing)).replace("prompts", name, 1))
