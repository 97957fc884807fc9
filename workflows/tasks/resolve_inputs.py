"""The first node of every run: resolve files and names to versions, and refuse what a later stage would refuse.

Neither task is cached: a branch may have moved, a file may have grown, since the last run. It takes seconds, fetches
no weights and needs no GPU (eagle3/planning/preflight.py says what is checked).
"""

import json
from typing import TYPE_CHECKING

from flytekit import task
from flytekit.types.file import FlyteFile

import images
from eagle3.config.data import DataConfig, VocabConfig
from eagle3.config.engine import (
    EngineConfig,
    EvaluateConfig,
    ExtractConfig,
    FanOutConfig,
    RegenerateConfig,
    TargetConfig,
)
from eagle3.config.resources import ResourcesConfig
from eagle3.config.run import RunSettings
from eagle3.config.training import ExportConfig, TrainConfig
from eagle3.files import files_digest
from workflows.flyte import journal, store
from workflows.flyte.interfaces import ResolvedInputs, TargetRef
from workflows.flyte.pods import HUB, LIGHT, pod_disks
from workflows.flyte.run_dir import check_run_name
from workflows.flyte.stage import recoverable

if TYPE_CHECKING:
    from eagle3.planning.preflight import Preflight


@task(container_image=images.CPU, retries=2, **LIGHT, **HUB)
@recoverable
def resolve_inputs(
    run_name: str,
    prompts: FlyteFile | None,
    heldout: FlyteFile,
    target: TargetConfig,
    engine: EngineConfig,
    data: DataConfig,
    regenerate: RegenerateConfig,
    vocab: VocabConfig,
    extract: ExtractConfig,
    train: TrainConfig,
    export: ExportConfig,
    evaluate: EvaluateConfig,
    fanout: FanOutConfig,
    resources: ResourcesConfig,
) -> ResolvedInputs:
    """For a run that prepares its own data."""
    cfg = RunSettings(
        target=target,
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
    return _resolve(run_name, cfg, prompts, heldout, with_rows=True)


@task(container_image=images.CPU, retries=2, **LIGHT, **HUB)
@recoverable
def resolve_without_data(
    run_name: str,
    heldout: FlyteFile,
    target: TargetConfig,
    engine: EngineConfig,
    data: DataConfig,
    regenerate: RegenerateConfig,
    vocab: VocabConfig,
    extract: ExtractConfig,
    train: TrainConfig,
    export: ExportConfig,
    evaluate: EvaluateConfig,
    fanout: FanOutConfig,
    resources: ResourcesConfig,
) -> ResolvedInputs:
    """For a run that starts from shards: its prompts and sources are not read."""
    cfg = RunSettings(
        target=target,
        engine=engine,
        data=data.model_copy(update={"sources": [], "excluded": []}),
        regenerate=regenerate,
        vocab=vocab,
        extract=extract,
        train=train,
        export=export,
        evaluate=evaluate,
        fanout=fanout,
        resources=resources,
    )
    return _resolve(run_name, cfg, None, heldout, with_rows=False)


def _resolve(
    run_name: str, cfg: RunSettings, prompts: FlyteFile | None, heldout: FlyteFile, with_rows: bool
) -> ResolvedInputs:
    from eagle3.planning.preflight import preflight

    journal.start()
    check_run_name(run_name)
    store.share_credentials()
    prompts_path = store.fetch(prompts) if prompts else ""
    heldout_path = store.fetch(heldout)
    found = preflight(cfg, pod_disks(cfg.resources), prompts_path, heldout_path, with_rows)
    return _as_inputs(found, cfg, prompts_path, heldout_path)


def _as_inputs(found: "Preflight", cfg: RunSettings, prompts_path: str, heldout_path: str) -> ResolvedInputs:
    return ResolvedInputs(
        prompts_digest=files_digest(prompts_path) if prompts_path else "",
        source_versions=found.source_versions,
        heldout_digest=files_digest(heldout_path),
        target=TargetRef(*found.target),
        public_name=found.public_name,
        regenerate=cfg.regenerate.enabled,
        init_from=found.init_from,
        init_digest=found.init_digest,
        target_config=json.dumps(found.config),
        surveys=found.surveys,
        num_heldout=found.num_heldout,
    )
