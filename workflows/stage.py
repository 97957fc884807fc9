"""The decorators under `@task`: one on every cached task tells the journal, both mark the faults that a new pod may not have."""

import functools
import logging
import sys
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from flytekit.exceptions.user import FlyteRecoverableException

from workflows import journal, store

P = ParamSpec("P")
R = TypeVar("R")

# The engine's parent raises RuntimeError when its process dies; so do CUDA and NCCL. Only tasks with `retries` try again.
TRANSIENT = (ConnectionError, TimeoutError, RuntimeError)


def recoverable(function: Callable[P, R]) -> Callable[P, R]:
    """In a pod, make engine and connection faults of a task's function recoverable."""

    @functools.wraps(function)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except TRANSIENT as e:
            if store.is_local():
                raise
            raise FlyteRecoverableException(f"{function.__name__}: {e}") from e

    return wrapped


def stage(function: Callable[P, R]) -> Callable[P, R]:
    """Journal each execution of a task's function; in a pod, make engine and connection faults recoverable.

    Settings and data errors (ValueError) pass unchanged: running them again would only fail again.
    """
    recovering = recoverable(function)

    @functools.wraps(function)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        # A terminal has bars.
        if not (store.is_local() and sys.stderr.isatty()):
            _show_log()
        with journal.timer() as seconds:
            result = recovering(*args, **kwargs)
        journal.note(f"{function.__module__}.{function.__name__}", seconds(), cached=False)
        return result

    return wrapped


def _show_log() -> None:
    """Write what the library tells of its work into the log: a pod's, or a file that takes stderr here."""
    logger = logging.getLogger("eagle3")
    if not logger.handlers:
        logger.addHandler(_StderrHandler())
        logger.setLevel(logging.INFO)


class _StderrHandler(logging.StreamHandler):  # type: ignore[type-arg]
    """Writes to what stderr is at the time: test runners and notebooks replace it."""

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)
