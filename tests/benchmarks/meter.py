"""What both sides share: their arguments, and the instrument that measures CPU seconds, wall seconds and peak
memory of steps.

The instrument hangs on torch's own hook for finished optimizer steps, so it is the same for any trainer, and
what comes before and after the timed steps (imports, start, checkpoint, export) is left out. A step reaches
from one end of the optimizer's work to the next: data, forward, backward, clipping, update, log. For runs
with one optimizer.
"""

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook


def read_arguments(description: str) -> argparse.Namespace:
    """Arguments of a side: states, results, pack_tokens, warmup, steps."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--states", type=Path, required=True, help="directory that states.py wrote")
    parser.add_argument("--results", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--pack-tokens", type=int, default=2048)
    parser.add_argument("--warmup", type=int, default=2, help="steps before the timed ones")
    parser.add_argument("--steps", type=int, default=5, help="timed steps")
    return parser.parse_args()


def peak_rss_bytes() -> int:
    """Peak resident memory of this process so far (VmHWM; ru_maxrss would count the parent's from before
    exec).
    """
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) << 10


def tree_cpu_s(pid: int) -> float:
    """User and system seconds so far of a process, its threads, its living descendants and its children that
    have ended.
    """
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    own = sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
    children = [
        child for file in Path(f"/proc/{pid}/task").glob("*/children") for child in file.read_text().split()
    ]
    return own + sum(tree_cpu_s(int(child)) for child in children)


class StepMeter:
    """Marks the ends of optimizer steps from its making on; on a GPU it waits for the device where the timed
    steps begin and end.

    warmup: steps before the timed ones, at least 1 (the first one's beginning is not seen). steps: timed
    steps.
    """

    def __init__(self, warmup: int, steps: int) -> None:
        assert warmup >= 1
        self.warmup, self.steps, self.done = warmup, steps, 0
        self.marks: list[tuple[float, float]] = []
        self.peak_rss = self.trained = 0
        register_optimizer_step_post_hook(self._mark)

    def _mark(self, optimizer: Optimizer, *_: Any) -> None:
        self.done += 1
        if self.done not in (self.warmup, self.warmup + self.steps):
            return
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.marks.append((time.process_time(), time.perf_counter()))
        self.peak_rss = peak_rss_bytes()
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self.trained = sum(p.numel() for p in parameters if p.grad is not None)

    def results(self, tokens_per_step: int) -> dict[str, float]:
        """tokens_per_cpu_s (user + system, all threads), tokens_per_s, peak_rss bytes, trained parameters,
        threads.

        Args:
            tokens_per_step: data tokens, supervised or not.

        Raises:
            ValueError: if the run ended early.
        """
        if len(self.marks) < 2:
            raise ValueError(
                f"{self.warmup + self.steps} steps expected, the trainer made {self.done}; write more rows"
            )
        cpu_s, wall_s = (end - start for start, end in zip(*self.marks, strict=True))
        tokens = self.steps * tokens_per_step
        return {
            "tokens_per_cpu_s": tokens / cpu_s,
            "tokens_per_s": tokens / wall_s,
            "peak_rss": self.peak_rss,
            "trained": self.trained,
            "threads": torch.get_num_threads(),
        }

    def write(self, path: Path, tokens_per_step: int) -> None:
        """Write the results as JSON."""
        path.write_text(json.dumps(self.results(tokens_per_step)))
