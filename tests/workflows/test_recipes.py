"""Recipes: the shipped ones fit the workflow, and what does not fit is refused before anything runs."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from eagle3.config.run import RunSettings
from eagle3.planning.plan import make_plan
from eagle3.planning.preflight import check_target
from eagle3.planning.workload import Workload
from tests.helpers.configs import GPT_OSS_20B, LLAMA31_8B, QWEN3_8B, QWEN3_30B_A3B
from tests.helpers.flyte_runs import ROOT, pyflyte_run, write_prompts, write_recipe
from workflows.flyte import journal
from workflows.flyte.pods import pod_disks
from workflows.flyte.recipe import Recipe


def refusal(result: Any) -> str:
    """What the user reads, and proof that nothing ran."""
    assert result.exit_code != 0
    assert "Running Execution" not in result.output
    return f"{result.output} {result.exception}"


@pytest.mark.parametrize("path", sorted((ROOT / "workflows/recipes").glob("*.yaml")), ids=lambda p: p.name)
def test_shipped_recipes_fit_the_workflows(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    recipe = Recipe.model_validate(yaml.safe_load(path.read_text()))
    assert recipe.run_name == path.stem


TARGETS = {
    "llama31_8b_h200": LLAMA31_8B,
    "qwen3_8b_h200": QWEN3_8B,
    "qwen3_30b_a3b_h200": QWEN3_30B_A3B,
    "gpt_oss_20b_h200": GPT_OSS_20B,
}
ROWS, PROMPT_TOKENS, ANSWER_TOKENS = 50_000, 200, 1_000


def settings_of(name: str) -> RunSettings:
    blocks = yaml.safe_load((ROOT / f"workflows/recipes/{name}.yaml").read_text())
    return RunSettings.model_validate(
        {name: blocks[name] for name in RunSettings.model_fields if name in blocks}
    )


def test_every_recipe_for_a_cluster_is_checked_against_its_target() -> None:
    assert TARGETS.keys() == {path.stem for path in (ROOT / "workflows/recipes").glob("*_h200.yaml")}


@pytest.mark.parametrize("name", TARGETS)
def test_no_stage_would_refuse_a_shipped_recipe(name: str) -> None:
    cfg = settings_of(name)
    check_target(cfg, TARGETS[name], name, pod_disks(cfg.resources))


@pytest.mark.parametrize("name", TARGETS)
def test_a_recipes_comment_states_what_the_plan_works_out(name: str) -> None:
    cfg = settings_of(name)
    tokens = ROWS * (PROMPT_TOKENS + ANSWER_TOKENS)
    work = Workload(
        rows=ROWS,
        shards=-(-ROWS // cfg.data.rows_per_shard),
        waiting_rows=ROWS,
        prompt_tokens=ROWS * PROMPT_TOKENS,
        new_tokens=ROWS * ANSWER_TOKENS,
        tokens=tokens,
        supervised=ROWS * ANSWER_TOKENS,
        max_tokens=tokens,
        max_supervised=tokens,
    )
    plan = make_plan(cfg, TARGETS[name], name, [], 200, work)
    fp8 = make_plan(
        cfg.model_copy(update={"extract": cfg.extract.model_copy(update={"encoding": "fp8"})}),
        TARGETS[name],
        name,
        [],
        200,
        work,
    )
    comment = (ROOT / f"workflows/recipes/{name}.yaml").read_text().partition("run_name:")[0]
    parts = ", ".join(f"{stage.gpu_hours:.1f} {stage.stage}" for stage in plan.stages)
    for said in (
        "Estimates by workflows/plan.py, not measurements",
        f"{plan.state_bytes / 1e12:.2f} TB compressed, {fp8.state_bytes / 1e12:.2f} TB with",
        f"{sum(s.gpu_hours for s in plan.stages):.1f} GPU-hours: {parts}",
        f"{sum(s.hours for s in plan.stages):.1f} hours, with",
    ):
        assert said in comment


@pytest.mark.parametrize(
    ("blocks", "complaint"),
    [
        ({"trian": {"epochs": 2}}, "trian: no such setting"),
        ({"train": {"epoch": 2}}, "epoch"),
        ({"target": {"nmae": "x"}}, "nmae"),
        ({"engine": {"engine": "tensorrt"}}, "engine"),
    ],
)
def test_unknown_keys_are_refused(
    workplace: Path, tmp_path: Path, blocks: dict[str, Any], complaint: str
) -> None:
    prompts = write_prompts(tmp_path / "prompts.jsonl", 0, 4)
    assert complaint in refusal(
        pyflyte_run(write_recipe(tmp_path / "recipe.yaml", tmp_path, prompts, **blocks))
    )


def test_missing_prompts_are_refused(workplace: Path, tmp_path: Path) -> None:
    journal.start()
    result = pyflyte_run(write_recipe(tmp_path / "recipe.yaml", tmp_path, tmp_path / "nowhere.jsonl"))
    assert result.exit_code != 0
    assert "nowhere.jsonl" in "".join(result.output.split())
    assert not journal.entries()
