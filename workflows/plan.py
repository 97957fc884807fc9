"""A run's plan from its recipe, in seconds and without a GPU: rows, tokens, bytes, hours, and every refusal.

pyflyte run workflows/plan.py plan --inputs-file recipe.yaml
"""

from typing import cast

from flytekit.types.file import FlyteFile

from workflows import chain
from workflows.recipe import Recipe, recipe_workflow
from workflows.tasks.plan_run import plan_run


@recipe_workflow
def plan(recipe: Recipe) -> FlyteFile:
    """Plan a run and stop; the inputs are those of train_eagle3, the result is plan.json."""
    found = chain.resolve(recipe)
    return cast(FlyteFile, plan_run(run_name=recipe.run_name, found=found, **recipe.blocks()))
