"""Resumable checkpoints: one safetensors file, written atomically, without pickle.

It holds the trained weights and optimizer state in their own precision, the best weights, the metrics and the
step; no frozen tensors. The step is the data position (the schedule is a pure function of data and settings),
and a run draws no random number after the initialisation: a resumed run ends with the same weights, bit for
bit on a CPU.
"""

import json
import os
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from eagle3.files import atomic_path

CHECKPOINT_NAME = "checkpoint.safetensors"


@dataclass(frozen=True)
class Progress:
    """Progress of a run.

    step: optimizer steps done. best: trained weights of the best validation, on the CPU, {} before the first.
    best_length: its acceptance length. metrics: content of the metrics file.
    """

    step: int
    best: dict[str, Tensor]
    best_length: float
    metrics: bytes


def trained_tensors(draft: nn.Module) -> dict[str, Tensor]:
    """Copies of the trained parameters, on the CPU."""
    return {name: p.detach().cpu().clone() for name, p in draft.named_parameters() if p.requires_grad}


def save_checkpoint(
    path: Path,
    draft: nn.Module,
    optimizers: dict[str, torch.optim.Optimizer],
    progress: Progress,
    plan_digest: str,
) -> None:
    """Write a checkpoint atomically; plan_digest is Schedule.digest."""
    names = {id(p): name for name, p in draft.named_parameters()}
    tensors: dict[str, Tensor] = {
        f"draft/{n}": p.detach() for n, p in draft.named_parameters() if p.requires_grad
    }
    for kind, optimizer in optimizers.items():
        for parameter, state in optimizer.state.items():
            tensors |= {f"{kind}/{names[id(parameter)]}/{key}": value for key, value in state.items()}
    tensors |= {f"best/{name}": tensor for name, tensor in progress.best.items()}
    tensors["metrics"] = torch.frombuffer(bytearray(progress.metrics or b"\n"), dtype=torch.uint8)
    metadata = {
        "step": json.dumps(progress.step),
        "best_length": json.dumps(progress.best_length),
        "plan_digest": plan_digest,
    }
    stored = {name: t.contiguous().cpu() for name, t in tensors.items()}
    try:
        with atomic_path(path) as part:
            save_file(stored, part, metadata=metadata)
            with open(part, "rb") as f:
                os.fsync(f.fileno())
    except (OSError, SafetensorError) as e:
        raise OSError(
            f"{path} could not be written ({e}); free disk space and run again: the last checkpoint is intact"
        ) from e


def load_checkpoint(
    path: Path, draft: nn.Module, optimizers: dict[str, torch.optim.Optimizer], plan_digest: str
) -> Progress:
    """Restore weights and optimizer state in place; ValueError unless the file is complete and fits."""
    parameters = dict(draft.named_parameters())
    best: dict[str, Tensor] = {}
    try:
        with safe_open(path, framework="pt") as f:
            metadata = f.metadata() or {}
            if metadata.get("plan_digest") != plan_digest:
                raise ValueError(f"{path} belongs to other data or settings; remove it to start again")
            metrics = bytes(f.get_tensor("metrics").numpy())
            for key in f.keys():  # noqa: SIM118 (safe_open is not a mapping)
                kind, _, name = key.partition("/")
                if kind == "best":
                    best[name] = f.get_tensor(key)
                elif kind == "draft":
                    with torch.no_grad():
                        parameters[name].copy_(f.get_tensor(key))
                elif kind in optimizers:
                    name, slot = name.rsplit("/", 1)
                    parameter = parameters[name]
                    optimizers[kind].state[parameter][slot] = f.get_tensor(key).to(parameter.device)
    except (SafetensorError, OSError) as e:
        raise ValueError(f"{path} is not a complete checkpoint ({e}); remove it to start again") from e
    return Progress(json.loads(metadata["step"]), best, json.loads(metadata["best_length"]), metrics)
