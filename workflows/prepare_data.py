"""The prepare stage alone: token shards and the data report, from the recipe of a whole run.

pyflyte run workflows/prepare_data.py prepare_shards --recipe recipe.yaml
"""

from flytekit import workflow

from workflows import chain
from workflows.flyte.interfaces import PreparedData
from workflows.flyte.recipe import Recipe
from workflows.tasks.prepare_data import report_data


@workflow
def prepare_shards(recipe: Recipe) -> PreparedData:
    """Prepare a run's data and stop."""
    start = chain.prepare(recipe, with_weights=False)
    init_from = start.resolved.found.init_from
    return report_data(data=start.data, target=start.target, init_from=init_from, recipe=recipe)
