"""One optimizer step over the packs of all processes, and the acceptance of held-out packs.

The loss of a step is the sum of step weight · slot weight · loss over every valid (slot, step) pair of all
its packs, divided by the sum of the slot weights. So it does not matter which process gets which pack.
Gradients are summed first and divided last: no process needs to know the others' packs beforehand. A process
without supervised slots adds zeros.
"""

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.parallel import DistributedDataParallel

from eagle3.config.training import TrainConfig
from eagle3.draft.acceptance import AcceptanceCounts, find_hits, guess, walk_batch
from eagle3.draft.attention import VisibleKeys
from eagle3.draft.batch import PackedBatch
from eagle3.draft.loss import TargetHead, UnrollLoss, coverage, unroll_loss
from eagle3.draft.model import Eagle3Draft
from eagle3.training.distributed import DistContext
from eagle3.training.optimizer import make_optimizers

# A pack is divided into parts of whole rows with at most this many tokens; their gradients are summed. Larger
# parts are slower on a CPU: 490 tokens per CPU-second with parts of 4,096 or 8,192 tokens, 431 with 16,384,
# 392 with 32,768 (width 576, half supervised).
PART_TOKENS = {"cpu": 4096}


class Objective(nn.Module):
    """The unroll and its loss, computed in `dtype` from float32 master weights.

    in_draft: [V] bool, True for tokens of the draft vocabulary. step_weights: [I] float32.
    """

    def __init__(self, draft: Eagle3Draft, target: TargetHead, dtype: torch.dtype, cfg: TrainConfig) -> None:
        super().__init__()
        self.draft = draft
        self.target = target
        self.dtype = dtype
        self.lk_eta = cfg.lk_eta if cfg.loss == "lk_hybrid" else None
        self.in_draft = torch.zeros(len(target.head), dtype=torch.bool, device=target.head.device)
        self.in_draft[target.target_ids] = True
        self.step_weights = torch.tensor(cfg.step_weights, device=target.head.device)

    def forward(self, batch: PackedBatch, visible: VisibleKeys, slot_weights: Tensor) -> UnrollLoss:
        """The loss of a pack; slot_weights: [S] float32."""
        weights = batch.valid * self.step_weights[:, None] * slot_weights
        states = self.states(batch, visible)
        return unroll_loss(states, self.draft.lm_head.weight, batch, self.target, weights, self.lk_eta)

    def states(self, batch: PackedBatch, visible: VisibleKeys) -> Tensor:
        """[I, S, H] normed draft states in `dtype`."""
        if self.dtype == self.draft.fc.weight.dtype:
            return self.draft(batch, visible)  # type: ignore[no-any-return]
        cast = {name: p.to(self.dtype) for name, p in self.draft.named_parameters() if "lm_head" not in name}
        return functional_call(self.draft, cast, (batch, visible))  # type: ignore[no-any-return]


class Trainer:
    """Objective and optimizers. parallel: the objective, wrapped if there are several processes."""

    def __init__(self, objective: Objective, dist: DistContext, cfg: TrainConfig) -> None:
        self.objective = objective
        self.parallel: nn.Module = objective
        if dist.size > 1:
            self.parallel = DistributedDataParallel(objective, forward_sync_buffers=False)
        self.optimizers = make_optimizers(objective.draft, cfg)
        self.dist = dist
        self.cfg = cfg


@dataclass(frozen=True)
class StepResult:
    """Metrics of a step, as tensors on the device.

    Over all processes: loss [], gradient_norm []; loss_by_step, accuracy_by_step [I] over valid slots;
    label_coverage [], share of step-0 labels inside the draft vocabulary; supervised [] and tokens [],
    numbers of slots and tokens. Of this process: own_loss []; hits, [I, S] bool of each part.
    """

    loss: Tensor
    loss_by_step: Tensor
    accuracy_by_step: Tensor
    label_coverage: Tensor
    gradient_norm: Tensor
    supervised: Tensor
    tokens: Tensor
    own_loss: Tensor
    hits: list[Tensor]


