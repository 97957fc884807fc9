"""The processes that train together: rank, device, and reductions over all ranks.

torchrun sets RANK, WORLD_SIZE and LOCAL_RANK; without them there is one process and no communication. NCCL
reduces tensors on a GPU, gloo flags on the host, so a flag never waits for the GPU.
"""

import os
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from eagle3.errors import RankDied


@dataclass(frozen=True)
class DistContext:
    """rank: number of this process. size: number of processes. device: this process computes on it."""

    rank: int
    size: int
    device: torch.device

    def sum_over_ranks(self, sums: dict[str, Tensor]) -> dict[str, Tensor]:
        """Sum float64 tensors over all processes in one all-reduce; all use the same names and shapes."""
        if self.size == 1:
            return sums
        packed = torch.cat([tensor.flatten() for tensor in sums.values()])
        _all_reduce(packed)
        parts = packed.split([tensor.numel() for tensor in sums.values()])
        return {name: part.view(sums[name].shape) for name, part in zip(sums, parts, strict=True)}

    def any_rank(self, flag: bool) -> bool:
        """Whether the flag is True in any process; every process must call this."""
        if self.size == 1:
            return flag
        votes = torch.tensor([int(flag)])
        _all_reduce(votes)
        return bool(votes.item())


def init_distributed(device: str) -> DistContext:
    """Join the other processes, on the device that TrainConfig.device means here."""
    has_gpu = torch.cuda.is_available()
    if device == "cuda" and not has_gpu:
        raise ValueError("train.device is cuda, but torch sees no GPU here; set it to auto or cpu")
    on_gpu = has_gpu and device != "cpu"
    own = torch.device("cpu")
    if on_gpu:
        own = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(own)
    context = DistContext(int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1")), own)
    if context.size > 1:
        dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpu else "gloo")
    return context


def _all_reduce(tensor: Tensor) -> None:
    try:
        dist.all_reduce(tensor)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as e:  # gloo has no error class for a lost rank
        raise RankDied(f"another process of this training was lost ({e}); run again") from e


def close_distributed() -> None:
    """Leave the process group."""
    if dist.is_initialized():
        dist.destroy_process_group()
