"""Train a draft and replace the served one, unless the new one is worse.

pyflyte run workflows/retrain_eagle3.py retrain_eagle3 --recipe recipe.yaml \\
    --promote '{"place": "runs/promoted"}'
"""

from dataclasses import replace

from flytekit import workflow

from eagle3.config.training import PromoteConfig
from workflows import chain
from workflows.flyte.interfaces import CurrentDraft, DraftExport, Promotion
from workflows.flyte.recipe import Recipe
from workflows.tasks.promote_draft import (
    check_current_draft,
    choose_opponent,
    find_current_draft,
    promote_draft,
)


@workflow
def retrain_eagle3(
    recipe: Recipe, promote: PromoteConfig, prompts: str = "", heldout: str = "", run_name: str = ""
) -> Promotion:
    """Train from the promoted draft, measure both on the same held-out prompts, promote the new one unless it
    is worse.

    If set, prompts and heldout (URLs) and run_name replace the recipe's: launch plans fix the recipe.
    """
    current: CurrentDraft = find_current_draft(
        recipe=recipe, promote=promote, prompts=prompts, heldout=heldout, run_name=run_name
    )
    start = chain.prepare(current.recipe)
    start = replace(start, target=check_current_draft(made_for=current.target_digest, target=start.target))
    rows = chain.answer(start)
    measured = chain.finish(start, rows, chain.extract(start, rows))
    opponent: DraftExport = choose_opponent(
        current=current.drafts, draft=measured.draft, report=measured.report
    )
    return promote_draft(
        draft=measured.draft,
        report=measured.report,
        current=current.drafts,
        opponent_report=chain.evaluate(start, opponent),
        number=current.number,
        heldout=start.data.heldout,
        target=start.target,
        recipe=current.recipe,
        promote=promote,
    )
