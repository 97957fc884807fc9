"""promote: serve the new draft, unless it is worse than the current one on the same held-out prompts."""

from typing import Any

from flytekit import task
from flytekit.types.directory import FlyteDirectory
from flytekit.types.file import FlyteFile

from eagle3.config.training import PromoteConfig
from eagle3.promotion import Measurement
from eagle3.uris import check_uri, redact
from workflows.flyte import store
from workflows.flyte.interfaces import (
    CurrentDraft,
    DraftExport,
    EvaluationReport,
    Promotion,
    Target,
    TokenShard,
)
from workflows.flyte.pods import DATA, HUB, LIGHT
from workflows.flyte.recipe import Recipe
from workflows.flyte.stage import recoverable


@task(**LIGHT, **HUB)
@recoverable
def find_current_draft(
    recipe: Recipe, promote: PromoteConfig, prompts: str, heldout: str, run_name: str
) -> CurrentDraft:
    """Which draft is served now? Never cached: another run may have promoted one. prompts, heldout and
    run_name replace the recipe's unless empty.

    Raises:
        ValueError: if what names the draft is broken, or promote.place ends with the pod.
    """
    from eagle3.files import is_remote
    from eagle3.promotion import restore_pointer

    if not store.is_local() and not is_remote(promote.place):
        raise ValueError(
            f"promote.place must be a URL in a cluster, got {redact(promote.place)}: "
            "a pod's directories end with it"
        )
    store.share_credentials()
    changes: dict[str, Any] = {"run_name": run_name} if run_name else {}
    uris = {"prompts": prompts, "heldout": heldout}
    changes |= {name: FlyteFile(check_uri(uri)) for name, uri in uris.items() if uri}
    current = restore_pointer(promote.place)
    if current and promote.warm_start:
        rates = ("learning_rate", "muon_learning_rate")
        settings = {name: getattr(recipe.train, name) * promote.warm_rate_share for name in rates}
        settings |= {"init_from": current.export, "init_revision": ""}
        changes["train"] = recipe.train.model_copy(update=settings)
    recipe = recipe.model_copy(update=changes)
    if current is None:
        return CurrentDraft(recipe, 0, [], "")
    draft = DraftExport(FlyteDirectory(current.export), current.digest)
    return CurrentDraft(recipe, current.number, [draft], current.target_digest)


@task(**LIGHT)
@recoverable
def check_current_draft(made_for: str, target: Target) -> Target:
    """Refuse, before the engine starts, a promote.place with drafts for another target; returns the target,
    so that the rest waits for this."""
    if made_for and made_for != target.digest:
        raise ValueError(
            f"the promoted draft must be for this run's target {target.name}, digest {target.digest}, "
            f"got {made_for}; give each target a promote.place of its own, or set target.revision to "
            "the former"
        )
    return target


@task(**LIGHT)
@recoverable
def choose_opponent(current: list[DraftExport], draft: DraftExport, report: EvaluationReport) -> DraftExport:
    """What the new draft is compared with: the current draft, measured on this run's held-out prompts.
    Without one it is the new draft itself, whose report is in the cache by now."""
    return current[0] if current else draft


@task(**DATA)
@recoverable
def promote_draft(
    draft: DraftExport,
    report: EvaluationReport,
    current: list[DraftExport],
    opponent_report: EvaluationReport,
    number: int,
    heldout: TokenShard,
    target: Target,
    recipe: Recipe,
    promote: PromoteConfig,
) -> Promotion:
    """Decide, and where the answer is yes, keep the draft and let promoted.json name it."""
    from eagle3 import promotion

    store.share_credentials()
    settings = f"{target.digest} {recipe.engine.model_dump_json()} {recipe.evaluate.model_dump_json()}"
    new = _measurement(draft, report, heldout, settings)
    before = _measurement(current[0], opponent_report, heldout, settings) if current else None
    decision = promotion.decide(new, before, promote.margin, promote.identical_text)
    served = store.location(current[0].directory) if current else ""
    promoted = decision.promote
    reason = decision.reason
    if promoted:
        wanted = promotion.Promoted(
            number=number + 1,
            export=promote.place,
            digest=draft.digest,
            acceptance_length=new.acceptance_length,
            heldout_digest=heldout.digest,
            target=target.name,
            target_digest=target.digest,
            previous=current[0].digest if current else "",
        )
        try:
            served = promotion.promote(promote.place, draft.directory.download(), wanted).export
        except FileExistsError:
            promoted = False
            reason = "another draft was promoted meanwhile; run again to be compared with that one"
    print(
        f"{'promoted' if promoted else 'not promoted'}: {reason}; served is {redact(served) or 'none'}",
        flush=True,
    )
    return Promotion(promoted, reason, served, new.acceptance_length)


def _measurement(
    draft: DraftExport, report: EvaluationReport, heldout: TokenShard, settings: str
) -> Measurement:
    return Measurement(
        draft.digest, heldout.digest, settings, report.acceptance_length, report.outputs_identical
    )
