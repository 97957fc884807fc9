"""The prepare stage alone: token shards, their counts and the data report, from the recipe of a whole run.

pyflyte run workflows/prepare_data.py prepare_shards --inputs-file recipe.yaml
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
from workflows.interfaces import PreparedData
from workflows.tasks.fetch_target import fetch_tokenizer
from workflows.tasks.prepare_data import prepare_data_node, report_data
from workflows.tasks.resolve_inputs import resolve_inputs


@workflow
def prepare_shards(
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
) -> PreparedData:
    """Prepare a run's data and stop. Blocks of later stages are taken so that a run's recipe fits; most do nothing here."""
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
    prepared = prepare_data_node(
        prompts=prompts,
        prompts_digest=found.prompts_digest,
        source_versions=found.source_versions,
        heldout=heldout,
        heldout_digest=found.heldout_digest,
        target=model,
        target_digest=found.target.digest,
        data=data,
        regenerate=found.regenerate,
        resources=resources,
    )
    return cast(PreparedData, report_data(run_name=run_name, data=prepared, target=model, vocab=vocab, init_from=found.init_from))
