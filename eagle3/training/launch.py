"""Stand-in with the launcher's signature: trains in this process."""

from collections.abc import Callable
from dataclasses import dataclass

from eagle3.config import TrainConfig
from eagle3.training.loop import train


@dataclass(frozen=True)
class TrainJob:
    """Everything a training process needs."""

    shard_dirs: list[str]
    vocab_path: str
    target_dir: str
    layer_ids: list[int]
    out_dir: str
    cfg: TrainConfig
    init_dir: str = ""


class Preempted(RuntimeError):
    """A checkpoint was saved; run again."""


def train_in_processes(job: TrainJob, on_progress: Callable[[], None] | None = None, every_s: float = 15.0) -> None:
    """Train, then call on_progress."""
    train(job.shard_dirs, job.vocab_path, job.target_dir, job.cfg, job.layer_ids, job.out_dir)
    if on_progress:
        on_progress()
