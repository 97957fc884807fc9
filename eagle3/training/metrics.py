"""Figures of a training run: one JSON line a step, rates and time left on the way.

Tensors are read back every FLUSH_EVERY steps only, so that no step waits for a metric.
"""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

FLUSH_EVERY = 10


class MetricLog:
    """Appends one JSON object a line: step, loss, loss_by_step, accuracy_by_step, gradient_norm, learning_rate, rates.

    A resumed run drops the lines after its checkpoint. on_flush is called with the newest line, for a bar or a live Deck.
    """

    def __init__(self, path: Path, total_steps: int, done_steps: int, on_flush: Callable[[dict[str, Any]], None]) -> None:
        kept = [line for line in path.read_text().splitlines() if json.loads(line)["step"] <= done_steps] if path.exists() else []
        path.write_text("".join(f"{line}\n" for line in kept))
        self.path, self.total, self.on_flush = path, total_steps, on_flush
        self.first, self.started = done_steps, time.monotonic()
        self.flushed_at, self.pending = self.started, list[dict[str, Any]]()

    def add(self, step: int, **figures: Any) -> None:
        """Queue the figures of optimizer step `step` (from 1); tensors stay on their device until the next flush."""
        self.pending.append({"step": step, **figures})
        if len(self.pending) >= FLUSH_EVERY or step == self.total:
            self.flush()

    def flush(self) -> None:
        """Write what is queued."""
        if not self.pending:
            return
        lines: list[dict[str, Any]] = [
            {k: v.tolist() if isinstance(v, Tensor) else v for k, v in figures.items()} for figures in self.pending
        ]
        now = time.monotonic()
        seconds, self.flushed_at = max(now - self.flushed_at, 1e-9), now
        step = lines[-1]["step"]
        lines[-1] |= {
            "tokens_per_s": round(sum(line.get("tokens", 0) for line in lines) / seconds, 1),
            "supervised_per_s": round(sum(line.get("supervised", 0) for line in lines) / seconds, 1),
            "seconds_left": round((now - self.started) / max(1, step - self.first) * (self.total - step), 1),
        }
        with open(self.path, "a") as f:
            f.writelines(json.dumps(line) + "\n" for line in lines)
        self.pending = []
        self.on_flush(lines[-1])


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """All lines of a metrics file."""
    with open(path) as f:
        return [json.loads(line) for line in f]


def by_step(values: Tensor, valid: Tensor) -> Tensor:
    """Mean over the valid slots of each TTT step: values [I, S] of any dtype, valid [I, S] bool -> [I] float32; 0 where none."""
    return (values * valid).sum(1).float() / valid.sum(1).clamp(min=1).to(torch.float32)
