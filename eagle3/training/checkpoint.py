"""Resumable checkpoints: one safetensors file with trained weights, optimizer state and the step; atomic, nothing pickled.

The data position is the step (loader.plan_packs is a pure function of seed and epoch) and no random number is drawn after the
initialisation, so step, weights and optimizer state go on bit for bit.
"""

import json
import os
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

CHECKPOINT_NAME = "checkpoint.safetensors"


def save_checkpoint(
    path: Path, draft: nn.Module, optimizers: dict[str, torch.optim.Optimizer], step: int, plan_digest: str
) -> None:
    """Write the state after `step` optimizer steps, whole or not at all.

    plan_digest: identity of data and settings; `load_checkpoint` refuses another one.
    """
    names = {id(p): name for name, p in draft.named_parameters()}
    tensors: dict[str, Tensor] = {f"draft/{n}": p.detach() for n, p in draft.named_parameters() if p.requires_grad}
    for kind, optimizer in optimizers.items():
        for parameter, state in optimizer.state.items():
            tensors |= {f"{kind}/{names[id(parameter)]}/{key}": value for key, value in state.items()}
    part = path.with_name(path.name + ".part")
    contiguous = {name: t.contiguous().cpu() for name, t in tensors.items()}
    save_file(contiguous, part, metadata={"step": json.dumps(step), "plan_digest": plan_digest})
    with open(part, "rb") as f:
        os.fsync(f.fileno())
    part.replace(path)


def load_checkpoint(path: Path, draft: nn.Module, optimizers: dict[str, torch.optim.Optimizer], plan_digest: str) -> int:
    """Restore weights and optimizer state in place.

    Returns:
        Optimizer steps done.

    Raises:
        ValueError: if the checkpoint belongs to other data or settings.
    """
    parameters = dict(draft.named_parameters())
    with safe_open(path, framework="pt") as f:
        metadata = f.metadata()
        if metadata["plan_digest"] != plan_digest:
            raise ValueError(f"{path} belongs to other data or settings; remove it to start afresh")
        for key in f.keys():  # noqa: SIM118 (safe_open is not a mapping)
            kind, name = key.split("/", 1)
            if kind == "draft":
                with torch.no_grad():
                    parameters[name].copy_(f.get_tensor(key))
                continue
            name, slot = name.rsplit("/", 1)
            optimizers[kind].state[parameters[name]][slot] = f.get_tensor(key).to(parameters[name].device)
    step: int = json.loads(metadata["step"])
    return step
