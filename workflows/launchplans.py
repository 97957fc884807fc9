"""Two launch plans that retrain a draft, one every night and one by hand. They exist if these are set:

    export EAGLE3_TRAFFIC=s3://bucket/traffic.jsonl EAGLE3_HELDOUT=… EAGLE3_PROMOTED=…
    export EAGLE3_OWNERS=a@example.com,b@example.com
    export EAGLE3_RECIPE=runs/mine.yaml    (default: Qwen3-8B on H200s)
    pyflyte register --copy all --activate-launchplans workflows

If only a URI changed, register with another --version. Only the registration reads these variables, not pods.
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
VARIABLES = ("EAGLE3_TRAFFIC", "EAGLE3_HELDOUT", "EAGLE3_PROMOTED", "EAGLE3_OWNERS")
TRAFFIC, HELDOUT, PROMOTED, owners = (os.environ.get(name, "").strip() for name in VARIABLES)
OWNERS = [name.strip() for name in owners.split(",") if name.strip()]
EVERY_NIGHT = "0 2 * * *"  # UTC
# Share of the recipe's learning rates when training starts from the promoted draft. Not measured.
WARM_RATE_SHARE = 0.2
# A draft is promoted only if the text is the same with and without it (promote.identical_text). bfloat16
# rounding changes the text; float32 did not, on CPUs.
EVALUATE = {"dtype": "float32"}
ENDED = [
    WorkflowExecutionPhase.SUCCEEDED,
    WorkflowExecutionPhase.FAILED,
    WorkflowExecutionPhase.ABORTED,
    WorkflowExecutionPhase.TIMED_OUT,
]


def inputs_of(path: Path) -> dict[str, Any]:
    """The inputs that both plans fix: the recipe with the URIs above, and the promotion settings."""
    if not path.is_file():
        raise ValueError(
            f"EAGLE3_RECIPE must be the path of a recipe, got {path}, which is not a file; "
            "correct or unset it"
        )
    blocks = yaml.safe_load(path.read_text())
    blocks |= {"prompts": TRAFFIC, "heldout": HELDOUT, "run_name": "nightly"}
    blocks["evaluate"] = blocks.get("evaluate", {}) | EVALUATE
    promote = PromoteConfig(place=PROMOTED, warm_rate_share=WARM_RATE_SHARE)
    return {"recipe": Recipe.model_validate_json(json.dumps(blocks)), "promote": promote}


def make_plans() -> None:
    """Make both plans. flytekit finds them although no variable of this module holds them."""
    inputs = inputs_of(RECIPE)
    mail = [Email(phases=ENDED, recipients_email=OWNERS)]
    LaunchPlan.get_or_create(
        workflow=retrain_eagle3,
        name="nightly_retraining",
        schedule=CronSchedule(schedule=EVERY_NIGHT),
        fixed_inputs=inputs,
        notifications=mail,
    )
    # The same run by hand; its caller may replace prompts, heldout and run_name.
    LaunchPlan.get_or_create(
        workflow=retrain_eagle3, name="retraining", fixed_inputs=inputs, notifications=mail
    )


if TRAFFIC and HELDOUT and PROMOTED and OWNERS:
    make_plans()
elif TRAFFIC or HELDOUT or PROMOTED or OWNERS:
    raise ValueError(f"launch plans need all of {', '.join(VARIABLES)}, some are not set; set all or none")
