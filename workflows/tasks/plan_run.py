"""plan: a run's rows, bytes and hours before it runs. What a run would refuse, resolve_inputs has refused before."""

import json
from html import escape

from flytekit import Deck, task
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
from workflows.flyte import store
from workflows.flyte.interfaces import ResolvedInputs
from workflows.flyte.pods import LIGHT
from workflows.flyte.run_dir import run_dir, write_text
from workflows.flyte.stage import recoverable


@task(container_image=images.CPU, retries=2, enable_deck=True, deck_fields=(), **LIGHT)
@recoverable
def plan_run(
    run_name: str,
    found: ResolvedInputs,
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
) -> FlyteFile:
    """Print the plan and write plan.json: into runs/<run_name> here, with a Deck elsewhere in a pod."""
    from eagle3.planning.plan import make_plan, render_text
    from eagle3.planning.workload import workload
    from eagle3.reports.parts import document

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
    work = workload(cfg, found.surveys)
    config = json.loads(found.target_config)
    plan = make_plan(cfg, config, found.target.name, found.surveys, found.num_heldout, work)
    text = render_text(plan) + _disk_text(plan.max_state_bytes)
    out = run_dir(run_name)
    write_text(out / "plan.json", json.dumps(plan.to_dict(), indent=1))
    Deck("Plan", document(f"Plan of {run_name}", f"<h1>{escape(run_name)}</h1><pre>{escape(text)}</pre>"))
    print(text, flush=True)
    return FlyteFile(str(out / "plan.json"))


def _disk_text(needed: int) -> str:
    if not store.is_local() or needed <= store.free_bytes():
        return ""
    return f"note      a run on this machine would be refused: {store.root()} has {store.free_bytes() / 1e9:.3f} GB free\n"
