"""Classify exceptions as transient or permanent.

Transient: a connection, a store, an engine or a rank was lost, so another try may succeed. All else is
permanent, also a plain RuntimeError: code that saw something die raises one of the classes below.
"""

import errno
import sys


class TransientError(RuntimeError):
    """Another try may succeed."""


class EngineDied(TransientError):
    """An engine failed or was killed, or a server no longer answers."""


class RankDied(TransientError):
    """A process that trains, or one that it trains with, failed or was killed."""


class WorkerDied(TransientError):
    """A process that encodes rows was killed."""


class StoreError(TransientError, ConnectionError):
    """A store did not answer, or did not keep what it was given."""


# Classes of libraries by module and name; a library that is not imported raises nothing.
_TRANSIENT_CLASSES = (
    ("torch", "AcceleratorError"),  # CUDA
    ("torch.distributed", "DistError"),  # NCCL and the rendezvous
    ("botocore.exceptions", "ConnectionError"),
    ("botocore.exceptions", "HTTPClientError"),
    ("aiohttp", "ClientError"),
)
# s3fs turns a store's answers 503 and 500, and those it does not know, into OSErrors with these numbers.
_TRANSIENT_ERRNOS = (errno.EBUSY, errno.EREMOTEIO, errno.EIO)
_CPU_ALLOCATOR = "DefaultCPUAllocator: can't allocate memory"


def is_transient(error: BaseException) -> bool:
    """Whether another try may succeed. Too little memory is permanent."""
    if is_out_of_memory(error):
        return False
    of_libraries = filter(None, map(_loaded, _TRANSIENT_CLASSES))
    if isinstance(error, (TransientError, ConnectionError, TimeoutError, *of_libraries)):
        return True
    return isinstance(error, OSError) and error.errno in _TRANSIENT_ERRNOS


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether this error or one of its causes is a failed allocation of Python or torch, GPU or CPU."""
    torch_error = _loaded(("torch", "OutOfMemoryError"))
    while error is not None:
        if isinstance(error, MemoryError) or (torch_error and isinstance(error, torch_error)):
            return True
        if isinstance(error, RuntimeError) and _CPU_ALLOCATOR in str(error):  # torch has no class for it
            return True
        error = error.__cause__
    return False


def _loaded(module_and_name: tuple[str, str]) -> type[BaseException] | None:
    """The class; None if its module is not imported."""
    module, name = module_and_name
    return getattr(sys.modules.get(module), name, None)
