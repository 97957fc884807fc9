"""Retraining: from the promoted draft, promoted unless it is worse; and the launch plans that do so every
night."""

import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest
from flyteidl.admin.launch_plan_pb2 import LaunchPlan
from flytekit.exceptions.user import FlyteRecoverableException
from flytekit.types.directory import FlyteDirectory
from flytekit.types.file import FlyteFile

from eagle3 import promotion
from eagle3.config.training import PromoteConfig
from tests.helpers.flyte_runs import ROOT, make_recipe, pod, pyflyte_run, write_prompts, write_recipe
from workflows import launchplans
from workflows.flyte import journal
from workflows.flyte.interfaces import DraftExport, EvaluationReport, Target, TokenShard
from workflows.tasks.promote_draft import find_current_draft, promote_draft

pytestmark = pytest.mark.slow

AS_IN_RECIPE = {"prompts": "", "heldout": "", "run_name": ""}


@pytest.fixture(scope="module")
def prompts(workplace: Path) -> Path:
    return write_prompts(workplace / "prompts.jsonl", 0, 10)


@pytest.fixture
def retrain(
    workplace: Path, tiny_target: Path, prompts: Path, monkeypatch: pytest.MonkeyPatch, light: None
) -> Any:
    """Run, with an evaluation that gives drafts the acceptance told for each; returns the output."""
    from eagle3.evaluation import benchmark

    def run(
        lengths: dict[str, float],
        heldout: int = 100,
        fails: bool = False,
        identical: bool = True,
        **blocks: Any,
    ) -> str:
        plain = benchmark.evaluate

        def evaluate(*inputs: Any, **how: Any) -> dict[str, Any]:
            figures = plain(*inputs, **how)
            length = lengths["current" if "promoted/drafts" in inputs[1] else "new"]
            return {**figures, "acceptance_length": length, "outputs_identical": identical}

        recipe = write_recipe(workplace / "recipe.yaml", tiny_target, prompts, **blocks)
        write_prompts(recipe.with_suffix(".heldout.jsonl"), heldout, heldout + 2)
        with monkeypatch.context() as patch:
            patch.setattr(benchmark, "evaluate", evaluate)
            place = ["--promote", json.dumps({"place": "runs/promoted", "margin": 0.1})]
            result = pyflyte_run(recipe, "retrain_eagle3.py", "retrain_eagle3", place)
        assert (result.exit_code != 0) == fails, (result.output, result.exception)
        return "".join(result.output.split())

    return run


