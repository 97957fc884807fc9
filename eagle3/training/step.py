"""One optimizer step over the packs of all processes, and the judging of held-out packs.

The loss of a step is the sum of step weight · slot weight · loss over every valid (slot, step) pair of all its packs, divided by
the sum of the slot weights: a step is the same however its packs are dealt out. Gradients are summed first and divided last, so
no process needs to know the others' packs beforehand; one without supervised slots adds zeros.
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
from eagle3.draft.acceptance import AcceptanceCounts, walk_batch
from eagle3.draft.attention import StepZeroKeys
from eagle3.draft.batch import PackedBatch
from eagle3.draft.loss import TargetHead, coverage, unroll_loss
from eagle3.draft.model import Eagle3Draft
from eagle3.draft.unroll import Unroll, find_hits, guess
from eagle3.training.distributed import DistContext

# A pack is worked on in parts of whole rows, whose gradients add up. On a CPU larger parts cost more: 490 tokens per CPU-second
# with 4,096 or 8,192 tokens, 431 with 16,384, 392 with 32,768 (tests/benchmarks/pack_sizes.py: width 576, half supervised).
PART_TOKENS = {"cpu": 4096}


class Objective(nn.Module):
    """The unroll and its loss as a module, computed in `dtype` from float32 master weights."""

    def __init__(
        self, draft: Eagle3Draft, target: TargetHead, dtype: torch.dtype, lk_eta: float | None
    ) -> None:
        super().__init__()
        self.unrolled = Unroll(draft)
        self.target, self.dtype, self.lk_eta = target, dtype, lk_eta

    def states(self, batch: PackedBatch, keys: StepZeroKeys) -> Tensor:
        """[I, S, H] normed draft states in `dtype`."""
        if self.dtype == self.unrolled.draft.fc.weight.dtype:
            return self.unrolled(batch, keys)  # type: ignore[no-any-return]
        cast = {
            name: p.to(self.dtype) for name, p in self.unrolled.named_parameters() if "lm_head" not in name
        }
        return functional_call(self.unrolled, cast, (batch, keys))  # type: ignore[no-any-return]

    def forward(
        self, batch: PackedBatch, keys: StepZeroKeys, weights: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See loss.unroll_loss: loss [], per_step [I], argmax [I, S]."""
        head = self.unrolled.draft.lm_head.weight
        result = unroll_loss(self.states(batch, keys), head, batch, self.target, weights, self.lk_eta)
        return result.loss, result.per_step, result.argmax


@dataclass(frozen=True)
class Trainer:
    """What every step works on. parallel: the objective, wrapped for data parallelism where there are several processes.
    in_draft: [V] bool, True for tokens of the draft vocabulary. step_weights: [I]."""

    objective: Objective
    parallel: nn.Module
    optimizers: dict[str, torch.optim.Optimizer]
    in_draft: Tensor
    step_weights: Tensor
    ranks: DistContext
    cfg: TrainConfig

    @classmethod
    def of(
        cls,
        objective: Objective,
        optimizers: dict[str, torch.optim.Optimizer],
        ranks: DistContext,
        cfg: TrainConfig,
    ) -> "Trainer":
        """Wrap the objective and work out the constants."""
        device = ranks.device
        parallel = (
            DistributedDataParallel(objective, forward_sync_buffers=False) if ranks.size > 1 else objective
        )
        in_draft = torch.zeros(len(objective.target.head), dtype=torch.bool, device=device)
        in_draft[objective.target.target_ids] = True
        return cls(
            objective,
            parallel,
            optimizers,
            in_draft,
            torch.tensor(cfg.step_weights, device=device),
            ranks,
            cfg,
        )


