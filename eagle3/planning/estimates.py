"""GPU-hours of each stage, by the formulas in ASSUMPTIONS. These are estimates: none of it has run on a GPU.

Compression runs during prefill, so the slower of the two counts.
"""

from dataclasses import dataclass
from math import ceil
from typing import Any

from eagle3.config.run import RunSettings
from eagle3.draft.config import DraftConfig
from eagle3.draft.speculators import expected_shapes
from eagle3.planning.accelerators import ACCELERATORS, Accelerator
from eagle3.planning.workload import Workload
from eagle3.targets.properties import aux_layer_ids
from eagle3.targets.size import TargetSize

PREFILL_SHARE = 0.4
DECODE_SHARE = 0.6
TRAIN_SHARE = 0.3
ENGINE_START_S = 180.0
MIN_STEP_S = 0.005
ZSTD_BYTES_S = 0.15e9
ENCODER_THREADS = 8
# Measured on one small target with rows of a few hundred tokens (docs/benchmarks.md); only these encodings.
COMPRESSED_SHARE = {"bf16": 0.73, "fp8": 0.84}
ASSUMPTIONS = (
    f"prefill runs at {PREFILL_SHARE:.0%} of the peak: FLOPs = 2 x active parameters x tokens + attention",
    f"decode runs at {DECODE_SHARE:.0%} of the memory bandwidth: a step reads all weights and all key-values "
    f"and takes at least {MIN_STEP_S * 1000:.0f} ms",
    f"training runs at {TRAIN_SHARE:.0%} of the peak: FLOPs = 6 x trained parameters x (token, step) pairs",
    f"an engine starts in {ENGINE_START_S:.0f} s, once for each shard and stage",
    f"zstd compresses {ZSTD_BYTES_S / 1e9:.2f} GB/s on each of {ENCODER_THREADS} cores",
    "bf16 states compress to 0.73, fp8 to 0.84, measured on one small target; others count uncompressed",
)


@dataclass(frozen=True)
class StageCost:
    """GPU time of one stage; `hours` is wall time on all its GPUs, `how` a phrase for the plan."""

    stage: str
    gpu_hours: float
    hours: float
    how: str


@dataclass(frozen=True)
class DraftSize:
    """Parameters of a draft: those that every token uses (fc, and keys and values of the first step), those
    that every supervised (token, step) pair uses (layer and head), those of the head, and all."""

    per_token: int
    per_pair: int
    head: int
    params: int


def draft_size(config: dict[str, Any], cfg: RunSettings) -> DraftSize:
    """Size of the draft that these settings train for a target with this config.json."""
    layer_ids = aux_layer_ids(cfg.extract.layer_ids, config["num_hidden_layers"])
    draft = DraftConfig.from_target(config, layer_ids, min(cfg.vocab.size, config["vocab_size"]), cfg.train)
    shapes = expected_shapes(draft.to_dict())
    sizes = {name: shape[0] * shape[1] for name, shape in shapes.items() if len(shape) == 2}
    layer = sum(size for name, size in sizes.items() if name.startswith("layers.0."))
    head = sizes["lm_head.weight"]
    return DraftSize(
        per_token=sizes["fc.weight"] + sum(sizes[f"layers.0.self_attn.{n}_proj.weight"] for n in "kv"),
        per_pair=layer + head,
        head=head,
        params=sum(sizes.values()),
    )


def engine_gpus(cfg: RunSettings) -> Accelerator:
    """The GPUs of one engine replica, as one accelerator."""
    return ACCELERATORS[cfg.resources.engine.accelerator].times(cfg.fanout.tensor_parallel_size)


