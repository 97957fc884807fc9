"""The decorators under `@task`: `stage` on every cached task, `recoverable` on the others.

Both mark transient errors as recoverable; `stage` also writes the journal.
"""

import functools
import logging
import sys
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, get_args, get_type_hints

from flytekit.core.context_manager import ExecutionState, FlyteContext, FlyteContextManager
from flytekit.core.type_engine import TypeEngine
from flytekit.exceptions.system import FlyteDownloadDataException, FlyteUploadDataException
from flytekit.exceptions.user import FlyteRecoverableException

from eagle3.errors import is_out_of_memory, is_transient
from eagle3.files import is_remote
from workflows.flyte import journal, store

P = ParamSpec("P")
R = TypeVar("R")

# A store that fails or refuses: flytekit raises the same for both. A missing file is a
# FlyteDataNotFoundException, a ValueError.
TRANSFER_FAULTS = (FlyteDownloadDataException, FlyteUploadDataException)
MEMORY_HINT = (
    "lower train.pack_tokens for training, engine.max_num_seqs or engine.max_num_batched_tokens for an "
    "engine, or ask for more memory under resources"
)


def recoverable(function: Callable[P, R]) -> Callable[P, R]:
    """In a pod, make transient errors of stores, connections, engines and ranks recoverable.

    Permanent errors pass unchanged: wrong settings and data (ValueError), too little memory. Under `@dynamic`
    this covers the function alone: Flyte does not repeat a dynamic task after its nodes have failed.
    """

    @functools.wraps(function)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return _in_store(function, function(*args, **kwargs))
        except Exception as e:
            if is_out_of_memory(e) and not isinstance(e, MemoryError):
                raise MemoryError(f"{function.__name__}: {e}; {MEMORY_HINT}") from e
            if store.is_local() or not (isinstance(e, TRANSFER_FAULTS) or is_transient(e)):
                raise
            raise FlyteRecoverableException(f"{function.__name__}: {e}") from e

    return wrapped


def _in_store(function: Callable[..., R], result: R) -> R:
    """In a pod, a task's result with its files uploaded. flytekit uploads them after the function, where a
    store that fails for a FlyteFile fails the task for good."""
    context = FlyteContextManager.current_context()
    state = context.execution_state
    is_pod = state is not None and state.mode == ExecutionState.Mode.TASK_EXECUTION
    if not is_pod or not is_remote(context.file_access.raw_output_prefix):
        return result
    kind = get_type_hints(function)["return"]
    if not isinstance(result, tuple):
        return _stored(context, result, kind)  # type: ignore[no-any-return]
    kinds = get_args(kind) or get_type_hints(kind).values()  # a NamedTuple's
    stored = [_stored(context, *pair) for pair in zip(result, kinds, strict=True)]
    return type(result)(*stored) if hasattr(result, "_fields") else tuple(stored)  # type: ignore[return-value]


def _stored(context: FlyteContext, value: Any, kind: Any) -> Any:
    """Through Flyte's form of it and back: it names files in the store now, which are not uploaded again."""
    literal = TypeEngine.to_literal(context, value, kind, TypeEngine.to_literal_type(kind))
    return TypeEngine.to_python_value(context, literal, kind)


def stage(function: Callable[P, R]) -> Callable[P, R]:
    """Journal each execution of a task's function, and do what `recoverable` does."""
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
    """Write the library's log records to stderr: a pod's log, or a file here."""
    logger = logging.getLogger("eagle3")
    if not logger.handlers:
        logger.addHandler(_StderrHandler())
        logger.setLevel(logging.INFO)


class _StderrHandler(logging.StreamHandler):  # type: ignore[type-arg]
    """Writes to what stderr is at the time: test runners and notebooks replace it."""

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)
