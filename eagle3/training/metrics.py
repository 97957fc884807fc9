"""The metrics of a training run: one JSON line per step.

Tensors are read back every FLUSH_EVERY steps, so that no step waits for a metric, and before each checkpoint:
a non-finite loss is found before its weights are saved.
"""

import json
import math
import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

FLUSH_EVERY = 10


class MetricLog:
    """Appends a JSON line per step: step and given values, at flushes also rates, memory and time left.

    on_flush: called with the newest line, for a progress bar. num_supervised: slots logged by this process.
    """

    def __init__(self, path: Path | None, total_steps: int, done_steps: int, so_far: bytes = b"") -> None:
        """Rewrite the file with the lines `so_far` of a checkpoint up to done_steps.

        path: None in every process but the first.
        """
        if path is not None:
            lines = [line for line in so_far.decode().splitlines() if line]
            kept = [f"{line}\n" for line in lines if json.loads(line)["step"] <= done_steps]
            path.write_text("".join(kept))
        self.path = path
        self.total_steps = total_steps
        self.first_step = done_steps
        self.started = self.flushed_at = time.monotonic()
        self.on_flush: Callable[[dict[str, Any]], None] = lambda line: None
        self.pending = list[tuple[list[str], dict[str, Any]]]()
        self.num_supervised = 0.0

    def is_due(self, step: int) -> bool:
        """Whether logging `step` flushes."""
        return len(self.pending) + 1 >= FLUSH_EVERY or step == self.total_steps

    def log_step(self, step: int, rows: list[str], **values: Any) -> None:
        """Queue the values of step `step` (from 1); tensors stay on their device until the next flush.

        Args:
            rows: sample ids that this process trained on in the step.
            values: at least loss, gradient_norm, own_loss (of this process), tokens, supervised, wait_s.
        """
        due = self.is_due(step)
        self.pending.append((rows, {"step": step, **values}))
        if due:
            self.flush()

    def flush(self) -> None:
        """Write the queue; FloatingPointError names step and rows of a non-finite loss or gradient."""
        if not self.pending:
            return
        pending, self.pending = self.pending, []
        lines = []
        for rows, values in pending:
            line: dict[str, Any] = {
                name: v.tolist() if isinstance(v, Tensor) else v for name, v in values.items()
            }
            _check_finite(line, line.pop("own_loss"), rows)
            lines.append(line)
        self.num_supervised += sum(line["supervised"] for line in lines)
        lines[-1] |= self._rates(lines)
        if self.path is not None:
            with open(self.path, "a") as f:
                f.writelines(json.dumps(line) + "\n" for line in lines)
        self.on_flush(lines[-1])

    def _rates(self, lines: list[dict[str, Any]]) -> dict[str, float]:
        now = time.monotonic()
        seconds, self.flushed_at = max(now - self.flushed_at, 1e-9), now
        step = lines[-1]["step"]
        seconds_a_step = (now - self.started) / max(1, step - self.first_step)
        return {
            "tokens_per_s": round(sum(line["tokens"] for line in lines) / seconds, 1),
            "supervised_per_s": round(sum(line["supervised"] for line in lines) / seconds, 1),
            "data_wait_share": round(sum(line.pop("wait_s") for line in lines) / seconds, 4),
            "memory_bytes": peak_memory_bytes(),
            "seconds_left": round(seconds_a_step * (self.total_steps - step), 1),
        }

    def text(self) -> bytes:
        """Content of the file."""
        return self.path.read_bytes() if self.path is not None else b""


def _check_finite(line: dict[str, Any], own_loss: float, rows: list[str]) -> None:
    if math.isfinite(line["loss"]) and math.isfinite(line["gradient_norm"]):
        return
    is_own = not math.isfinite(own_loss) or math.isfinite(line["loss"])
    raise FloatingPointError(
        f"step {line['step']}: loss {line['loss']}, gradient norm {line['gradient_norm']} on "
        f"{f'conversations {rows}' if is_own else 'rows of another process'}; check their states, or lower "
        "train.learning_rate; the last checkpoint is intact"
    )


def peak_memory_bytes() -> int:
    """Peak memory of this process: GPU memory if it uses a GPU, else resident memory."""
    if torch.cuda.is_available() and torch.cuda.max_memory_allocated():
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """All complete lines of a metrics file; a trainer may still be writing the last one."""
    with open(path) as f:
        return [json.loads(line) for line in f if line.endswith("\n")]