def regenerate_cost(cfg: RunSettings, work: Workload, size: TargetSize) -> StageCost:
    """The target reads the prompts and writes the answers."""
    gpus = engine_gpus(cfg)
    read_s = size.prefill_flops(work.waiting_rows, work.prompt_tokens) / (gpus.flops * PREFILL_SHARE)
    context = (work.prompt_tokens + work.new_tokens / 2) / max(work.waiting_rows, 1)
    # As many sequences as the settings and the memory next to the weights allow.
    free_bytes = gpus.memory_gb * 1e9 * cfg.engine.gpu_memory_utilization - size.weight_bytes(
        cfg.engine.dtype
    )
    fitting = int(free_bytes / (max(context, 1) * size.key_value_bytes(cfg.engine.dtype)))
    in_flight = max(1, min(cfg.engine.max_num_seqs, fitting))
    rate = decode_rate(size, cfg.engine.dtype, gpus, in_flight, context)
    how = f"writes about {rate:,.0f} tokens/s a replica with {in_flight} sequences in flight"
    replicas = len(cfg.fanout.server_urls) or cfg.fanout.replicas
    return _fanned_out("regenerate", read_s + work.new_tokens / rate, work.shards, cfg, replicas, how)


def extract_cost(cfg: RunSettings, work: Workload, size: TargetSize, state_bytes: int) -> StageCost:
    """The target reads every row; its states, `state_bytes` uncompressed, are compressed at the same time."""
    read_s = size.prefill_flops(work.rows, work.tokens) / (engine_gpus(cfg).flops * PREFILL_SHARE)
    pack_s = state_bytes / (ZSTD_BYTES_S * ENCODER_THREADS) if cfg.extract.compression == "zstd" else 0.0
    seconds = max(read_s, pack_s)
    slower = "packing" if pack_s > read_s else "reading"
    how = f"about {work.tokens / max(seconds, 1e-9):,.0f} tokens/s a replica, by {slower}"
    return _fanned_out("extract", seconds, work.shards, cfg, cfg.fanout.replicas, how)


def train_cost(cfg: RunSettings, work: Workload, draft: DraftSize) -> StageCost:
    """All epochs, without validation and fetching."""
    train = cfg.train
    trainer = cfg.resources.trainer
    pairs = work.supervised * train.ttt_steps
    flops = 6 * (work.tokens * draft.per_token + pairs * draft.per_pair) + 2 * work.supervised * draft.head
    gpus = ACCELERATORS[trainer.accelerator].times(trainer.gpus)
    hours = train.epochs * flops / (gpus.flops * TRAIN_SHARE) / 3600
    how = f"{train.epochs} epochs, {train.ttt_steps} TTT steps, {draft.params / 1e6:,.0f} M parameters"
    return StageCost("train", hours * trainer.gpus, hours, how)


def evaluate_cost(cfg: RunSettings, rows: int, size: TargetSize) -> StageCost:
    """Answers without and with the draft, as if the draft saved nothing; three engine starts."""
    evaluate = cfg.evaluate
    context = cfg.engine.max_model_len / 2
    rate = decode_rate(size, evaluate.dtype, engine_gpus(cfg), evaluate.concurrency, context)
    hours = (2 * rows * evaluate.max_new_tokens / rate + 3 * ENGINE_START_S) / 3600
    how = f"{rows} prompts, {evaluate.concurrency} in flight, {evaluate.dtype}"
    return StageCost("evaluate", hours * cfg.fanout.tensor_parallel_size, hours, how)


def decode_rate(size: TargetSize, dtype: str, gpus: Accelerator, in_flight: int, context: float) -> float:
    """Tokens per second of one replica; memory or, with many sequences, arithmetic limits a step."""
    read_bytes = size.weight_bytes(dtype) + in_flight * context * size.key_value_bytes(dtype)
    by_memory = read_bytes / (gpus.bandwidth_gb_s * 1e9 * DECODE_SHARE)
    by_arithmetic = 2 * size.active_params * in_flight / (gpus.flops * PREFILL_SHARE)
    return in_flight / max(by_memory, by_arithmetic, MIN_STEP_S)


def _fanned_out(
    stage: str, seconds: float, shards: int, cfg: RunSettings, replicas: int, how: str
) -> StageCost:
    """Divide the `seconds` of one replica among replicas; each takes one shard at a time."""
    shard_hours = (seconds / max(shards, 1) + ENGINE_START_S) / 3600
    rounds = ceil(shards / max(1, min(replicas, shards)))
    return StageCost(stage, shard_hours * shards * cfg.fanout.tensor_parallel_size, shard_hours * rounds, how)