def promoted(workplace: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((workplace / "runs/promoted/promoted.json").read_text())
    return found


@pytest.mark.slow
def test_nights_in_a_row(retrain: Any, workplace: Path) -> None:
    assert "promoted:itisthefirst" in retrain({"new": 1.5})
    first = promoted(workplace)
    assert first["number"] == 1
    assert Path(first["export"], "model.safetensors").exists()

    # The second starts from the first, is worse within the margin, and takes its place.
    assert "promoted:acceptancelength1.450after1.500" in retrain({"new": 1.45}, train={"learning_rate": 2e-3})
    second = promoted(workplace)
    assert (second["number"], second["previous"]) == (2, first["digest"])
    assert Path(first["export"], "model.safetensors").exists()

    # Worse beyond the margin, and text that changes: the second stays.
    assert "notpromoted:itisworse" in retrain({"new": 1.2}, train={"learning_rate": 3e-3})
    assert "notpromoted:thetextwiththedraftdiffers" in retrain(
        {"new": 9.0}, identical=False, train={"learning_rate": 4e-3}
    )
    assert promoted(workplace) == second

    # Other held-out prompts: both drafts are measured on them.
    lengths = {"new": 1.1, "current": 1.15}
    assert "promoted:acceptancelength1.100after1.150" in retrain(
        lengths, heldout=200, train={"learning_rate": 5e-3}
    )
    assert sum(e.stage == "evaluate_draft" and not e.cached for e in journal.entries()) == 2
    assert promoted(workplace)["number"] == 3


@pytest.mark.slow
def test_a_broken_pointer_ends_the_run_before_anything_starts(retrain: Any, workplace: Path) -> None:
    path = workplace / "runs/promoted/promoted.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("{")
    journal.start()
    assert "doesnotnameapromoteddraft" in retrain({"new": 2.0}, fails=True)
    assert not journal.entries()
    assert path.read_text() == "{"


def test_the_launch_plans_are_packaged_with_schedule_inputs_and_notifications(tmp_path: Path) -> None:
    program = "from flytekit.clis.sdk_in_container.pyflyte import main; main()"
    command = [sys.executable, "-c", program, "--pkgs", "workflows", "package", "--fast"]
    command += ["--source", str(ROOT), "--output", str(tmp_path / "package.tgz")]
    env = os.environ | {"PYTHONPATH": str(ROOT), "HOME": str(tmp_path), "EAGLE3_OWNERS": "a@x.org, b@x.org"}
    env |= {
        "EAGLE3_TRAFFIC": "s3://b/traffic.jsonl",
        "EAGLE3_HELDOUT": "s3://b/h.jsonl",
        "EAGLE3_PROMOTED": "s3://b/drafts",
    }
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    with tarfile.open(tmp_path / "package.tgz") as package:
        plans = [
            LaunchPlan.FromString(package.extractfile(m).read()) for m in package if m.name.endswith("_3.pb")
        ]  # type: ignore[union-attr]
    found = {plan.id.name: plan.spec for plan in plans}
    nightly = found["nightly_retraining"]
    assert nightly.workflow_id.name == "workflows.retrain_eagle3.retrain_eagle3"
    assert nightly.entity_metadata.schedule.cron_schedule.schedule == "0 2 * * *"
    for name in ("nightly_retraining", "retraining"):
        (notification,) = found[name].entity_metadata.notifications
        assert list(notification.email.recipients_email) == ["a@x.org", "b@x.org"]
        assert len(notification.phases) == 4
    assert not found["retraining"].entity_metadata.schedule.cron_schedule.schedule
    fixed = nightly.fixed_inputs.literals
    assert b"s3://b/traffic.jsonl" in fixed["recipe"].scalar.binary.value
    assert b"s3://b/drafts" in fixed["promote"].scalar.binary.value
    # Nobody is asked for the rest.
    assert all(parameter.HasField("default") for parameter in nightly.default_inputs.parameters.values())


@pytest.fixture
def places(monkeypatch: pytest.MonkeyPatch) -> None:
    """The launch plans' places, which are read from the environment when the module is imported."""
    for name in ("TRAFFIC", "HELDOUT", "PROMOTED"):
        monkeypatch.setattr(launchplans, name, f"s3://b/{name.lower()}")


@pytest.mark.usefixtures("places")
def test_plans_take_a_recipe(tmp_path: Path) -> None:
    path = write_recipe(tmp_path / "own.yaml", tmp_path, tmp_path / "p.jsonl", train={"learning_rate": 5e-3})
    inputs = launchplans.inputs_of(path)
    recipe = inputs["recipe"]
    assert (recipe.train.learning_rate, recipe.evaluate.dtype) == (5e-3, "float32")
    assert (recipe.target.public_name, recipe.vocab.size, recipe.run_name) == ("tiny/bytes", 64, "nightly")
    assert recipe.prompts.remote_source == "s3://b/traffic"
    assert recipe.heldout.remote_source == "s3://b/heldout"
    assert (inputs["promote"].place, inputs["promote"].warm_rate_share) == ("s3://b/promoted", 0.2)
    shipped = launchplans.inputs_of(launchplans.SHIPPED)["recipe"]
    assert shipped.train.learning_rate == pytest.approx(1e-4)


def test_a_run_by_hand_may_have_other_files_and_another_name(tmp_path: Path) -> None:
    promote = PromoteConfig(place=str(tmp_path / "drafts"))
    others = {"prompts": "s3://b/other.jsonl", "heldout": "", "run_name": "tonight"}
    found = find_current_draft(recipe=make_recipe(run_name="nightly"), promote=promote, **others).recipe
    assert (found.prompts.remote_source, found.run_name) == ("s3://b/other.jsonl", "tonight")
    assert found.heldout.remote_source == "s3://bucket/file"


def test_rates_are_lowered_where_there_is_a_draft_to_go_on_from_and_only_there(tmp_path: Path) -> None:
    recipe = make_recipe(train={"learning_rate": 1e-3, "muon_learning_rate": 1e-2})
    promote = PromoteConfig(place=str(tmp_path / "drafts"), warm_rate_share=0.2)
    assert find_current_draft(recipe=recipe, promote=promote, **AS_IN_RECIPE).recipe.train == recipe.train
    export = tmp_path / "export"
    export.mkdir()
    for name in promotion.FILES:
        (export / name).write_text(name)
    new = promotion.Promoted(
        number=1,
        export="set later",
        digest="d",
        acceptance_length=2.0,
        heldout_digest="h",
        target="t",
        target_digest="t",
    )
    kept = promotion.promote(promote.place, str(export), new).export
    for is_warm, factor in ((True, 0.2), (False, 1.0)):
        asked = promote.model_copy(update={"warm_start": is_warm})
        found = find_current_draft(recipe=recipe, promote=asked, **AS_IN_RECIPE).recipe.train
        assert (found.learning_rate, found.muon_learning_rate) == pytest.approx(
            (factor * 1e-3, factor * 1e-2)
        )
        assert found.init_from == (kept if is_warm else "")


@pytest.mark.usefixtures("places")
def test_plans_refuse_what_is_no_recipe(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"EAGLE3_RECIPE must be the path of a recipe, got .*absent.yaml"):
        launchplans.inputs_of(tmp_path / "absent.yaml")
    (tmp_path / "other.yaml").write_text("targett: {name: x}\n")
    with pytest.raises(ValueError, match="targett: no such setting"):
        launchplans.inputs_of(tmp_path / "other.yaml")


def test_a_place_that_would_end_with_its_pod_is_refused_before_anything_starts(tmp_path: Path) -> None:
    with (
        pod(tmp_path),
        pytest.raises(ValueError, match="promote.place must be a URL in a cluster, got runs/promoted"),
    ):
        find_current_draft.task_function(
            recipe=make_recipe(), promote=PromoteConfig(place="runs/promoted"), **AS_IN_RECIPE
        )


def test_a_promotion_cut_off_behind_its_record_is_tried_again_and_promotes_once(
    s3: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in promotion.FILES:
        (tmp_path / name).write_text(name)
    draft, file = (
        DraftExport(FlyteDirectory(str(tmp_path)), "new"),
        FlyteFile(str(tmp_path / promotion.FILES[0])),
    )
    report = EvaluationReport(file, draft.directory, 2.0, 2.0, True, [0.5])
    inputs = {
        "draft": draft,
        "report": report,
        "current": [],
        "opponent_report": report,
        "number": 0,
        "heldout": TokenShard(0, file, 1, 1, 1, "heldout"),
        "target": Target("org/model", "r", "target", FlyteDirectory(str(tmp_path)), 4, 9, 8),
        "recipe": make_recipe(),
        "promote": PromoteConfig(place="s3://states/drafts"),
    }

    def lose(*_: object) -> None:
        raise ConnectionError("the store hung up")

    with pod(tmp_path):
        with monkeypatch.context() as patch:
            patch.setattr(promotion, "write_bytes", lose)
            with pytest.raises(FlyteRecoverableException, match="promote_draft: the store hung up"):
                promote_draft.task_function(**inputs)
        made = promote_draft.task_function(**inputs)
    assert (made.promoted, made.export) == (True, "s3://states/drafts/drafts/new")
    assert s3.ls("states/drafts/promotions", detail=False) == ["states/drafts/promotions/00001.json"]
    assert json.loads(s3.cat("states/drafts/promoted.json"))["number"] == 1


def test_plans_with_half_of_their_places_are_refused_and_without_any_there_are_none() -> None:
    program = "import workflows.launchplans; from flytekit import LaunchPlan; print(sorted(LaunchPlan.CACHE))"
    env = {name: value for name, value in os.environ.items() if not name.startswith("EAGLE3_")} | {
        "PYTHONPATH": str(ROOT)
    }
    for given, said in (
        ({}, "[]"),
        ({"EAGLE3_TRAFFIC": "s3://b/t"}, "launch plans need all of EAGLE3_TRAFFIC, EAGLE3_HELDOUT"),
    ):
        done = subprocess.run(
            [sys.executable, "-c", program], env=env | given, capture_output=True, text=True, timeout=120
        )
        assert said in (done.stdout if not given else done.stderr)
