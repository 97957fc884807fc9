"""train_eagle3, and the draft takes the place of the one that is served, unless it is worse.

pyflyte run workflows/retrain_eagle3.py retrain_eagle3 --inputs-file recipe.yaml --promote '{"place": "runs/promoted"}'
"""

from dataclasses import replace
from typing import cast

from eagle3.config.training import PromoteConfig
from workflows import chain
from workflows.flyte.interfaces import Promotion
from workflows.recipe import Recipe, recipe_workflow
from workflows.tasks.promote_draft import (
    check_current_draft,
    choose_opponent,
    find_current_draft,
    promote_draft,
)


@recipe_workflow
def retrain_eagle3(recipe: Recipe, promote: PromoteConfig) -> Promotion:
    """Train from the promoted draft, measure both on the same held-out prompts, promote the new one unless it is worse."""
    current = find_current_draft(promote=promote, train=recipe.train)
    recipe = replace(recipe, train=current.train)
    start = chain.prepare(recipe)
    start = replace(start, model=check_current_draft(made_for=current.target_digest, target=start.model))
    rows = chain.answer(recipe, start)
    measured = chain.finish(recipe, start, rows, chain.extract(recipe, start, rows))
    opponent = choose_opponent(current=current.drafts, draft=measured.draft, report=measured.report)
    promotion = promote_draft(
        draft=measured.draft,
        report=measured.report,
        current=current.drafts,
        opponent_report=chain.evaluate(recipe, start, opponent),
        number=current.number,
        heldout=start.data.heldout,
        target=start.model,
        engine=recipe.engine,
        evaluate=recipe.evaluate,
        promote=promote,
    )
    return cast(Promotion, promotion)
