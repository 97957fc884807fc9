"""What the stages of a run cost on GPUs, by formula. These are estimates: none of it has run on a GPU.

reading tokens      FLOPs = 2 x active parameters x tokens + causal attention, at PREFILL_SHARE of the GPU's
                    peak
writing tokens      a step reads all weights and the key-values of every sequence, at DECODE_SHARE of the
                    memory's bandwidth, and takes at least MIN_STEP_S
packing states      zstd at ZSTD_BYTES_S on each of ENCODER_THREADS cores, during reading: the slower counts
training            FLOPs = 6 x trained parameters x (token, step) pairs that use them, at TRAIN_SHARE of the
                    peak
starting an engine  ENGINE_START_S, once for each shard and stage
"""

from dataclasses import dataclass
from math import ceil
from typing import Any

from eagle3.config.engine import EngineConfig, EvaluateConfig, ExtractConfig
from eagle3.config.run import RunSettings
from eagle3.config.training import TrainConfig
from eagle3.draft.config import DraftConfig
from eagle3.draft.speculators import expected_shapes
from eagle3.planning.accelerators import Accelerator
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
# Measured on rows of some hundred tokens of one small target (docs/benchmarks.md); other encodings are not
# measured.
COMPRESSED_SHARE = {"bf16": 0.73, "fp8": 0.84}
ASSUMPTIONS = (
    f"tokens are read at {PREFILL_SHARE:.0%} of the GPU's peak: FLOPs = 2 x active parameters x tokens "
    "+ attention",
    f"tokens are written at {DECODE_SHARE:.0%} of its memory bandwidth: a step reads all weights and all "
    f"key-values, and takes at least {MIN_STEP_S * 1000:.0f} ms",
    f"the draft is trained at {TRAIN_SHARE:.0%} of the peak: FLOPs = 6 x trained parameters x (token, step) "
    "pairs",
    f"an engine starts in {ENGINE_START_S:.0f} s, once for each shard and stage; zstd packs "
    f"{ZSTD_BYTES_S / 1e9:.2f} GB/s on each of {ENCODER_THREADS} cores",
    "bf16 states compress to 0.73, fp8 to 0.84, as measured on one small target; others are counted "
    "uncompressed",
)


@dataclass(frozen=True)
class StageCost:
    """GPU time of one stage; hours: wall time with all its GPUs."""

    stage: str
    gpu_hours: float
    hours: float
    how: str


@dataclass(frozen=True)
class DraftSize:
    """Parameters of a draft.

    per_token: used by every token: fc, keys and values of the first step. per_pair: used by every supervised
    (token, step) pair: layer and head. head: of the head alone. params: all.
    """

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
    every = sizes["fc.weight"] + sum(sizes[f"layers.0.self_attn.{n}_proj.weight"] for n in "kv")
    layer = sum(size for name, size in sizes.items() if name.startswith("layers.0."))
    head = sizes["lm_head.weight"]
    return DraftSize(every, layer + head, head, sum(sizes.values()))


def regenerate_cost(
    work: Workload, size: TargetSize, engine: EngineConfig, gpu: Accelerator, num_gpus: int, replicas: int
) -> StageCost:
    """The target reads the prompts and writes the answers."""
    read = size.prefill_flops(work.waiting_rows, work.prompt_tokens) / (
        gpu.tflops * 1e12 * PREFILL_SHARE * num_gpus
    )
    context = (work.prompt_tokens + work.new_tokens / 2) / max(work.waiting_rows, 1)
    in_flight = sequences_in_flight(size, engine, gpu, num_gpus, context)
    rate = write_rate(size, engine.dtype, gpu, num_gpus, in_flight, context)
    how = f"writes about {rate:,.0f} tokens/s a replica with {in_flight} sequences in flight"
    return _fanned_out("regenerate", read + work.new_tokens / rate, work.shards, num_gpus, replicas, how)


