"""The plan: rows, bytes and GPU-hours of a run, estimated from its settings and a survey of its sources."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import ceil
from typing import Any

from eagle3.config.run import RunSettings
from eagle3.planning.estimates import (
    ASSUMPTIONS,
    COMPRESSED_SHARE,
    ENGINE_START_S,
    StageCost,
    draft_size,
    evaluate_cost,
    extract_cost,
    regenerate_cost,
    train_cost,
)
from eagle3.planning.preflight import largest_state_bytes
from eagle3.planning.workload import SourceSurvey, Workload
from eagle3.shards.hidden_states import hidden_state_bytes
from eagle3.targets.properties import aux_layer_ids
from eagle3.targets.size import target_size

MAX_START_SHARE = 0.1


@dataclass(frozen=True)
class RunPlan:
    """Size and cost of a run. Hidden states take `state_bytes` after compression, by estimate; they take at
    most `max_state_bytes` before it, with every answer at its longest."""

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
        """JSON-ready, with the assumptions of the estimates."""
        return asdict(self) | {"assumptions": list(ASSUMPTIONS)}


def make_plan(
    cfg: RunSettings,
    config: dict[str, Any],
    name: str,
    sources: Sequence[SourceSurvey],
    heldout: int,
    work: Workload,
) -> RunPlan:
    """Estimate bytes and hours; the settings must have passed preflight.

    Args:
        config: the target's config.json.
        name: the target's name.
        heldout: number of held-out prompts.
    """
    size = target_size(config)
    draft = draft_size(config, cfg)
    layer_ids = aux_layer_ids(cfg.extract.layer_ids, size.num_layers)
    encoding = cfg.extract.encoding
    raw = hidden_state_bytes(work.tokens, work.supervised, len(layer_ids), size.hidden_size, encoding)
    stages = [
        extract_cost(cfg, work, size, raw),
        train_cost(cfg, work, draft),
        evaluate_cost(cfg, heldout, size),
    ]
    if work.waiting_rows:
        stages.insert(0, regenerate_cost(cfg, work, size))
    share = COMPRESSED_SHARE.get(encoding, 1.0) if cfg.extract.compression == "zstd" else 1.0
    return RunPlan(
        target=name,
        params=size.params,
        active_params=size.active_params,
        layer_ids=layer_ids,
        sources=list(sources),
        heldout=heldout,
        work=work,
        max_state_bytes=largest_state_bytes(cfg, config, work),
        state_bytes=round(raw * share),
        draft_params=draft.params,
        stages=stages,
        notes=_notes(cfg, sources) + _start_notes(cfg, work, stages),
    )


def _notes(cfg: RunSettings, sources: Sequence[SourceSurvey]) -> list[str]:
    notes = []
    if unknown := [s.name for s in sources if s.basis == "at_least"]:
        notes.append(
            f"the number of rows of {', '.join(unknown)} is unknown: rows, bytes and hours are lower bounds"
        )
    for s in sources:
        if s.dropped_share > cfg.data.max_dropped_share:
            notes.append(
                f"{s.name}: {s.dropped_share:.0%} of the first rows cannot be used; prepare fails if it is "
                f"more than data.max_dropped_share = {cfg.data.max_dropped_share} of all"
            )
    if cfg.data.excluded:
        notes.append("the row counts include rows that data.excluded will drop")
    if cfg.fanout.server_urls:
        notes.append("the estimate assumes that the servers have the GPUs of resources.engine")
    if cfg.engine.engine == "transformers" or cfg.train.device == "cpu":
        notes.append("hours are for the GPUs in `resources`, not for this recipe's CPU engine or trainer")
    return notes


def _start_notes(cfg: RunSettings, work: Workload, stages: Sequence[StageCost]) -> list[str]:
    """List stages that spend more than MAX_START_SHARE of a shard's time on starting the engine."""
    notes = []
    for stage in stages:
        is_answered_here = stage.stage == "regenerate" and not cfg.fanout.server_urls
        if not (is_answered_here or stage.stage == "extract") or work.shards == 1:
            continue
        seconds = stage.gpu_hours * 3600 / cfg.fanout.tensor_parallel_size / work.shards
        share = ENGINE_START_S / seconds
        if share > MAX_START_SHARE:
            seconds_a_row = (seconds - ENGINE_START_S) / cfg.data.rows_per_shard
            enough = ceil(ENGINE_START_S * (1 / MAX_START_SHARE - 1) / seconds_a_row)
            notes.append(
                f"{stage.stage}: starting the engine takes {share:.0%} of a shard's time; with "
                f"data.rows_per_shard of {enough:,} it would be {MAX_START_SHARE:.0%}"
            )
    return notes


def render_text(plan: RunPlan) -> str:
    """The plan for the terminal."""
    work = plan.work
    sources = [
        f"{s.name:<32} {s.rows:>11,} {s.tokens:>15,} {s.dropped_share:>8.1%}  {s.basis.replace('_', ' ')}"
        for s in plan.sources
    ]
    stages = [f"{s.stage:<14}{s.gpu_hours:>10.2f}{s.hours:>9.2f}   {s.how}" for s in plan.stages]
    gpu_hours = sum(s.gpu_hours for s in plan.stages)
    hours = sum(s.hours for s in plan.stages)
    lines = [
        "",
        f"target    {plan.target}: {plan.params / 1e9:.2f} B parameters, {plan.active_params / 1e9:.2f} B "
        "active",
        f"draft     {plan.draft_params / 1e6:,.0f} M parameters, aux layers "
        f"{', '.join(map(str, plan.layer_ids))}",
        "",
        f"{'source':<32} {'rows':>11} {'tokens':>15} {'dropped':>8}  how known",
        *sources,
        "",
        f"rows      {work.rows:,} in {work.shards} shards, {plan.heldout:,} held out",
        f"tokens    {work.tokens:,} expected, at most {work.max_tokens:,}; the target writes "
        f"{work.new_tokens:,} of them",
        f"states    {plan.state_bytes / 1e9:,.3f} GB expected, at most {plan.max_state_bytes / 1e9:,.3f} GB "
        "before compression",
        "",
        f"{'stage':<14}{'GPU-hours':>10}{'hours':>9}   estimates, not measurements",
        *stages,
        f"{'together':<14}{gpu_hours:>10.2f}{hours:>9.2f}",
        "",
        "assumed:",
        *(f"  {line}" for line in ASSUMPTIONS),
        "",
        *(f"note      {note}" for note in plan.notes),
    ]
    return "\n".join([*lines, ""])
