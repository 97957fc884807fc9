"""Losses between the target's next-token distribution and the draft's, over the draft vocabulary.

For a (slot, step) pair, p' is the target's distribution restricted to the draft vocabulary, p = p' / coverage
is p' renormalised, and q is the draft's distribution:

    kl         KL(p, q)                          gradient of the logits  q - p
    lk_hybrid  λ KL(p, q) + (1 - λ) (1 - α)                              λ (q - p) + (1 - λ) q (Σ q g - g)
               α = Σ min(p', q)                                          g = [q < p']

α is the probability that speculative sampling accepts the draft's token, 1 - α the total variation.
λ = exp(-η α) is a constant of each pair. The forward also computes the gradients of the head input and of a
trained head, so no [slots, K] tensor outlives its chunk. The target's softmax of a position is computed once
for all steps: last[s + i] labels slot s at step i (batch.PackedBatch). A label outside the draft vocabulary
is a miss in every accuracy (acceptance.find_hits).
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx
from torch.nn import functional as F

from eagle3.draft.batch import PackedBatch
from eagle3.targets.weights import TargetTensors

# Logits in each of a chunk's four buffers: 16 MiB in float32 on a CPU, where larger buffers are no faster;
# 256 MiB on a GPU, to keep it busy.
CHUNK_ELEMENTS = {"cpu": 1 << 22, "cuda": 1 << 26}


@dataclass(frozen=True)
class TargetHead:
    """The target's frozen final norm and head.

    norm_weight: [H]. rows: [K, H] head rows of the draft vocabulary. target_ids: [K] int64, its target ids.
    head: [V, H]. Weights are in the compute dtype.
    """

    norm_weight: Tensor
    norm_eps: float
    rows: Tensor
    target_ids: Tensor
    head: Tensor

    @classmethod
    def from_target(
        cls, target: TargetTensors, target_ids: Tensor, device: torch.device | str = "cpu"
    ) -> "TargetHead":
        """Copy norm and head to a device."""
        head, norm = target.head.to(device), target.norm_weight.to(device)
        return cls(norm, target.norm_eps, head[target_ids], target_ids.to(device), head)

    def normed(self, last: Tensor) -> Tensor:
        """last [S, H] any float dtype -> head input [S, H] in the compute dtype."""
        return F.rms_norm(last.to(self.rows.dtype), self.norm_weight.shape, self.norm_weight, self.norm_eps)


@dataclass(frozen=True)
class UnrollLoss:
    """The loss of a pack.

    loss: [] weighted sum over pairs, at least float32, with gradient. per_step: [I] unweighted sum over each
    step's valid slots, without gradient. argmax: [I, S] int64, of the draft, as target token ids.
    """

    loss: Tensor
    per_step: Tensor
    argmax: Tensor


def chunk_slots(vocab_size: int, device: torch.device) -> int:
    """Slots whose logits are computed at once."""
    return max(16, CHUNK_ELEMENTS.get(device.type, 1 << 22) // vocab_size)


def unroll_loss(
    states: Tensor,
    head: Tensor,
    batch: PackedBatch,
    target: TargetHead,
    weights: Tensor,
    lk_eta: float | None = None,
) -> UnrollLoss:
    """Weighted sum of the loss over all valid (slot, step) pairs.

    Args:
        states: [I, S, H] normed draft states (Eagle3Draft.forward), compute dtype.
        head: [K, H] draft head, float32 or the compute dtype.
        weights: [I, S] float32 weight of every pair, 0 where it is not valid.
        lk_eta: None for kl, η for lk_hybrid.
    """
    last = target.normed(batch.last)
    covered = coverage(last, target) if lk_eta is not None else None
    labels = _Labels(last, target.rows, covered, batch.valid, weights, lk_eta or 0.0)
    loss, per_step, choice = HeadLoss.apply(states, head, labels)
    return UnrollLoss(loss, per_step, target.target_ids[choice])


@torch.no_grad()
def coverage(last: Tensor, target: TargetHead) -> Tensor:
    """Probability mass that the target gives to the draft vocabulary.

    Args:
        last: [S, H] normed last hidden states (TargetHead.normed).

    Returns:
        [S] at least float32; ones if the draft has the target's whole vocabulary.
    """
    wide = torch.promote_types(last.dtype, torch.float32)
    covered = torch.ones(len(last), device=last.device, dtype=wide)
    if len(target.rows) == len(target.head):
        return covered
    slots = torch.arange(len(last), device=last.device)
    for chunk in slots.split(chunk_slots(len(target.head), last.device)):
        x = last[chunk]
        inside, everything = (
            torch.logsumexp((x @ rows.T).to(wide), -1) for rows in (target.rows, target.head)
        )
        covered[chunk] = (inside - everything).exp()
    return covered


@dataclass(frozen=True)
class _Labels:
    """Inputs without gradient. last: [S, H] normed. rows: [K, H]. covered: [S]. valid, weights: [I, S]."""

    last: Tensor
    rows: Tensor
    covered: Tensor | None
    valid: Tensor
    weights: Tensor
    lk_eta: float


class HeadLoss(torch.autograd.Function):
    """Chunked head, softmax and loss; forward computes the gradients, backward only scales them."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: FunctionCtx, states: Tensor, head: Tensor, labels: _Labels
    ) -> tuple[Tensor, Tensor, Tensor]:
        num_steps, num_slots, _ = states.shape
        device, wide = states.device, torch.promote_types(states.dtype, torch.float32)
        compute_head = head.to(states.dtype)
        need_states, need_head, _ = ctx.needs_input_grad  # type: ignore[attr-defined]
        d_states = torch.zeros_like(states) if need_states else None
        d_head = torch.zeros_like(head) if need_head else None
        per_step = torch.zeros(num_steps, device=device, dtype=wide)
        loss = torch.zeros((), device=device, dtype=wide)
        choice = torch.zeros(num_steps, num_slots, dtype=torch.int64, device=device)
        size = min(chunk_slots(len(head), device), max(num_slots, 1))
        # All chunks share one set of buffers: on a CPU fresh pages cost more than the arithmetic on them.
        shape = (size + num_steps - 1, len(head))
        target_logits, p, logits, q = (torch.empty(shape, device=device, dtype=wide) for _ in range(4))
        for a in range(0, num_slots, size):
            b = min(a + size, num_slots)
            last = labels.last[a : min(b + num_steps - 1, num_slots)]
            neg_entropy = _target_softmax(_logits(last, labels.rows, target_logits), p)
            for i in range(num_steps):
                # The last slots of a pack have no last[s + i] and are not valid at step i.
                end = min(b, num_slots - i)
                if end <= a:
                    break
                chunk, at = slice(a, end), slice(i, i + end - a)
                x, w = states[i, chunk], labels.weights[i, chunk]
                pair, choice[i, chunk], grad = _kl_and_gradient(
                    _logits(x, compute_head, logits), p[at], neg_entropy[at], q
                )
                if labels.covered is not None:
                    covered = labels.covered[a + i : end + i]
                    pair, grad = _lk_hybrid(pair, grad, p[at], covered, labels.lk_eta)
                per_step[i] += (pair * labels.valid[i, chunk]).sum()
                loss += (pair * w).sum()
                d_x = None if d_states is None else d_states[i, chunk]
                _add_gradients(grad.to(x.dtype), x, w, compute_head, d_x, d_head)
        ctx.save_for_backward(d_states, d_head)  # type: ignore[arg-type]
        ctx.mark_non_differentiable(per_step, choice)  # type: ignore[attr-defined]
        return loss, per_step, choice

    @staticmethod
    def backward(  # type: ignore[override]
        ctx: FunctionCtx, grad: Tensor, *_: Tensor
    ) -> tuple[Tensor | None, ...]:
        d_states, d_head = ctx.saved_tensors  # type: ignore[attr-defined]
        scaled = [None if d is None else d * grad.to(d.dtype) for d in (d_states, d_head)]
        return *scaled, None