def extract_cost(
    work: Workload,
    size: TargetSize,
    extract: ExtractConfig,
    gpu: Accelerator,
    num_gpus: int,
    replicas: int,
    state_bytes: float,
) -> StageCost:
    """The target reads every row while states are packed."""
    read = size.prefill_flops(work.rows, work.tokens) / (gpu.tflops * 1e12 * PREFILL_SHARE * num_gpus)
    pack = state_bytes / (ZSTD_BYTES_S * ENCODER_THREADS) if extract.compression == "zstd" else 0.0
    seconds = max(read, pack)
    slower = "packing" if pack > read else "reading"
    how = f"about {work.tokens / max(seconds, 1e-9):,.0f} tokens/s a replica, by {slower}"
    return _fanned_out("extract", seconds, work.shards, num_gpus, replicas, how)


def train_cost(
    work: Workload, draft: DraftSize, train: TrainConfig, gpu: Accelerator, num_gpus: int
) -> StageCost:
    """All epochs, without validation and fetching."""
    pairs = work.supervised * train.ttt_steps
    flops = 6 * (work.tokens * draft.per_token + pairs * draft.per_pair) + 2 * work.supervised * draft.head
    hours = train.epochs * flops / (gpu.tflops * 1e12 * TRAIN_SHARE * num_gpus) / 3600
    how = f"{train.epochs} epochs, {train.ttt_steps} TTT steps, {draft.params / 1e6:,.0f} M parameters"
    return StageCost("train", hours * num_gpus, hours, how)


def evaluate_cost(
    rows: int,
    size: TargetSize,
    engine: EngineConfig,
    evaluate: EvaluateConfig,
    gpu: Accelerator,
    num_gpus: int,
) -> StageCost:
    """Answers without and with the draft, as if the draft saved nothing; three engine starts."""
    rate = write_rate(size, evaluate.dtype, gpu, num_gpus, evaluate.concurrency, engine.max_model_len / 2)
    hours = (2 * rows * evaluate.max_new_tokens / rate + 3 * ENGINE_START_S) / 3600
    return StageCost(
        "evaluate",
        hours * num_gpus,
        hours,
        f"{rows} prompts, {evaluate.concurrency} in flight, {evaluate.dtype}",
    )


def sequences_in_flight(
    size: TargetSize, engine: EngineConfig, gpu: Accelerator, num_gpus: int, context: float
) -> int:
    """As many sequences as the settings and the memory next to the weights allow, at least one."""
    room = gpu.memory_gb * 1e9 * engine.gpu_memory_utilization * num_gpus - size.weight_bytes(engine.dtype)
    fitting = int(room / (max(context, 1) * size.key_value_bytes(engine.dtype)))
    return max(1, min(engine.max_num_seqs, fitting))


def write_rate(
    size: TargetSize, dtype: str, gpu: Accelerator, num_gpus: int, in_flight: int, context: float
) -> float:
    """Tokens per second of one replica; memory or, with many sequences, arithmetic limits a step."""
    moved = size.weight_bytes(dtype) + in_flight * context * size.key_value_bytes(dtype)
    by_memory = moved / (gpu.bandwidth_gb_s * 1e9 * DECODE_SHARE * num_gpus)
    by_arithmetic = 2 * size.active * in_flight / (gpu.tflops * 1e12 * PREFILL_SHARE * num_gpus)
    return in_flight / max(by_memory, by_arithmetic, MIN_STEP_S)


def _fanned_out(stage: str, seconds: float, shards: int, num_gpus: int, replicas: int, how: str) -> StageCost:
    """Divide the seconds of one replica among replicas, in whole shards."""
    a_shard = (seconds / max(shards, 1)) + ENGINE_START_S
    rounds = ceil(shards / max(1, min(replicas, shards)))
    return StageCost(stage, a_shard * shards * num_gpus / 3600, a_shard * rounds / 3600, how)
