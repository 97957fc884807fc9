"""The processes that train together: who this one is, and the sums that all of them need.

Each process is started with RANK, WORLD_SIZE and LOCAL_RANK set (torchrun); without them there is one process and nothing is
exchanged. Tensors on a GPU travel by NCCL, flags of the host by gloo, so that asking for a flag never waits for the GPU.
"""

import os
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from eagle3.errors import RankDied


@dataclass(frozen=True)
class DistContext:
    """rank: number of this process. size: how many there are. device: where this one computes."""

    rank: int
    size: int
    device: torch.device

    def add(self, tensor: Tensor) -> Tensor:
        """Sum over all processes, in place."""
        if self.size > 1:
            _all_reduce(tensor)
        return tensor

    def any(self, flag: bool) -> bool:
        """True if it is True in any process; all must ask."""
        if self.size == 1:
            return flag
        votes = torch.tensor([int(flag)])
        _all_reduce(votes)
        return bool(votes.item())


def init_distributed(device: str) -> DistContext:
    """Join the other processes.

    Args:
        device: TrainConfig.device.

    Raises:
        ValueError: if a GPU is asked for where none is.
    """
    rank, size, local = (
        int(os.environ.get(k, d)) for k, d in (("RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_RANK", "0"))
    )
    has_gpu = torch.cuda.is_available()
    if device == "cuda" and not has_gpu:
        raise ValueError("train.device is cuda, but torch sees no GPU here; set it to auto or cpu")
    on_gpu = has_gpu and device != "cpu"
    here = torch.device("cuda", local) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(here)
    if size > 1:
        dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpu else "gloo")
    return DistContext(rank, size, here)


def _all_reduce(tensor: Tensor) -> None:
    try:
        dist.all_reduce(tensor)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as e:  # gloo has no class of its own for a lost neighbour
        raise RankDied(f"another process of this training was lost ({e}); run again") from e


def close_distributed() -> None:
    """Part from the other processes."""
    if dist.is_initialized():
        dist.destroy_process_group()
