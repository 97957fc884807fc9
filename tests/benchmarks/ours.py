"""Our side: the real trainer on synthetic states, in a process of its own."""

import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from eagle3.config.training import TrainConfig
from eagle3.shards.hidden_states import read_manifest
from eagle3.training.distributed import DistContext
from eagle3.training.launch import Preempted, TrainJob
from eagle3.training.loop import METRICS, train
from eagle3.training.metrics import read_metrics
from tests.benchmarks.meter import StepMeter, read_arguments

# The peer's defaults and its command line in peer.py, so that both sides do the same work on the same trained
# parameters.
SETTINGS: dict[str, Any] = {
    "ttt_steps": 3,
    "step_decay": 1.0,
    "optimizer": "adamw",
    "learning_rate": 1e-4,
    "weight_decay": 0.01,
    "schedule": "constant",
    "head": "target_frozen",  # the peer does not train it
    "norm_before_fc": True,
    "norm_output": True,
    "validation_rows": 0,
    "checkpoint_every": 1_000_000,
}


def run_trainer(states_dir: Path, cfg: TrainConfig, out_dir: Path, stop_after: int) -> int:
    """Train `stop_after` steps on states that states.py wrote; only this function knows our trainer's entry.

    Returns:
        Data tokens per step.

    Raises:
        ValueError: if a pack was not full.
    """
    shard = states_dir / "ours" / "shard"
    job = TrainJob(
        shard_dirs=[str(shard)],
        vocab_path=str(states_dir / "ours" / "vocab.safetensors"),
        target_dir=str(states_dir / "target"),
        layer_ids=read_manifest(shard)["info"]["layer_ids"],
        out_dir=str(out_dir),
        cfg=cfg,
    )
    with suppress(Preempted):
        train(job, DistContext(0, 1, torch.device(cfg.device)), should_stop=lambda step: step >= stop_after)
    tokens = {line["tokens"] for line in read_metrics(out_dir / METRICS)}
    if tokens != {cfg.pack_tokens}:
        raise ValueError(
            f"every pack must hold {cfg.pack_tokens} tokens, got packs of {sorted(tokens)}; "
            "check the rows' length"
        )
    return cfg.pack_tokens


def main() -> None:
    arguments = read_arguments(__doc__)
    cfg = TrainConfig(pack_tokens=arguments.pack_tokens, device="cpu", **SETTINGS)
    meter = StepMeter(arguments.warmup, arguments.steps)
    with tempfile.TemporaryDirectory() as out_dir:
        tokens = run_trainer(arguments.states, cfg, Path(out_dir), arguments.warmup + arguments.steps)
    meter.write(arguments.results, tokens)


if __name__ == "__main__":
    main()
