"""A run's plan from its recipe, in seconds and without a GPU: rows, tokens, bytes, hours, what is cached, what would be refused.

pyflyte run workflows/plan.py plan --inputs-file recipe.yaml
"""

from typing import cast

from flytekit import workflow
from flytekit.types.file import FlyteFile

from eagle3.config import (
    DataConfig,
    EngineConfig,
    EvaluateConfig,
    ExportConfig,
    ExtractConfig,
    FanOutConfig,
    RegenerateConfig,
    TargetConfig,
    TrainConfig,
    VocabConfig,
)
from eagle3.resources import ResourcesConfig
from workflows.tasks.fetch_target import fetch_tokenizer
from workflows.tasks.plan_run import plan_run
from workflows.tasks.resolve_inputs import resolve_inputs


@workflow
def plan(
    heldout: FlyteFile,
    target: TargetConfig,
    prompts: FlyteFile | None = None,
    engine: EngineConfig = EngineConfig(),
    data: DataConfig = DataConfig(),
    regenerate: RegenerateConfig = RegenerateConfig(),
    vocab: VocabConfig = VocabConfig(),
    extract: ExtractConfig = ExtractConfig(),
    train: TrainConfig = TrainConfig(),
    export: ExportConfig = ExportConfig(),
    evaluate: EvaluateConfig = EvaluateConfig(),
    fanout: FanOutConfig = FanOutConfig(),
    resources: ResourcesConfig = ResourcesConfig(),
    run_name: str = "train_eagle3",
) -> FlyteFile:
    """Plan a run and stop; the inputs are those of train_eagle3, the result is plan.json."""
    found = resolve_inputs(
        prompts=prompts,
        heldout=heldout,
        target=target,
        engine=engine,
        data=data,
        regenerate=regenerate,
        evaluate=evaluate,
        train=train,
    )
    model = fetch_tokenizer(target=target, ref=found.target, target_digest=found.target.digest)
    made = plan_run(
        run_name=run_name,
        prompts=prompts,
        heldout=heldout,
        found=found,
        target=model,
        engine=engine,
        data=data,
        regenerate=regenerate,
        vocab=vocab,
        extract=extract,
        train=train,
        export=export,
        evaluate=evaluate,
        fanout=fanout,
        resources=resources,
    )
    return cast(FlyteFile, made)
