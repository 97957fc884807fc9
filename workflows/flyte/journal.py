"""The task executions and cache hits of a local run, which has all tasks in one process. For remote runs,
Flyte's console shows them.

A task's module is its stage: `workflows.tasks.train_draft.train_draft` belongs to stage `train_draft`.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

STAGES = (
    "prepare_data",
    "regenerate_responses",
    "build_vocab",
    "extract_hidden_states",
    "train_draft",
    "export_draft",
    "evaluate_draft",
)


@dataclass(frozen=True)
class Entry:
    """One task execution or cache hit."""

    stage: str
    seconds: float
    cached: bool


_entries: list[Entry] = []
_lock = threading.Lock()


def start() -> None:
    """Forget earlier runs; the first task of a run calls this."""
    with _lock:
        _entries.clear()


def note(task_name: str, seconds: float, cached: bool) -> None:
    """Add an entry. task_name: module and function."""
    with _lock:
        _entries.append(Entry(task_name.rsplit(".", 2)[-2], seconds, cached))


def entries() -> list[Entry]:
    """All entries since `start`, in order."""
    with _lock:
        return list(_entries)


def by_stage() -> list[dict[str, Any]]:
    """Name, seconds, executions (`runs`) and cache hits (`cached`) of each stage."""
    summed = []
    for name in STAGES:
        mine = [e for e in entries() if e.stage == name]
        num_cached = sum(e.cached for e in mine)
        seconds = round(sum(e.seconds for e in mine), 3)
        summed.append(
            {"name": name, "seconds": seconds, "runs": len(mine) - num_cached, "cached": num_cached}
        )
    return summed


@contextmanager
def timer() -> Iterator[Callable[[], float]]:
    """Yield a function that returns the seconds since entering."""
    began = time.monotonic()
    yield lambda: time.monotonic() - began
