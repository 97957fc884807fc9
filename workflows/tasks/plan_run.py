"""plan: a run's rows, bytes and hours before it runs, and every refusal that later stages would come to."""

import json
from html import escape
from pathlib import Path
from typing import Any

from flytekit import Deck, task
from flytekit.types.file import FlyteFile

import images
from eagle3.config.data import DataConfig, SourceConfig, VocabConfig
from eagle3.config.engine import EngineConfig, EvaluateConfig, ExtractConfig, FanOutConfig, RegenerateConfig
from eagle3.config.resources import ResourcesConfig, quantity_bytes
from eagle3.config.training import ExportConfig, TrainConfig
from workflows.flyte import store
from workflows.flyte.interfaces import ResolvedInputs, Target
from workflows.flyte.pods import DATA, ENGINE, HUB, LIGHT, TRAINER
from workflows.flyte.stage import recoverable
from workflows.flyte.summary import run_dir, write_text


@task(container_image=images.CPU, retries=2, enable_deck=True, deck_fields=(), **LIGHT, **HUB)
@recoverable
def plan_run(
    run_name: str,
    prompts: FlyteFile | None,
    heldout: FlyteFile,
    found: ResolvedInputs,
    target: Target,
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
) -> FlyteFile:
    """Print the plan and write plan.json: into runs/<run_name> here, with a Deck elsewhere in a pod."""
    from eagle3.data.sources import pin_sources
    from eagle3.planning import plan as planning
    from eagle3.planning.survey import survey, workload
    from eagle3.reports.parts import document

    store.share_credentials()
    target_dir = target.directory.download()
    config = json.loads((Path(target_dir) / "config.json").read_text())
    settings = planning.RunSettings(
        engine, data, regenerate, vocab, extract, train, export, evaluate, fanout, resources
    )
    planning.check_settings(
        settings, config, target.name, _pod_disks(resources), is_vocab_given=bool(found.init_digest)
    )
    if found.init_digest:
        _check_initial(found, config, extract)
    sources = pin_sources(data.sources, found.source_versions[: len(data.sources)])
    if prompts:
        sources = [SourceConfig(path=store.fetch(prompts), name="train"), *sources]
    surveys, num_heldout = survey(
        sources, SourceConfig(path=store.fetch(heldout), name="heldout"), target_dir, data, regenerate.enabled
    )
    work = workload(surveys, [s.weight for s in sources], data, regenerate, engine.max_model_len)
    made = planning.make_plan(settings, config, target.name, surveys, num_heldout, work)
    text, out = planning.render_text(made) + _disk_text(made.max_state_bytes), run_dir(run_name)
    write_text(out / "plan.json", json.dumps(made.to_dict(), indent=1))
    Deck("Plan", document(f"Plan of {run_name}", f"<h1>{escape(run_name)}</h1><pre>{escape(text)}</pre>"))
    print(text, flush=True)
    return FlyteFile(str(out / "plan.json"))


def _check_initial(found: ResolvedInputs, config: dict[str, Any], extract: ExtractConfig) -> None:
    """Refuse an initial draft whose settings do not fit; reads its config.json alone."""
    from eagle3.draft.initial import check_settings, read_settings
    from eagle3.targets.properties import aux_layer_ids

    layer_ids = aux_layer_ids(extract.layer_ids, config["num_hidden_layers"])
    check_settings(read_settings(found.init_from, found.init_digest, config), config, layer_ids)


def _pod_disks(resources: ResourcesConfig) -> Any:
    from eagle3.planning.plan import PodDisks

    asked = ((resources.data, DATA), (resources.engine, ENGINE), (resources.trainer, TRAINER))
    return PodDisks(
        *(quantity_bytes(pod.ephemeral_storage or group["limits"].ephemeral_storage) for pod, group in asked)
    )


def _disk_text(needed: int) -> str:
    if not store.is_local() or needed <= store.free_bytes():
        return ""
    return f"note      a run on this machine would be refused: {store.root()} has {store.free_bytes() / 1e9:.3f} GB free\n"
