"""Optimizers and their learning rate, a pure function of the step."""

import math

import torch
from torch import nn

from eagle3.config.training import TrainConfig


def learning_rate_factor(step: int, total_steps: int, cfg: TrainConfig) -> float:
    """Learning rate at `step` (from 0) over its peak: linear warm-up, then cfg.schedule."""
    warmup = max(1, round(total_steps * cfg.warmup_share))
    if step < warmup:
        return (step + 1) / warmup
    progress = (step - warmup) / max(1, total_steps - warmup)
    if cfg.schedule == "cosine":
        return 0.5 * (1 + math.cos(math.pi * progress))
    return 1 - progress if cfg.schedule == "linear" else 1.0


def make_optimizers(draft: nn.Module, cfg: TrainConfig) -> dict[str, torch.optim.Optimizer]:
    """AdamW for all parameters, or Muon for the hidden matrices and AdamW for norms and head.

    Each parameter group has its peak rate as `peak_lr`; `set_learning_rate` scales it.
    """
    trained = {name: p for name, p in draft.named_parameters() if p.requires_grad}
    matrices = {}
    if cfg.optimizer == "muon":
        matrices = {name: p for name, p in trained.items() if p.dim() == 2 and "lm_head" not in name}
    rest = [p for name, p in trained.items() if name not in matrices]
    optimizers: dict[str, torch.optim.Optimizer] = {
        "adamw": torch.optim.AdamW(
            [{"params": rest, "peak_lr": cfg.learning_rate}],
            lr=cfg.learning_rate,
            betas=(cfg.beta1, cfg.beta2),
            weight_decay=cfg.weight_decay,
            fused=next(iter(trained.values())).dtype == torch.float32,
        )
    }
    if matrices:
        optimizers["muon"] = torch.optim.Muon(
            [{"params": list(matrices.values()), "peak_lr": cfg.muon_learning_rate}],
            lr=cfg.muon_learning_rate,
            weight_decay=cfg.weight_decay,
            adjust_lr_fn="original",
        )
    return optimizers


def set_learning_rate(
    optimizers: dict[str, torch.optim.Optimizer], step: int, total_steps: int, cfg: TrainConfig
) -> float:
    """Set every parameter group's learning rate; returns AdamW's."""
    factor = learning_rate_factor(step, total_steps, cfg)
    for optimizer in optimizers.values():
        for group in optimizer.param_groups:
            group["lr"] = group["peak_lr"] * factor
    return cfg.learning_rate * factor
