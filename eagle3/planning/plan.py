"""A run before it runs: what it would read, store and cost, and whether every stage would take its settings.

Nothing is fetched for it but a target's config.json and tokenizer, and the first rows of the sources.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import ceil
from typing import Any

from eagle3.config.checks import check_lengths
from eagle3.config.data import DataConfig, VocabConfig
from eagle3.config.engine import EngineConfig, EvaluateConfig, ExtractConfig, FanOutConfig, RegenerateConfig
from eagle3.config.resources import ResourcesConfig
from eagle3.config.training import ExportConfig, TrainConfig
from eagle3.draft.model import DraftConfig
from eagle3.draft.speculators import expected_shapes
from eagle3.planning.accelerators import ACCELERATORS
from eagle3.planning.estimates import (
    ASSUMPTIONS,
    COMPRESSED_SHARE,
    ENGINE_START_S,
    DraftSize,
    StageCost,
    Workload,
    draft_size,
    evaluate_cost,
    extract_cost,
    regenerate_cost,
    train_cost,
)
from eagle3.planning.survey import SourceSurvey
from eagle3.shards.hidden_states import hidden_state_bytes
from eagle3.targets.properties import aux_layer_ids, check_max_model_len
from eagle3.targets.size import TargetSize, check_gpu_memory, check_tensor_parallel, target_size
from eagle3.targets.weights import check_target_config

# float32 master weights, their gradient and two moments of the optimizer.
TRAINED_BYTES = 16
MAX_START_SHARE = 0.1
RAISE_TENSOR_PARALLEL = "raise fanout.tensor_parallel_size or name a larger resources.engine.accelerator"


@dataclass(frozen=True)
class RunSettings:
    """All blocks of a recipe that a plan looks at."""

    engine: EngineConfig
    data: DataConfig
    regenerate: RegenerateConfig
    vocab: VocabConfig
    extract: ExtractConfig
    train: TrainConfig
    export: ExportConfig
    evaluate: EvaluateConfig
    fanout: FanOutConfig
    resources: ResourcesConfig


@dataclass(frozen=True)
class PodDisks:
    """Local disk, bytes, that pods may use at most: those of the data stages, of one engine, of the trainer."""

    data: int
    engine: int
    trainer: int


@dataclass(frozen=True)
class RunPlan:
    """What a plan says. max_state_bytes: before compression, every answer at its longest; state_bytes: expected, after it."""

    target: str
    params: int
    active_params: int
    layer_ids: list[int]
    sources: list[SourceSurvey]
    heldout: int
    work: Workload
    max_state_bytes: int
    state_bytes: int
    draft_params: int
    stages: list[StageCost]
    notes: list[str]

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready, with the assumptions behind the estimates."""
        return asdict(self) | {"assumptions": list(ASSUMPTIONS)}


def check_settings(
    cfg: RunSettings, config: dict[str, Any], name: str, disks: PodDisks, is_vocab_given: bool = False
) -> None:
    """Refuse what a later stage would refuse for this target, and what its pods cannot hold.

    Args:
        config: the target's config.json. name: the target, for messages.
        disks: what the pods have.
        is_vocab_given: the draft vocabulary is that of an initial draft, vocab.size is ignored.

    Raises:
        ValueError: the first fault, with its remedy.
    """
    check_target_config(config, name)
    check_lengths(cfg.data, cfg.engine, cfg.regenerate, cfg.evaluate)
    check_max_model_len(cfg.engine.max_model_len, config)
    aux_layer_ids(cfg.extract.layer_ids, config["num_hidden_layers"])
    if not is_vocab_given and cfg.vocab.size > config["vocab_size"]:
        raise ValueError(
            f"draft vocab must not exceed the target's {config['vocab_size']}, got {cfg.vocab.size}; lower vocab.size in the "
            "recipe"
        )
    size = target_size(config)
    _check_gpus(cfg, size)
    _check_trainer(cfg, config, size)
    _check_disks(cfg, size, disks)


def _check_gpus(cfg: RunSettings, size: TargetSize) -> None:
    gpu = ACCELERATORS[cfg.resources.engine.accelerator]
    usable = gpu.memory_gb * 1e9 * cfg.engine.gpu_memory_utilization
    longest, num_gpus = cfg.engine.max_model_len, cfg.fanout.tensor_parallel_size
    check_tensor_parallel(size, num_gpus)
    check_gpu_memory(size, cfg.engine.dtype, longest, num_gpus, usable, RAISE_TENSOR_PARALLEL)
    remedy = f"for the evaluation: set evaluate.dtype to bfloat16, {RAISE_TENSOR_PARALLEL}"
    check_gpu_memory(size, cfg.evaluate.dtype, longest, num_gpus, usable, remedy)


