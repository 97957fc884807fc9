"""The prepare stage alone: token shards, their counts and the data report, from the recipe of a whole run.

pyflyte run workflows/prepare_data.py prepare_shards --inputs-file recipe.yaml
"""

from typing import cast

from workflows import chain
from workflows.flyte.interfaces import PreparedData
from workflows.recipe import Recipe, recipe_workflow
from workflows.tasks.prepare_data import report_data


@recipe_workflow
def prepare_shards(recipe: Recipe) -> PreparedData:
    """Prepare a run's data and stop. Blocks of later stages are taken so that a run's recipe fits; most do nothing here."""
    start = chain.prepare_alone(recipe)
    report = report_data(
        run_name=recipe.run_name,
        data=start.data,
        target=start.model,
        vocab=recipe.vocab,
        init_from=start.found.init_from,
    )
    return cast(PreparedData, report)
