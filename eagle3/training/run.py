"""One training process: `python -m eagle3.training.run job.json`, alone or by torchrun. See launch.py."""

import logging
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

from eagle3.errors import is_out_of_memory, is_transient
from eagle3.files import try_lock
from eagle3.training import launch
from eagle3.training.distributed import close_distributed, init_distributed
from eagle3.training.loop import train


class StopRequest:
    """True after a stop signal, or once the process that started this one died; called before every step."""

    def __init__(self) -> None:
        self.received = False
        self.launcher = int(os.environ.get(launch.LAUNCHER_PID, "0"))
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._receive)

    def _receive(self, number: int, frame: Any) -> None:
        self.received = True

    def __call__(self, step: int) -> bool:
        return self.received or (self.launcher > 0 and not _is_alive(self.launcher))


def _is_alive(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except ProcessLookupError:
        return False
    except OSError:  # another user's, or a system without /proc
        return True


@contextmanager
def only_trainer(out: Path, stop: StopRequest) -> Iterator[None]:
    """Wait until no other trainer writes into the directory: one whose launcher was killed may still save."""
    if (lock := try_lock(out / launch.LOCK_NAME)) is None:
        logging.info("waiting for another trainer in %s", out)
    while lock is None:
        if stop(0):
            raise launch.Preempted("stopped while waiting for another trainer")
        time.sleep(0.5)
        lock = try_lock(out / launch.LOCK_NAME)
    try:
        (out / launch.PREEMPTED_NAME).unlink(missing_ok=True)
        yield
    finally:
        lock.release()


def main(job_path: str) -> int:
    """Train; launch.raise_failure reads the exit code."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    stop = StopRequest()
    job = launch.TrainJob.model_validate_json(Path(job_path).read_text())
    out = Path(job.out_dir)
    rank = int(os.environ.get("RANK", "0"))
    # In init_distributed the other ranks wait for the first, so they write nothing before it holds the lock.
    try:
        with only_trainer(out, stop) if rank == 0 else nullcontext():
            train(job, init_distributed(job.cfg.device), stop)
    except launch.Preempted:
        if rank == 0:
            (out / launch.PREEMPTED_NAME).touch()
        return launch.PREEMPTED_CODE
    except Exception as e:
        # Retry after any OSError: the next pod may have more disk space.
        may_retry = isinstance(e, OSError) or is_transient(e)
        logging.exception("training failed" if may_retry else "training cannot continue")
        with suppress(OSError):
            (out / f"{'failed' if may_retry else 'refused'}-{rank}.txt").write_text(_message(e))
        return 1 if may_retry else launch.REFUSED_CODE
    finally:
        close_distributed()
    return 0


def _message(error: Exception) -> str:
    """Our own messages unchanged, others with their class; with a remedy if memory ran out."""
    is_ours = isinstance(error, ValueError | FloatingPointError | OSError)
    text = str(error) if is_ours else f"{type(error).__name__}: {error}"
    if is_out_of_memory(error):
        text += "; lower train.pack_tokens, or ask for more memory under resources.trainer (accelerator, mem)"
    return text


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
