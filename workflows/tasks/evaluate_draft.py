"""evaluate: acceptance length and speed on held-out prompts."""

from typing import Any, cast

from flytekit import Cache, dynamic, task
from flytekit.types.file import FlyteFile

import images
from eagle3.config.engine import EngineConfig, EvaluateConfig, FanOutConfig
from eagle3.config.resources import ResourcesConfig
from workflows.flyte import store
from workflows.flyte.interfaces import DraftExport, EvaluationReport, Target, TokenShard
from workflows.flyte.live import JobDeck
from workflows.flyte.pods import DYNAMIC, ENGINE, evaluation_pod
from workflows.flyte.stage import recoverable, stage


@task(
    container_image=images.GPU,
    cache=Cache(version="1", ignored_inputs=("draft", "heldout", "target", "tensor_parallel_size")),
    retries=3,
    interruptible=False,
    enable_deck=True,
    deck_fields=(),
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
    tensor_parallel_size: int,
) -> EvaluationReport:
    from eagle3.evaluation import benchmark

    path = store.new_dir("evaluate_draft") / "evaluation.json"
    target_dir, export_dir, heldout_path = (
        target.directory.download(),
        draft.directory.download(),
        heldout.file.download(),
    )
    deck = JobDeck("evaluate")
    figures = benchmark.evaluate(
        target_dir,
        export_dir,
        heldout_path,
        engine,
        evaluate,
        str(path),
        tensor_parallel_size=tensor_parallel_size,
        watch=deck.watch,
    )
    deck.finish(_figures(figures))
    return EvaluationReport(
        file=FlyteFile(str(path)),
        export=draft.directory,
        acceptance_length=figures["acceptance_length"],
        trainer_acceptance_length=figures["trainer_acceptance_length"],
        outputs_identical=figures["outputs_identical"],
        acceptance_by_position=figures["acceptance_by_position"],
    )


def _figures(found: dict[str, Any]) -> dict[str, str]:
    """What the Deck says of a finished evaluation."""
    speed = found["tokens_per_s"]
    return {
        "acceptance length": f"{found['acceptance_length']:.3f}",
        "the trainer's": f"{found['trainer_acceptance_length']:.3f}",
        "acceptance by position": ", ".join(f"{share:.3f}" for share in found["acceptance_by_position"]),
        "tokens/s with / without": f"{speed['with_draft']:,.1f} / {speed['without_draft']:,.1f}",
        "text with and without": "identical" if found["outputs_identical"] else "differs",
    }


@dynamic(container_image=images.CPU, retries=2, **DYNAMIC)
@recoverable
def evaluate_draft_node(
    draft: DraftExport,
    draft_digest: str,
    heldout: TokenShard,
    heldout_digest: str,
    target: Target,
    target_digest: str,
    engine: EngineConfig,
    evaluate: EvaluateConfig,
    fanout: FanOutConfig,
    resources: ResourcesConfig,
) -> EvaluationReport:
    """evaluate_draft on the pod that the recipe asks for."""
    node = evaluation_pod(fanout, resources).node(
        evaluate_draft,
        draft=draft,
        draft_digest=draft_digest,
        heldout=heldout,
        heldout_digest=heldout_digest,
        target=target,
        target_digest=target_digest,
        engine=engine,
        evaluate=evaluate,
        tensor_parallel_size=fanout.tensor_parallel_size,
    )
    return cast(EvaluationReport, node)
