"""KL divergence from the target's next-token distribution to the draft's, over the draft vocabulary, in chunks of slots.

The target distribution of slot p at step i is softmax(head(norm(last[p + 1 + i]))) restricted to the draft vocabulary and
renormalised; tokens outside it are misses in every accuracy (ttt.find_hits). The gradient of the head input (and of a trained
head) is formed in the same pass, so no [slots, K] tensor outlives its chunk, and the target's softmax of a position is made
once for all steps that use it.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx
from torch.nn import functional as F

from eagle3.batch import PackedBatch

CHUNK_SLOTS = 512


@dataclass(frozen=True)
class TargetHead:
    """The frozen side of the loss: norm gain [H], epsilon, head rows of the draft vocabulary [K, H], target ids [K] int64."""

    norm_weight: Tensor
    norm_eps: float
    rows: Tensor
    target_ids: Tensor


@dataclass(frozen=True)
class UnrollLoss:
    """loss [] at least float32, with gradient; per_step [I], summed KL (nats) of each step's valid slots, no gradient;
    argmax [I, S] int64, the draft's first choice as a target token id."""

    loss: Tensor
    per_step: Tensor
    argmax: Tensor


def unroll_loss(
    states: Tensor, head: Tensor, batch: PackedBatch, target: TargetHead, step_weights: Tensor, denominator: float
) -> UnrollLoss:
    """Weighted KL over all valid (slot, step) pairs, divided by `denominator`.

    Args:
        states: [I, S, H] normed draft states (ttt.unroll).
        head: [K, H] draft head.
        batch: pack; `valid` and `last_index` say which pairs count and which target state belongs to each.
        target: the target's head.
        step_weights: [I] float32.
        denominator: supervised slots of the whole optimizer step.

    Returns:
        The loss in float32, its parts, and the draft's choices.
    """
    weights = batch.valid * (step_weights[:, None] / denominator)
    last = F.rms_norm(batch.last.to(target.rows.dtype), target.norm_weight.shape, target.norm_weight, target.norm_eps)
    loss, per_step, choice = HeadLoss.apply(states, head, last, target.rows, batch.last_index, batch.valid, weights)
    return UnrollLoss(loss, per_step, target.target_ids[choice])


class HeadLoss(torch.autograd.Function):
    """Chunked head, softmax and KL; backward only scales the gradients that forward made."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: FunctionCtx,
        states: Tensor,
        head: Tensor,
        last: Tensor,
        rows: Tensor,
        last_index: Tensor,
        valid: Tensor,
        weights: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        num_steps, num_slots, _ = states.shape
        wide = torch.promote_types(states.dtype, torch.float32)
        need_states, need_head = ctx.needs_input_grad[0], ctx.needs_input_grad[1]  # type: ignore[attr-defined]
        d_states = torch.zeros_like(states) if need_states else None
        d_head = torch.zeros_like(head) if need_head else None
        per_step = torch.zeros(num_steps, device=states.device, dtype=wide)
        loss = torch.zeros((), device=states.device, dtype=wide)
        choice = torch.zeros(num_steps, num_slots, dtype=torch.int64, device=states.device)
        for a in range(0, num_slots, CHUNK_SLOTS):
            chunk = slice(a, min(a + CHUNK_SLOTS, num_slots))
            used, where = torch.unique(last_index[:, chunk], return_inverse=True)
            log_p = torch.log_softmax((last[used] @ rows.T).to(wide), -1)
            p = log_p.exp()
            entropy = -(p * log_p).sum(-1)
            for i in range(num_steps):
                x = states[i, chunk]
                logits = (x @ head.T).to(wide)
                choice[i, chunk] = logits.argmax(-1)
                lse = torch.logsumexp(logits, -1)
                p_i, at = p[where[i]], where[i]
                kl = (lse - (p_i * logits).sum(-1) - entropy[at]) * valid[i, chunk]
                per_step[i] += kl.sum()
                loss += (kl * weights[i, chunk]).sum()
                grad = logits.sub_(lse[:, None]).exp_().sub_(p_i).mul_(weights[i, chunk, None]).to(x.dtype)
                if d_states is not None:
                    d_states[i, chunk] = grad @ head
                if d_head is not None:
                    d_head.addmm_(grad.T, x)
        ctx.save_for_backward(d_states, d_head)  # type: ignore[arg-type]
        ctx.mark_non_differentiable(per_step, choice)  # type: ignore[attr-defined]
        return loss, per_step, choice

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        d_states, d_head = ctx.saved_tensors  # type: ignore[attr-defined]
        return d_states * grad, None if d_head is None else d_head * grad, None, None, None, None, None
