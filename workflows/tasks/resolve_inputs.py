"""The first node of every run: resolve files and names to versions, and refuse what a later stage would
refuse.

Neither task is cached: a branch may have moved, a file may have grown, since the last run. It takes seconds,
fetches no weights and needs no GPU (eagle3/planning/preflight.py says what is checked).
"""

import json
from typing import TYPE_CHECKING

from flytekit import task

from eagle3.files import files_digest
from workflows.flyte import journal, store
from workflows.flyte.interfaces import Resolved, ResolvedInputs, TargetRef
from workflows.flyte.pods import HUB, LIGHT, pod_disks
from workflows.flyte.recipe import Recipe
from workflows.flyte.run_dir import check_run_name
from workflows.flyte.stage import recoverable

if TYPE_CHECKING:
    from eagle3.planning.preflight import Preflight


@task(**LIGHT, **HUB)
@recoverable
def resolve_inputs(recipe: Recipe) -> Resolved:
    """For a run that prepares its own data."""
    return _resolve(recipe, with_rows=True)


@task(**LIGHT, **HUB)
@recoverable
def resolve_without_data(recipe: Recipe) -> Resolved:
    """For a run that starts from shards: its prompts and sources are not read."""
    data = recipe.data.model_copy(update={"sources": [], "excluded": []})
    return _resolve(recipe.model_copy(update={"data": data, "prompts": None}), with_rows=False)


def _resolve(recipe: Recipe, with_rows: bool) -> Resolved:
    from eagle3.data.sources import without_paths
    from eagle3.planning.preflight import preflight

    journal.start()
    check_run_name(recipe.run_name)
    store.share_credentials()
    prompts_path = store.fetch(recipe.prompts) if recipe.prompts else ""
    heldout_path = store.fetch(recipe.heldout)
    found = preflight(recipe, pod_disks(recipe.resources), prompts_path, heldout_path, with_rows)
    return Resolved(
        found=_as_inputs(found, recipe, prompts_path, heldout_path),
        engine=recipe.engine,
        data=without_paths(recipe.data),
        vocab=recipe.vocab,
        train=recipe.train.settings_of_result(),
        export=recipe.export,
        evaluate=recipe.evaluate,
    )


def _as_inputs(found: "Preflight", recipe: Recipe, prompts_path: str, heldout_path: str) -> ResolvedInputs:
    return ResolvedInputs(
        prompts_digest=files_digest(prompts_path) if prompts_path else "",
        source_versions=found.source_versions,
        heldout_digest=files_digest(heldout_path),
        target=TargetRef(*found.target),
        public_name=found.public_name,
        regenerate=recipe.regenerate.enabled,
        init_from=found.init_from,
        init_digest=found.init_digest,
        target_config=json.dumps(found.config),
        surveys=found.surveys,
        num_heldout=found.num_heldout,
    )
