"""evaluate: acceptance length and speed on held-out prompts."""

from typing import Any, cast

from flytekit import Cache, dynamic, task
from flytekit.types.file import FlyteFile

import images
from eagle3.config import EngineConfig, EvaluateConfig
from eagle3.resources import ResourcesConfig
from workflows import store
from workflows.interfaces import DraftExport, EvaluationReport, Target, TokenShard
from workflows.resources import DYNAMIC, ENGINE, evaluation_overrides
from workflows.stage import stage


@task(
    container_image=images.GPU,
    cache=Cache(version="1", ignored_inputs=("draft", "heldout", "target")),
    retries=3,
    interruptible=False,
    **ENGINE,
)
@stage
def evaluate_draft(
    draft: DraftExport,
    draft_digest: str,
    heldout: TokenShard,
    heldout_digest: str,
    target: Target,
    target_digest: str,
    engine: EngineConfig,
    evaluate: EvaluateConfig,
) -> EvaluationReport:
    from eagle3.evaluation import benchmark

    path = store.new_dir("evaluate_draft") / "evaluation.json"
    target_dir, export_dir, heldout_path = target.directory.download(), draft.directory.download(), heldout.file.download()
    figures = benchmark.evaluate(target_dir, export_dir, heldout_path, engine, evaluate, str(path))
    return EvaluationReport(
        file=FlyteFile(str(path)),
        export=draft.directory,
        acceptance_length=figures["acceptance_length"],
        trainer_acceptance_length=figures["trainer_acceptance_length"],
        outputs_identical=figures["outputs_identical"],
        acceptance_by_position=figures["acceptance_by_position"],
    )


@dynamic(container_image=images.CPU, **DYNAMIC)
def evaluate_draft_node(
    draft: DraftExport,
    draft_digest: str,
    heldout: TokenShard,
    heldout_digest: str,
    target: Target,
    target_digest: str,
    engine: EngineConfig,
    evaluate: EvaluateConfig,
    resources: ResourcesConfig,
) -> EvaluationReport:
    """evaluate_draft on the pod that the recipe asks for."""
    node: Any = evaluate_draft(
        draft=draft,
        draft_digest=draft_digest,
        heldout=heldout,
        heldout_digest=heldout_digest,
        target=target,
        target_digest=target_digest,
        engine=engine,
        evaluate=evaluate,
    )
    if not store.is_local():
        node.with_overrides(**evaluation_overrides(resources))
    return cast(EvaluationReport, node)
