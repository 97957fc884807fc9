"""Errors of a wrong recipe: their last words name the key and what came, before anything runs."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from flytekit.interaction.click_types import JsonParamType

from tests.helpers.flyte_runs import ROOT, pyflyte_run, words, write_prompts, write_recipe
from workflows.flyte import journal
from workflows.flyte.recipe import Recipe


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


def read_recipe(workplace: Path, prompts: Path, target: str, run_name: str, heldout: str = "") -> Recipe:
    """Read a recipe with scalars as written here, as `pyflyte run --recipe` does."""
    path = workplace / "scalars.yaml"
    path.write_text(f"target: {target}\nheldout: {heldout or prompts}\nrun_name: {run_name}\n")
    recipe: Recipe = JsonParamType(Recipe).convert(str(path), None, None)
    return recipe


@pytest.mark.parametrize("date", ["2026-11-30", "2026-11-30 10:00:00", "2026-11-30T10:00:00Z"])
def test_a_date_in_a_recipe_is_text_as_written(workplace: Path, prompts: Path, date: str) -> None:
    recipe = read_recipe(workplace, prompts, f"{{name: org/name, revision: {date[:10]}}}", date)
    assert recipe.run_name == date
    assert recipe.target.revision == "2026-11-30"


@pytest.mark.parametrize(("scalar", "read"), [("20261130", "20261130"), ("no", "False"), ("1.10", "1.1")])
def test_a_scalar_that_yaml_reads_as_no_text_is_refused_with_the_quotes_to_add(
    workplace: Path, prompts: Path, scalar: str, read: str
) -> None:
    must = f"YAML reads {read}; put it in quotes in the recipe"
    with pytest.raises(ValueError, match=f"run_name must be text, {must}"):
        read_recipe(workplace, prompts, "{name: org/name}", scalar)
    with pytest.raises(ValueError, match=f"target.revision must be text, {must}"):
        read_recipe(workplace, prompts, f"{{name: org/name, revision: {scalar}}}", "run")
    with pytest.raises(ValueError, match=f"heldout must be a path or URL, {must}"):
        read_recipe(workplace, prompts, "{name: org/name}", "run", heldout=scalar)
