"""Plan a run from its recipe in seconds, without a GPU: rows, tokens, bytes, hours. Refuses what a run
refuses.

pyflyte run workflows/plan.py plan --recipe recipe.yaml
"""

from flytekit import workflow
from flytekit.types.file import FlyteFile

from workflows.flyte.interfaces import Resolved
from workflows.flyte.recipe import Recipe
from workflows.tasks.plan_run import plan_run
from workflows.tasks.resolve_inputs import resolve_inputs


@workflow
def plan(recipe: Recipe) -> FlyteFile:
    """Check the recipe and write plan.json."""
    resolved: Resolved = resolve_inputs(recipe=recipe)
    return plan_run(recipe=recipe, found=resolved.found)
