"""Retraining by the clock: two launch plans, made where their places are named; a schedule runs once it is activated.

    export EAGLE3_TRAFFIC=s3://bucket/traffic.jsonl EAGLE3_HELDOUT=… EAGLE3_PROMOTED=… EAGLE3_OWNERS=a@example.com,b@example.com
    export EAGLE3_RECIPE=runs/mine.yaml    (target, machines and settings; without it Qwen3-8B on H200s)
    pyflyte register --copy all --activate-launchplans workflows    (with another --version when only the places changed)

Everything here is read when the plans are registered; pods read none of it.
"""

import os
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any, get_type_hints

import yaml
from flytekit import CronSchedule, Email, LaunchPlan
from flytekit.models.core.execution import WorkflowExecutionPhase
from flytekit.types.file import FlyteFile

from eagle3.config.training import PromoteConfig
from eagle3.uris import check_uri
from workflows.recipe import Recipe
from workflows.retrain_eagle3 import retrain_eagle3

SHIPPED = Path(__file__).parent / "recipes" / "qwen3_8b_h200.yaml"
RECIPE = Path(os.environ.get("EAGLE3_RECIPE", "").strip() or SHIPPED)
# What changes from night to night lies behind one name. Rows that did not change are answered and captured once; training goes on
# from the promoted draft, so it runs every night.
PLACES = ("EAGLE3_TRAFFIC", "EAGLE3_HELDOUT", "EAGLE3_PROMOTED", "EAGLE3_OWNERS")
TRAFFIC, HELDOUT, PROMOTED, owners = (os.environ.get(name, "").strip() for name in PLACES)
OWNERS = [name.strip() for name in owners.split(",") if name.strip()]
EVERY_NIGHT = "0 2 * * *"  # UTC
# Share of the recipe's learning rates where training goes on from the promoted draft. Not measured.
WARM_RATE_SHARE = 0.2
# Drafts are promoted only where text with and without them is the same (promote.identical_text), which bfloat16's rounding does
# not keep; that float32 keeps it was seen on CPUs only.
EVALUATE = {"dtype": "float32"}
GIVEN_ANEW = ("prompts", "heldout", "run_name")
ENDED = [
    WorkflowExecutionPhase.SUCCEEDED,
    WorkflowExecutionPhase.FAILED,
    WorkflowExecutionPhase.ABORTED,
    WorkflowExecutionPhase.TIMED_OUT,
]


def inputs_of(recipe: Path) -> dict[str, Any]:
    """All of a recipe's keys as a launch plan wants them, with the places above for its prompts.

    Raises:
        ValueError: if it is not a recipe.
    """
    kinds = get_type_hints(Recipe)
    if not recipe.is_file():
        raise ValueError(
            f"EAGLE3_RECIPE must be the path of a recipe, got {recipe}, which is no file; correct it or unset it"
        )
    blocks = yaml.safe_load(recipe.read_text()) | {
        "prompts": TRAFFIC,
        "heldout": HELDOUT,
        "run_name": "nightly",
    }
    if unknown := sorted(blocks.keys() - kinds.keys()):
        raise ValueError(
            f"{recipe} must have keys of a recipe only ({', '.join(kinds)}), got {', '.join(unknown)}; remove them"
        )
    blocks["evaluate"] = blocks.get("evaluate", {}) | EVALUATE
    files = {name: FlyteFile(check_uri(blocks.pop(name))) for name in ("prompts", "heldout")}
    settings = {
        name: value if isinstance(value, str) else kinds[name](**value) for name, value in blocks.items()
    }
    defaults = {f.name: f.default for f in fields(Recipe) if f.default is not MISSING}
    return {
        **defaults,
        **settings,
        **files,
        "promote": PromoteConfig(place=PROMOTED, warm_rate_share=WARM_RATE_SHARE),
    }


def make_plans() -> None:
    """Make both plans; flytekit finds them by their registration, not by name."""
    inputs, mail = inputs_of(RECIPE), [Email(phases=ENDED, recipients_email=OWNERS)]
    LaunchPlan.get_or_create(
        workflow=retrain_eagle3,
        name="nightly_retraining",
        schedule=CronSchedule(schedule=EVERY_NIGHT),
        fixed_inputs=inputs,
        notifications=mail,
    )
    # The same run whenever somebody wants it, on other files or under another name. The blocks are fixed: flytekit's command line
    # of a registered plan cannot read defaults with blocks within.
    LaunchPlan.get_or_create(
        workflow=retrain_eagle3,
        name="retraining",
        fixed_inputs={name: value for name, value in inputs.items() if name not in GIVEN_ANEW},
        default_inputs={name: value for name, value in inputs.items() if name in GIVEN_ANEW},
        notifications=mail,
    )


# Without their places there are no plans: one that is activated with somebody else's would fail every night.
if TRAFFIC and HELDOUT and PROMOTED and OWNERS:
    make_plans()
elif TRAFFIC or HELDOUT or PROMOTED or OWNERS:
    raise ValueError(f"launch plans need all of {', '.join(PLACES)}, some are not set; set them or none")