def train_step(trainer: Trainer, batches: list[PackedBatch]) -> dict[str, Any]:
    """Take one optimizer step.

    Args:
        batches: the parts of this process's packs, on the CPU, at least one.

    Returns:
        Figures for MetricLog as tensors: those of the whole step, `own_loss` of this process, and `hits`, [I, S] of each part.
    """
    for optimizer in trainer.optimizers.values():
        optimizer.zero_grad(set_to_none=True)
    totals, own_loss, all_hits = None, None, []
    for number, batch in enumerate(batches):
        with _sync_if(number == len(batches) - 1, trainer.parallel):
            figures, loss, hits = _accumulate(trainer, batch)
        all_hits.append(hits)
        totals = figures if totals is None else totals + figures
        own_loss = loss if own_loss is None else own_loss + loss
    assert totals is not None
    totals = trainer.ranks.add(totals)
    trained = [p for p in trainer.objective.parameters() if p.requires_grad]
    # Data parallelism has averaged over the processes.
    torch._foreach_mul_(
        [p.grad for p in trained if p.grad is not None], trainer.ranks.size / totals[0].clamp(min=1)
    )
    norm = torch.nn.utils.clip_grad_norm_(trained, trainer.cfg.max_grad_norm)
    for optimizer in trainer.optimizers.values():
        optimizer.step()
    weight_sum, loss_sum, tokens, supervised, inside, *by_step = totals
    per_step, correct, valid = torch.stack(by_step).view(3, -1)
    return {
        "loss": loss_sum / weight_sum.clamp(min=1),
        "loss_by_step": per_step / valid.clamp(min=1),
        "accuracy_by_step": correct / valid.clamp(min=1),
        "label_coverage": inside / supervised.clamp(min=1),
        "gradient_norm": norm,
        "supervised": supervised,
        "tokens": tokens,
        "own_loss": own_loss,
        "hits": all_hits,
    }


def _sync_if(last: bool, module: nn.Module) -> AbstractContextManager[None]:
    """Exchange gradients with the last pack of a step only."""
    return nullcontext() if last or not isinstance(module, DistributedDataParallel) else module.no_sync()


def _accumulate(trainer: Trainer, batch: PackedBatch) -> tuple[Tensor, Tensor, Tensor]:
    """Forward and backward of one pack.

    Returns:
        [5 + 3I] float64 sums of the pack: slot weights, weighted loss, tokens, supervised slots, labels inside the draft
        vocabulary, then loss, hits and valid pairs of each TTT step; the loss []; hits [I, S] bool.
    """
    device = trainer.ranks.device
    slot_weights, weight_sum = batch.slot_weights(trainer.cfg.averaging)
    keys = StepZeroKeys.of(batch.slots, batch.row_starts, device)
    moved = batch.to(device)
    if device.type == "cuda":
        slot_weights = slot_weights.pin_memory()
    weights = moved.valid * trainer.step_weights[:, None] * slot_weights.to(device, non_blocking=True)
    loss, per_step, argmax = trainer.parallel(moved, keys, weights)
    loss.backward()
    hits = find_hits(argmax, moved)
    inside = (trainer.in_draft[moved.labels()[0]] & moved.valid[0]).sum()
    # Filled on the device: a copy from the host would wait for it.
    counts = [
        torch.full((), n, dtype=torch.float64, device=device)
        for n in (weight_sum, len(batch.token_ids), len(batch.slots))
    ]
    first = torch.stack([counts[0], loss.detach().double(), counts[1], counts[2], inside.double()])
    return (
        torch.cat([first, per_step.double(), hits.sum(1).double(), moved.valid.sum(1).double()]),
        loss.detach(),
        hits,
    )


@torch.no_grad()
def judge(trainer: Trainer, batches: Iterable[PackedBatch]) -> dict[str, float]:
    """Acceptance of held-out packs, dealt out over the processes, by the walk over the teacher-forced unroll, k = I.

    Returns:
        validation_acceptance_length, validation_acceptance_by_position, and validation_coverage: the target's mean probability
        mass inside the draft vocabulary.
    """
    objective, num_steps = trainer.objective, trainer.cfg.ttt_steps
    counts, mass, slots = AcceptanceCounts.empty(num_steps), 0.0, 0
    head = objective.unrolled.draft.lm_head.weight.to(objective.dtype)
    for batch in batches:
        moved = batch.to(trainer.ranks.device)
        states = objective.states(moved, StepZeroKeys.of(batch.slots, batch.row_starts, trainer.ranks.device))
        hits = find_hits(guess(states, head, objective.target.target_ids), moved)
        counts += walk_batch(hits.cpu(), batch)
        mass += float(coverage(objective.target.normed(moved.last), objective.target).sum())
        slots += len(batch.slots)
    values = torch.tensor([counts.rounds, mass, slots, *counts.accepted_by_position], dtype=torch.float64)
    rounds, mass, slots, *accepted = trainer.ranks.add(values.to(trainer.ranks.device)).tolist()
    total = AcceptanceCounts(int(rounds), tuple(int(a) for a in accepted))
    return {
        "validation_acceptance_length": total.acceptance_length,
        "validation_acceptance_by_position": total.by_position,
        "validation_coverage": mass / max(1, slots),
    }
