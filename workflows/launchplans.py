"""Scheduled retraining: two launch plans, made if their URIs are set; a schedule runs once it is activated.

    export EAGLE3_TRAFFIC=s3://bucket/traffic.jsonl EAGLE3_HELDOUT=… EAGLE3_PROMOTED=… EAGLE3_OWNERS=a@example.com,b@example.com
    export EAGLE3_RECIPE=runs/mine.yaml    (target, machines and settings; without it Qwen3-8B on H200s)
    pyflyte register --copy all --activate-launchplans workflows    (with another --version when only the URIs changed)

Everything here is read when the plans are registered; pods read none of it.
"""

import json
import os
from pathlib import Path
from typing import Any

import yaml
from flytekit import CronSchedule, Email, LaunchPlan
from flytekit.models.core.execution import WorkflowExecutionPhase

from eagle3.config.training import PromoteConfig
from workflows.flyte.recipe import Recipe
from workflows.retrain_eagle3 import retrain_eagle3

SHIPPED = Path(__file__).parent / "recipes" / "qwen3_8b_h200.yaml"
RECIPE = Path(os.environ.get("EAGLE3_RECIPE", "").strip() or SHIPPED)
# One name for what changes from night to night. Rows that did not change are answered and captured once;
# training starts from the promoted draft, so it runs every night.
VARIABLES = ("EAGLE3_TRAFFIC", "EAGLE3_HELDOUT", "EAGLE3_PROMOTED", "EAGLE3_OWNERS")
TRAFFIC, HELDOUT, PROMOTED, owners = (os.environ.get(name, "").strip() for name in VARIABLES)
OWNERS = [name.strip() for name in owners.split(",") if name.strip()]
EVERY_NIGHT = "0 2 * * *"  # UTC
# Share of the recipe's learning rates when training starts from the promoted draft. Not measured.
WARM_RATE_SHARE = 0.2
# Drafts are promoted only where text with and without them is the same (promote.identical_text), which
# bfloat16's rounding does not keep; that float32 keeps it was seen on CPUs only.
EVALUATE = {"dtype": "float32"}
ENDED = [
    WorkflowExecutionPhase.SUCCEEDED,
    WorkflowExecutionPhase.FAILED,
    WorkflowExecutionPhase.ABORTED,
    WorkflowExecutionPhase.TIMED_OUT,
]


def inputs_of(path: Path) -> dict[str, Any]:
    """The inputs that both plans fix: the recipe, with the URIs above, and where drafts are promoted.

    Raises:
        ValueError: if the file is not a recipe.
    """
    if not path.is_file():
        raise ValueError(
            f"EAGLE3_RECIPE must be the path of a recipe, got {path}, which is no file; correct it or unset it"
        )
    blocks = yaml.safe_load(path.read_text())
    blocks |= {"prompts": TRAFFIC, "heldout": HELDOUT, "run_name": "nightly"}
    blocks["evaluate"] = blocks.get("evaluate", {}) | EVALUATE
    promote = PromoteConfig(place=PROMOTED, warm_rate_share=WARM_RATE_SHARE)
    return {"recipe": Recipe.model_validate_json(json.dumps(blocks)), "promote": promote}


def make_plans() -> None:
    """Make both plans; flytekit finds them by their registration, not by name."""
    inputs = inputs_of(RECIPE)
    mail = [Email(phases=ENDED, recipients_email=OWNERS)]
    LaunchPlan.get_or_create(
        workflow=retrain_eagle3,
        name="nightly_retraining",
        schedule=CronSchedule(schedule=EVERY_NIGHT),
        fixed_inputs=inputs,
        notifications=mail,
    )
    # The same run by hand, if asked on other files or under another name.
    LaunchPlan.get_or_create(
        workflow=retrain_eagle3, name="retraining", fixed_inputs=inputs, notifications=mail
    )


# Without their URIs there are no plans: one that is activated with someone else's would fail every night.
if TRAFFIC and HELDOUT and PROMOTED and OWNERS:
    make_plans()
elif TRAFFIC or HELDOUT or PROMOTED or OWNERS:
    raise ValueError(f"launch plans need all of {', '.join(VARIABLES)}, some are not set; set them or none")