def _add_gradients(
    grad: Tensor, x: Tensor, weights: Tensor, head: Tensor, d_x: Tensor | None, d_head: Tensor | None
) -> None:
    """Set d_x [C, H] and add to d_head [K, H], from grad [C, K] of the logits, weights [C], x [C, H]."""
    if d_x is not None:
        d_x.copy_((grad @ head) * weights[:, None])
    if d_head is not None:
        weighted = (x * weights[:, None]).to(x.dtype)
        d_head.add_(grad.T @ weighted) if d_head.dtype != x.dtype else d_head.addmm_(grad.T, weighted)


def _logits(x: Tensor, head: Tensor, buffer: Tensor) -> Tensor:
    """x [C, H] @ head [K, H].T in the buffer's dtype and memory."""
    out = buffer[: len(x)]
    return torch.mm(x, head.T, out=out) if x.dtype == out.dtype else out.copy_(x @ head.T)


def _target_softmax(logits: Tensor, p: Tensor) -> Tensor:
    """Write softmax(logits) [C, K] into the first rows of p; returns Σ p log p [C]."""
    p = p[: len(logits)]
    top = logits.amax(-1)
    torch.softmax(logits, -1, out=p)
    neg_entropy: Tensor = torch.linalg.vecdot(p, logits) - top + p.amax(-1).log()
    return neg_entropy


def _kl_and_gradient(
    logits: Tensor, p: Tensor, neg_entropy: Tensor, q: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """KL(p, softmax(logits)) [C], argmax of the logits [C], and q - p [C, K] in q's memory."""
    q = q[: len(logits)]
    top, choice = logits.max(-1)
    torch.softmax(logits, -1, out=q)
    lse = top - q.gather(1, choice[:, None])[:, 0].log()
    kl = neg_entropy + lse - torch.linalg.vecdot(p, logits)
    return kl, choice, q.sub_(p)


def _lk_hybrid(kl: Tensor, kl_grad: Tensor, p: Tensor, covered: Tensor, eta: float) -> tuple[Tensor, Tensor]:
    """lk_hybrid loss [C] and gradient [C, K] from KL [C] and its gradient q - p [C, K]."""
    q = kl_grad + p
    below = q < p * covered[:, None]
    alpha = torch.where(below, q, p * covered[:, None]).sum(-1)
    share = torch.exp(-eta * alpha)[:, None]
    gain = q * below
    grad = share * kl_grad + (1 - share) * (q * gain.sum(-1, keepdim=True) - gain)
    return share[:, 0] * kl + (1 - share[:, 0]) * (1 - alpha), grad
