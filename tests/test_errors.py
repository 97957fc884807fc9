"""Which errors another try may not meet, and which come again."""

import errno
from typing import Any

import pytest
import torch
import torch.distributed as dist
from aiohttp import ClientPayloadError
from botocore.exceptions import EndpointConnectionError, NoCredentialsError

from eagle3.errors import EngineDied, RankDied, StoreError, WorkerDied, is_out_of_memory, is_transient


@pytest.mark.parametrize(
    "error",
    [
        ConnectionResetError("hung up"),
        TimeoutError("no answer"),
        OSError(errno.EBUSY, "Service Unavailable"),
        OSError(errno.EREMOTEIO, "Internal Error"),
        EndpointConnectionError(endpoint_url="http://store"),
        ClientPayloadError("half"),
        EngineDied("the engine process was ended by signal 9"),
        RankDied("the trainer ended with code -9"),
        WorkerDied("a process that tokenizes rows was killed"),
        StoreError("the store could not be reached in 5 tries"),
        torch.AcceleratorError("CUDA error: uncorrectable ECC error encountered"),
        dist.DistBackendError("NCCL error: remote process exited"),
    ],
    ids=repr,
)
def test_lost_connections_stores_engines_and_ranks_are_transient(error: Exception) -> None:
    assert is_transient(error)


@pytest.mark.parametrize(
    "error",
    [
        ValueError("wrong"),
        KeyError("absent"),
        FileNotFoundError("absent"),
        PermissionError("not yours"),
        OSError(errno.ENOSPC, "No space left on device"),
        NoCredentialsError(),
        RuntimeError("mat1 and mat2 shapes cannot be multiplied"),
        NotImplementedError("no such kernel"),
        RecursionError("too deep"),
        MemoryError(),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 GiB"),
    ],
    ids=repr,
)
def test_errors_that_come_again_are_permanent(error: Exception) -> None:
    assert not is_transient(error)


def caught(action: Any) -> Exception:
    try:
        action()
    except Exception as e:
        return e
    raise AssertionError


def test_a_failed_allocation_of_torch_is_found_on_a_cpu_and_as_the_cause_of_another_error() -> None:
    def allocate() -> None:
        torch.empty(1 << 50)

    def warm_up() -> None:
        try:
            raise torch.OutOfMemoryError("CUDA out of memory")
        except RuntimeError as e:
            raise RuntimeError("the sampler could not be warmed up") from e

    for action in (allocate, warm_up):
        error = caught(action)
        assert type(error) is RuntimeError
        assert is_out_of_memory(error)
        assert not is_transient(error)
    assert not is_out_of_memory(RuntimeError("CUDA error: an illegal memory access was encountered"))
