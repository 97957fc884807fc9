"""evaluate: acceptance length and speed on held-out prompts."""

from typing import Any

from flytekit import Cache, task
from flytekit.types.file import FlyteFile

from eagle3.config.engine import EngineConfig, EvaluateConfig
from workflows.flyte import store
from workflows.flyte.interfaces import DraftExport, EvaluationReport, Target, TokenShard
from workflows.flyte.live import JobDeck
from workflows.flyte.pods import DECK, EVALUATION, evaluation_pod, on_pod
from workflows.flyte.recipe import Recipe
from workflows.flyte.stage import stage


@task(cache=Cache(version="1", ignored_inputs=("draft", "heldout", "target", "recipe")), **EVALUATION, **DECK)
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
    recipe: Recipe,
) -> EvaluationReport:
    from eagle3.evaluation import benchmark

    path = store.new_dir("evaluate_draft") / "evaluation.json"
    deck = JobDeck("evaluate")
    measured = benchmark.evaluate(
        target.directory.download(),
        draft.directory.download(),
        heldout.file.download(),
        engine,
        evaluate,
        str(path),
        tensor_parallel_size=recipe.fanout.tensor_parallel_size,
        watch=deck.watch,
    )
    deck.finish(_statistics(measured))
    return EvaluationReport(
        file=FlyteFile(str(path)),
        export=draft.directory,
        acceptance_length=measured["acceptance_length"],
        trainer_acceptance_length=measured["trainer_acceptance_length"],
        outputs_identical=measured["outputs_identical"],
        acceptance_by_position=measured["acceptance_by_position"],
    )


def _statistics(found: dict[str, Any]) -> dict[str, str]:
    """What the Deck shows of a finished evaluation."""
    speed = found["tokens_per_s"]
    return {
        "acceptance length": f"{found['acceptance_length']:.3f}",
        "the trainer's": f"{found['trainer_acceptance_length']:.3f}",
        "acceptance by position": ", ".join(f"{share:.3f}" for share in found["acceptance_by_position"]),
        "tokens/s with / without": f"{speed['with_draft']:,.1f} / {speed['without_draft']:,.1f}",
        "text with and without": "identical" if found["outputs_identical"] else "differs",
    }


evaluate_draft_node = on_pod(evaluate_draft, evaluation_pod)