def train_step(trainer: Trainer, batches: list[PackedBatch]) -> StepResult:
    """Take one optimizer step on the parts of this process's packs, at least one, on the CPU."""
    for optimizer in trainer.optimizers.values():
        optimizer.zero_grad(set_to_none=True)
    device = trainer.dist.device
    sums = dict[str, Tensor]()
    losses, all_hits = [], []
    for number, batch in enumerate(batches):
        slot_weights, weight_sum = batch.slot_weights(trainer.cfg.averaging)
        if device.type == "cuda":
            slot_weights = slot_weights.pin_memory()
        visible, moved = VisibleKeys.from_batch(batch, device), batch.to(device)
        # Processes exchange gradients with the last part of a step only.
        with nullcontext() if number == len(batches) - 1 else _no_sync(trainer.parallel):
            result: UnrollLoss = trainer.parallel(moved, visible, slot_weights.to(device, non_blocking=True))
            result.loss.backward()
        losses.append(result.loss.detach())
        all_hits.append(find_hits(result.argmax, moved))
        part = _part_sums(trainer.objective, moved, result, all_hits[-1], weight_sum)
        sums = {name: sums[name] + value for name, value in part.items()} if sums else part
    total = trainer.dist.sum_over_ranks(sums)
    norm = update_weights(trainer, total["weight"])
    valid = total["valid_by_step"].clamp(min=1)
    return StepResult(
        loss=total["loss"] / total["weight"].clamp(min=1),
        loss_by_step=total["loss_by_step"] / valid,
        accuracy_by_step=total["hits_by_step"] / valid,
        label_coverage=total["inside"] / total["supervised"].clamp(min=1),
        gradient_norm=norm,
        supervised=total["supervised"],
        tokens=total["tokens"],
        own_loss=torch.stack(losses).sum(),
        hits=all_hits,
    )


def update_weights(trainer: Trainer, weight_sum: Tensor) -> Tensor:
    """Divide the gradients by the step's sum of slot weights, clip them and step; returns their norm."""
    trained = [p for p in trainer.objective.parameters() if p.requires_grad]
    gradients = [p.grad for p in trained if p.grad is not None]
    # DistributedDataParallel has averaged over the processes.
    torch._foreach_mul_(gradients, trainer.dist.size / weight_sum.clamp(min=1))
    norm = torch.nn.utils.clip_grad_norm_(trained, trainer.cfg.max_grad_norm)
    for optimizer in trainer.optimizers.values():
        optimizer.step()
    return norm


def _part_sums(
    objective: Objective, batch: PackedBatch, result: UnrollLoss, hits: Tensor, weight_sum: int
) -> dict[str, Tensor]:
    """Float64 sums over a part: [] each, or [I] for those by step."""

    def filled(number: int) -> Tensor:
        # torch.full runs on the device; a copy from the host would wait for it.
        return torch.full((), number, dtype=torch.float64, device=hits.device)

    return {
        "weight": filled(weight_sum),
        "tokens": filled(len(batch.token_ids)),
        "supervised": filled(len(batch.slots)),
        "inside": (objective.in_draft[batch.labels()[0]] & batch.valid[0]).sum().double(),
        "loss": result.loss.detach().double(),
        "loss_by_step": result.per_step.double(),
        "hits_by_step": hits.sum(1).double(),
        "valid_by_step": batch.valid.sum(1).double(),
    }


def _no_sync(module: nn.Module) -> AbstractContextManager[None]:
    return module.no_sync() if isinstance(module, DistributedDataParallel) else nullcontext()


@torch.no_grad()
def judge(trainer: Trainer, batches: Iterable[PackedBatch]) -> dict[str, Any]:
    """Acceptance of the held-out packs of all processes, by the walk with k = I.

    validation_coverage is the target's mean probability mass inside the draft vocabulary.
    """
    objective = trainer.objective
    device = trainer.dist.device
    counts = AcceptanceCounts.empty(trainer.cfg.ttt_steps)
    mass = 0.0
    slots = 0
    head = objective.draft.lm_head.weight.to(objective.dtype)
    for batch in batches:
        moved = batch.to(device)
        states = objective.states(moved, VisibleKeys.from_batch(batch, device))
        hits = find_hits(guess(states, head, objective.target.target_ids), moved)
        counts += walk_batch(hits.cpu(), batch)
        mass += float(coverage(objective.target.normed(moved.last), objective.target).sum())
        slots += len(batch.slots)
    own = {"counts": [counts.rounds, *counts.accepted_by_position], "coverage": [mass, slots]}
    sums = {name: torch.tensor(value, dtype=torch.float64, device=device) for name, value in own.items()}
    total = trainer.dist.sum_over_ranks(sums)
    rounds, *accepted = map(int, total["counts"].tolist())
    counts = AcceptanceCounts(rounds, tuple(accepted))
    mass, slots = total["coverage"].tolist()
    return {
        "validation_acceptance_length": counts.acceptance_length,
        "validation_acceptance_by_position": counts.by_position,
        "validation_coverage": mass / max(1, slots),
    }