def _check_trainer(cfg: RunSettings, config: dict[str, Any], size: TargetSize) -> None:
    trainer, train = cfg.resources.trainer, cfg.train
    if train.packs_per_step % trainer.gpus:
        raise ValueError(
            f"train.packs_per_step must be a multiple of resources.trainer.gpus {trainer.gpus}, got {train.packs_per_step}: "
            "each GPU needs a pack in every step"
        )
    memory = ACCELERATORS[trainer.accelerator].memory_gb * 1e9
    # The target's embedding and head lie beside the draft, in the compute dtype.
    needed = draft_of(config, cfg).params * TRAINED_BYTES + 2 * 2 * size.vocab_size * size.hidden_size
    if needed > memory:
        raise ValueError(
            f"draft, optimizer and the target's two tables must fit on one {trainer.accelerator} of {memory / 1e9:.0f} GB, they "
            f"take {needed / 1e9:.0f} GB; lower vocab.size or name a larger resources.trainer.accelerator"
        )


def _check_disks(cfg: RunSettings, size: TargetSize, disks: PodDisks) -> None:
    # Checkpoints are bfloat16 unless they are quantised.
    weights = size.weight_bytes("bfloat16")
    for stage, has, needs in (
        ("data", disks.data, weights),
        ("engine", disks.engine, weights + 2 * cfg.extract.chunk_bytes),
        ("trainer", disks.trainer, weights + cfg.train.disk_budget_bytes),
    ):
        if needs > has:
            raise ValueError(
                f"resources.{stage}.ephemeral_storage must hold {needs / 1e9:.0f} GB, the target's files included, it is "
                f"{has / 1e9:.0f} GB; raise it"
                + (" or lower train.disk_budget_bytes" if stage == "trainer" else "")
            )


def draft_of(config: dict[str, Any], cfg: RunSettings) -> DraftSize:
    """Size of the draft that these settings train for a target with this config.json."""
    layer_ids = aux_layer_ids(cfg.extract.layer_ids, config["num_hidden_layers"])
    draft = DraftConfig.from_target(config, layer_ids, min(cfg.vocab.size, config["vocab_size"]), cfg.train)
    return draft_size(expected_shapes(draft.to_dict()))


def make_plan(
    cfg: RunSettings,
    config: dict[str, Any],
    name: str,
    sources: Sequence[SourceSurvey],
    heldout: int,
    work: Workload,
) -> RunPlan:
    """Work out bytes and hours; settings must have passed `check_settings`.

    Raises:
        ValueError: if the rows fill fewer shards than data.min_shards, or their chunks may not fit the trainer's disk budget.
    """
    if work.shards < cfg.data.min_shards and not any(s.basis == "at_least" for s in sources):
        raise ValueError(
            f"{work.rows} usable rows fill {work.shards} shards of data.rows_per_shard = {cfg.data.rows_per_shard}, "
            f"data.min_shards = {cfg.data.min_shards} are required; add rows or lower one of them"
        )
    size, draft = target_size(config), draft_of(config, cfg)
    layer_ids = aux_layer_ids(cfg.extract.layer_ids, size.num_layers)
    encoding = cfg.extract.encoding
    most = hidden_state_bytes(
        work.max_tokens, work.max_supervised, len(layer_ids), size.hidden_size, encoding
    )
    raw = hidden_state_bytes(work.tokens, work.supervised, len(layer_ids), size.hidden_size, encoding)
    held = min(2 * cfg.train.shuffle_chunks * cfg.extract.chunk_bytes, most)
    if held > cfg.train.disk_budget_bytes:
        raise ValueError(
            f"two groups of chunks take up to {held} bytes, the disk budget is {cfg.train.disk_budget_bytes}; "
            "lower train.shuffle_chunks or raise train.disk_budget_bytes"
        )
    stages = _stages(cfg, work, size, draft, raw, heldout)
    share = COMPRESSED_SHARE.get(encoding, 1.0) if cfg.extract.compression == "zstd" else 1.0
    return RunPlan(
        target=name,
        params=size.params,
        active_params=size.active,
        layer_ids=layer_ids,
        sources=list(sources),
        heldout=heldout,
        work=work,
        max_state_bytes=most,
        state_bytes=round(raw * share),
        draft_params=draft.params,
        stages=stages,
        notes=_notes(cfg, sources) + _start_notes(cfg, work, stages),
    )


