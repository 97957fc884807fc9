"""Run training in child processes, one or (by torchrun) one per GPU, and raise why they failed.

On SIGTERM or Ctrl-C a trainer finishes its step, saves and exits with PREEMPTED_CODE. On a permanent error,
such as bad data, bad settings or too little memory, it exits with REFUSED_CODE and writes its message to
refused-<rank>.txt. After a kill, or a lost rank or store (message in failed-<rank>.txt), a retry may succeed.
"""

import logging
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from eagle3.config.training import TrainConfig
from eagle3.errors import RankDied, TransientError

logger = logging.getLogger(__name__)
PREEMPTED_CODE, REFUSED_CODE = 75, 65  # EX_TEMPFAIL, EX_DATAERR of sysexits.h
SHUTDOWN_TIMEOUT_S = 600  # torchrun's default of 30 s is too short to write a large checkpoint
LAUNCHER_PID = "EAGLE3_LAUNCHER_PID"
JOB_NAME, LOCK_NAME, PREEMPTED_NAME = "job.json", "trainer.lock", "preempted"


class Preempted(TransientError):
    """The trainer received a stop signal and saved a checkpoint; the same job resumes from it."""


class TrainJob(BaseModel):
    """Inputs and settings of a training process.

    shard_dirs: hidden-state shards in order, local directories or fsspec URLs. vocab_path: vocab.safetensors.
    target_dir: the target's files. layer_ids: aux layers of the shards, ascending. out_dir: for
    draft.safetensors, draft.json, metrics.jsonl and the checkpoint from which a run resumes. init_dir: a
    draft in the Speculators format to start from, "" for none.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    shard_dirs: list[str]
    vocab_path: str
    target_dir: str
    layer_ids: list[int]
    out_dir: str
    cfg: TrainConfig
    init_dir: str = ""


def train_in_processes(
    job: TrainJob, on_progress: Callable[[], None] = lambda: None, every_s: float = 15.0
) -> None:
    """Run a job; on_progress is called every `every_s` seconds and at the end, also of a failed job.

    Raises:
        ValueError: a permanent error, with the trainer's message.
        Preempted: after a SIGTERM, when the trainer has saved; run the job again.
        KeyboardInterrupt: after Ctrl-C, when the trainer has saved.
        RankDied: the trainer died; its last checkpoint is intact.
    """
    out = Path(job.out_dir)
    out.mkdir(parents=True, exist_ok=True)
    for old in [*out.glob("refused-*.txt"), *out.glob("failed-*.txt"), out / PREEMPTED_NAME]:
        old.unlink(missing_ok=True)
    (out / JOB_NAME).write_text(job.model_dump_json(indent=1))
    num_processes = count_processes(job.cfg)
    process = subprocess.Popen(_command(out / JOB_NAME, num_processes), env=_environment(num_processes))
    try:
        with _forwarding_signals(process) as received:
            code: int | None = None
            while code is None:
                with suppress(subprocess.TimeoutExpired):
                    code = process.wait(every_s)
                on_progress()
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait()
    raise_failure(code, received, out)
    for used in (JOB_NAME, LOCK_NAME):
        (out / used).unlink(missing_ok=True)
    for left in out.glob("chunks-*"):  # of an earlier try with more processes
        shutil.rmtree(left)


def raise_failure(code: int, received: set[int], out: Path) -> None:
    """Raise why the trainer ended, unless its job is done; `received` are the signals forwarded to it."""
    if signal.SIGINT in received:
        raise KeyboardInterrupt
    # Report refusals first: when one rank refuses, torchrun kills the others, so their exit codes are only
    # consequences.
    refused = _messages(out, "refused")
    if (refused or code == REFUSED_CODE) and signal.SIGTERM not in received:
        raise ValueError(refused or "training cannot continue; see the trainer's own message above")
    if code == PREEMPTED_CODE or (out / PREEMPTED_NAME).exists() or (code and signal.SIGTERM in received):
        raise Preempted(f"training was stopped; run it again to resume from its checkpoint in {out}")
    if code:
        message = _messages(out, "failed") or "see its own message above"
        raise RankDied(f"the trainer ended with code {code}: {message}; run again to resume from {out}")


def _messages(out: Path, kind: str) -> str:
    """The last messages of all processes, without repeats."""
    return "; ".join(dict.fromkeys(path.read_text() for path in sorted(out.glob(f"{kind}-*.txt"))))


def count_processes(cfg: TrainConfig) -> int:
    """Processes to start: as set, else one per GPU up to the packs of a step, or one on a CPU."""
    import torch

    gpus = 0 if cfg.device == "cpu" else torch.cuda.device_count()
    if not cfg.processes and gpus > cfg.packs_per_step:
        message = "%d of %d GPUs stay idle; raise train.packs_per_step to a multiple of %d"
        logger.warning(message, gpus - cfg.packs_per_step, gpus, gpus)
    return cfg.processes or min(gpus, cfg.packs_per_step) or 1


def _command(job_path: Path, num_processes: int) -> list[str]:
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_processes)]
    launcher = torchrun if num_processes > 1 else []
    return [sys.executable, *launcher, "-m", "eagle3.training.run", str(job_path)]


def _environment(num_processes: int) -> dict[str, str]:
    """The caller's environment, with eagle3 importable, cores divided, and this pid in LAUNCHER_PID."""
    root = str(Path(__file__).resolve().parents[2])
    added = {LAUNCHER_PID: str(os.getpid()), "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(SHUTDOWN_TIMEOUT_S)}
    added["PYTHONPATH"] = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    if num_processes > 1:
        added["OMP_NUM_THREADS"] = str(max(1, (os.cpu_count() or 1) // num_processes))
    return os.environ | added


@contextmanager
def _forwarding_signals(process: subprocess.Popen[bytes]) -> Iterator[set[int]]:
    """In the main thread, forward SIGTERM and SIGINT to the trainer; yields those received."""
    received: set[int] = set()
    if threading.current_thread() is not threading.main_thread():
        yield received
        return

    def forward(number: int, frame: Any) -> None:
        received.add(number)
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)

    before = {number: signal.signal(number, forward) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
