"""First of all, in seconds: what do the given files and the target name stand for, by content?

Neither task is cached, so settings that do not fit the target are refused here without being in a key, before its weights are
fetched or a GPU is asked for.
"""

from flytekit import task
from flytekit.types.file import FlyteFile

import images
from eagle3.config.checks import check_lengths, check_sampled_sources
from eagle3.config.data import DataConfig
from eagle3.config.engine import EngineConfig, EvaluateConfig, RegenerateConfig, TargetConfig
from eagle3.config.training import TrainConfig
from eagle3.files import files_digest
from workflows.flyte import journal, store
from workflows.flyte.interfaces import ResolvedInputs, TargetRef
from workflows.flyte.pods import HUB, LIGHT
from workflows.flyte.stage import recoverable
from workflows.flyte.summary import check_run_name


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
    evaluate: EvaluateConfig,
    train: TrainConfig,
) -> ResolvedInputs:
    """Never cached: a branch may have moved, a file may have grown, since the last run."""
    from eagle3.data.sources import source_name

    journal.start()
    check_run_name(run_name)
    if not (prompts or data.sources):
        raise ValueError("there is nothing to train on: give prompts, data.sources or both")
    check_sampled_sources(regenerate, ["train", *map(source_name, data.sources)])
    return _resolve(prompts, heldout, target, engine, data, regenerate, evaluate, train)


@task(container_image=images.CPU, retries=2, **LIGHT, **HUB)
@recoverable
def resolve_without_data(
    run_name: str,
    heldout: FlyteFile,
    target: TargetConfig,
    engine: EngineConfig,
    data: DataConfig,
    regenerate: RegenerateConfig,
    evaluate: EvaluateConfig,
    train: TrainConfig,
) -> ResolvedInputs:
    """The same for a run whose shards exist already: its prompts and sources are not looked for."""
    journal.start()
    check_run_name(run_name)
    without = data.model_copy(update={"sources": [], "excluded": []})
    return _resolve(None, heldout, target, engine, without, regenerate, evaluate, train)


def _resolve(
    prompts: FlyteFile | None,
    heldout: FlyteFile,
    target: TargetConfig,
    engine: EngineConfig,
    data: DataConfig,
    regenerate: RegenerateConfig,
    evaluate: EvaluateConfig,
    train: TrainConfig,
) -> ResolvedInputs:
    from eagle3.data.sources import resolve_source
    from eagle3.draft.initial import resolve_initial
    from eagle3.export import check_public_name
    from eagle3.targets.properties import check_max_model_len
    from eagle3.targets.resolve import identify_target, read_config
    from eagle3.targets.weights import check_target_config

    check_lengths(data, engine, regenerate, evaluate)
    public_name = target.public_name or target.name
    check_public_name(public_name)
    store.share_credentials()
    ref = TargetRef(*identify_target(target))
    if config := read_config(target.model_copy(update={"revision": ref.revision})):
        check_target_config(config, ref.name)
        check_max_model_len(engine.max_model_len, config)
    init_from, init_digest = (
        resolve_initial(train.init_from, train.init_revision) if train.init_from else ("", "")
    )
    return ResolvedInputs(
        prompts_digest=files_digest(store.fetch(prompts)) if prompts else "",
        source_versions=[resolve_source(source)[1] for source in (*data.sources, *data.excluded)],
        heldout_digest=files_digest(store.fetch(heldout)),
        target=ref,
        public_name=public_name,
        regenerate=regenerate.enabled,
        init_from=init_from,
        init_digest=init_digest,
    )