def _stages(
    cfg: RunSettings, work: Workload, size: TargetSize, draft: DraftSize, raw_bytes: int, heldout: int
) -> list[StageCost]:
    gpu, num_gpus = ACCELERATORS[cfg.resources.engine.accelerator], cfg.fanout.tensor_parallel_size
    replicas = cfg.fanout.replicas
    stages = []
    if work.waiting_rows:
        answering = len(cfg.fanout.server_urls) or replicas
        stages.append(regenerate_cost(work, size, cfg.engine, gpu, num_gpus, answering))
    stages.append(extract_cost(work, size, cfg.extract, gpu, num_gpus, replicas, raw_bytes))
    trainer = cfg.resources.trainer
    stages.append(train_cost(work, draft, cfg.train, ACCELERATORS[trainer.accelerator], trainer.gpus))
    stages.append(evaluate_cost(heldout, size, cfg.engine, cfg.evaluate, gpu, num_gpus))
    return stages


def _notes(cfg: RunSettings, sources: Sequence[SourceSurvey]) -> list[str]:
    notes = []
    if unknown := [s.name for s in sources if s.basis == "at_least"]:
        notes.append(
            f"the number of rows of {', '.join(unknown)} is unknown: rows, bytes and hours are the least there can be"
        )
    if cfg.data.excluded:
        notes.append("rows that data.excluded drops are counted in")
    if cfg.fanout.server_urls:
        notes.append("servers are counted as if they had the GPUs of resources.engine")
    if cfg.engine.engine == "transformers" or cfg.train.device == "cpu":
        notes.append(
            "hours are those of the GPUs that resources name, not of this recipe's CPU engine or trainer"
        )
    return notes


def _start_notes(cfg: RunSettings, work: Workload, stages: Sequence[StageCost]) -> list[str]:
    """An engine starts once a shard, which should take under MAX_START_SHARE of the shard's time."""
    notes = []
    for stage in stages:
        starts_engines = stage.stage == "extract" or (
            stage.stage == "regenerate" and not cfg.fanout.server_urls
        )
        if not starts_engines or work.shards == 1:
            continue
        seconds = stage.gpu_hours * 3600 / cfg.fanout.tensor_parallel_size / work.shards
        share = ENGINE_START_S / seconds
        if share > MAX_START_SHARE:
            working = (seconds - ENGINE_START_S) / cfg.data.rows_per_shard
            enough = ceil(ENGINE_START_S * (1 / MAX_START_SHARE - 1) / working)
            notes.append(
                f"{stage.stage}: starting the engine takes {share:.0%} of a shard's time; with data.rows_per_shard of {enough:,} "
                f"it would be {MAX_START_SHARE:.0%}"
            )
    return notes


def render_text(plan: RunPlan) -> str:
    """The plan for the terminal."""
    work = plan.work
    lines = [
        "",
        f"target    {plan.target}: {plan.params / 1e9:.2f} B parameters, {plan.active_params / 1e9:.2f} B active",
    ]
    lines += [
        f"draft     {plan.draft_params / 1e6:,.0f} M parameters, aux layers {', '.join(map(str, plan.layer_ids))}",
        "",
    ]
    lines += [f"{'source':<32} {'rows':>11} {'tokens':>15} {'dropped':>8}  how known"]
    lines += [
        f"{s.name:<32} {s.rows:>11,} {s.tokens:>15,} {s.dropped_share:>8.1%}  {s.basis.replace('_', ' ')}"
        for s in plan.sources
    ]
    lines += [
        "",
        f"rows      {work.rows:,} in {work.shards} shards, {plan.heldout:,} held out",
        f"tokens    {work.tokens:,} expected, at most {work.max_tokens:,}; {work.new_tokens:,} of them for the target to write",
        f"states    {plan.state_bytes / 1e9:,.3f} GB expected, at most {plan.max_state_bytes / 1e9:,.3f} GB before compression",
        "",
        f"{'stage':<14}{'GPU-hours':>10}{'hours':>9}   estimates, not measurements",
    ]
    lines += [f"{s.stage:<14}{s.gpu_hours:>10.2f}{s.hours:>9.2f}   {s.how}" for s in plan.stages]
    lines += [
        f"{'together':<14}{sum(s.gpu_hours for s in plan.stages):>10.2f}{sum(s.hours for s in plan.stages):>9.2f}",
        "",
    ]
    lines += ["assumed:", *(f"  {line}" for line in ASSUMPTIONS)]
    lines += [f"note      {note}" for note in plan.notes]
    return "\n".join([*lines, ""])
