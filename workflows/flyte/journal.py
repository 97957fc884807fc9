"""What ran and what came from the cache in this process: local runs execute every task in one.

A stage is the module a task lives in: `workflows.tasks.train_draft.train_draft` belongs to stage `train_draft`. Pods keep no
journal; there Flyte's console shows the same.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True)
class Entry:
    """One task execution, or one result taken from the cache."""

    stage: str
    seconds: float
    cached: bool


_entries: list[Entry] = []
_lock = threading.Lock()


def start() -> None:
    """Forget earlier runs; the driver's first task calls it."""
    with _lock:
        _entries.clear()


def note(task_name: str, seconds: float, cached: bool) -> None:
    """Add an entry for a task, given by its full name (module and function)."""
    with _lock:
        _entries.append(Entry(task_name.rsplit(".", 2)[-2], seconds, cached))


def entries() -> list[Entry]:
    """All entries since `start`, in order."""
    with _lock:
        return list(_entries)


@contextmanager
def timer() -> Iterator[Callable[[], float]]:
    """Yield a function that returns the seconds since entering."""
    began = time.monotonic()
    yield lambda: time.monotonic() - began
