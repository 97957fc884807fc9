"""Faults told apart: those that another try may not meet, and those that come again with the same work."""

import errno
import sys

# Classes of libraries that are imported only where they are used; errors of one that is not loaded cannot come.
_STORE_CLIENTS = (
    ("botocore.exceptions", "ConnectionError"),
    ("botocore.exceptions", "HTTPClientError"),
    ("aiohttp", "ClientError"),
)
# What s3fs makes of a store's answers 503 and 500, and of those it does not know.
_STORE_ERRNOS = (errno.EBUSY, errno.EREMOTEIO, errno.EIO)
_CPU_ALLOCATOR = "DefaultCPUAllocator: can't allocate memory"


def is_transient(error: BaseException) -> bool:
    """Whether another try may succeed: after a lost connection, store, engine or rank.

    CUDA, NCCL and the parents of engine and trainer raise RuntimeError; its subclasses for code that is missing or goes in
    circles, and memory that does not suffice, are none of these.
    """
    if isinstance(error, NotImplementedError | RecursionError) or is_out_of_memory(error):
        return False
    if isinstance(
        error, (ConnectionError, TimeoutError, RuntimeError, *filter(None, map(_loaded, _STORE_CLIENTS)))
    ):
        return True
    return isinstance(error, OSError) and error.errno in _STORE_ERRNOS


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether this or what caused it is an allocation that failed, by Python or by torch, on a GPU or not."""
    torch_error = _loaded(("torch", "OutOfMemoryError"))
    while error is not None:
        if isinstance(error, MemoryError) or (torch_error and isinstance(error, torch_error)):
            return True
        if isinstance(error, RuntimeError) and _CPU_ALLOCATOR in str(error):  # it has no class of its own
            return True
        error = error.__cause__
    return False


def _loaded(place: tuple[str, str]) -> type[BaseException] | None:
    """A class by module and name; None while nobody has imported its module."""
    module, name = place
    return getattr(sys.modules.get(module), name, None)
