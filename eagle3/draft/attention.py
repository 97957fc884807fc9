"""Attention of the unroll: every slot sees its row's step-0 keys up to itself, and its own keys of the later steps.

One softmax runs over the union. With L the log-sum-exp over all scores of a query, the output is

    O = Σ_t exp(q·k0_t − L) v0_t + Σ_j exp(q·k_j − L) v_j

so no mask of size T × (T · steps) ever exists: step-0 scores are made a block of queries at a time and made again in the backward
pass, which uses the merged O and L for both parts. Only supervised slots have queries; step-0 keys are dense.
"""

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

BLOCK_QUERIES = 256  # queries whose scores exist at once: N x 256 x T floats


def unroll_attention(
    q: Tensor, k0: Tensor, v0: Tensor, own_k: Tensor, own_v: Tensor, slots: Tensor, row_starts: Tensor
) -> Tensor:
    """Attend from supervised slots to their row's step-0 keys and to their own later keys.

    Args:
        q: [S, N, D] queries of one step, RoPE applied.
        k0: [T, G, D] step-0 keys of every pack position, RoPE applied; N is a multiple of G.
        v0: [T, G, D] step-0 values.
        own_k: [J, S, G, D] keys of steps 1 … J of the same slots, J >= 0.
        own_v: [J, S, G, D] values of those steps.
        slots: [S] int64 pack positions, ascending; slot s sees step-0 keys row_start … slots[s].
        row_starts: [R + 1] int64, row r is [row_starts[r], row_starts[r + 1]).

    Returns:
        [S, N, D], dtype of q. Scores are scaled by D ** -0.5; softmax in q's dtype.
    """
    return UnrollAttention.apply(q, k0, v0, own_k, own_v, slots, row_starts)  # type: ignore[no-any-return]


def _blocks(slots: Tensor, row_starts: Tensor) -> list[tuple[int, int, int, int]]:
    """(first slot, end slot, first key, end key) of every block of queries that share a row."""
    bounds = torch.searchsorted(slots, row_starts).tolist()
    blocks = []
    for row, start in enumerate(row_starts.tolist()[:-1]):
        for a in range(bounds[row], bounds[row + 1], BLOCK_QUERIES):
            b = min(a + BLOCK_QUERIES, bounds[row + 1])
            blocks.append((a, b, start, int(slots[b - 1]) + 1))
    return blocks


def _block_scores(q: Tensor, k0: Tensor, slots: Tensor, first_key: int) -> Tensor:
    """[G, B·g, L] masked scores of a block: q [G, B·g, D] (scaled), k0 [G, L, D], slots [B]."""
    scores = q @ k0.transpose(1, 2)
    keys = torch.arange(first_key, first_key + k0.shape[1], device=q.device)
    hidden = (keys[None] > slots[:, None]).repeat_interleave(q.shape[1] // len(slots), 0)
    return scores.masked_fill_(hidden, float("-inf"))


class UnrollAttention(torch.autograd.Function):
    """Exact in both directions; see the module docstring. Inner layout: heads of one key group side by side, [G, S · N/G, D]."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: FunctionCtx, q: Tensor, k0: Tensor, v0: Tensor, own_k: Tensor, own_v: Tensor, slots: Tensor, row_starts: Tensor
    ) -> Tensor:
        num_slots, num_heads, size = q.shape
        groups = k0.shape[1]
        per_group = num_heads // groups
        grouped = (q * size**-0.5).view(num_slots, groups, per_group, size)
        own_scores = torch.einsum("sghd,jsgd->jsgh", grouped, own_k)
        qg, kg, vg = grouped.transpose(0, 1).reshape(groups, -1, size), k0.transpose(0, 1), v0.transpose(0, 1)
        own_lse = torch.logsumexp(own_scores, 0).transpose(0, 1).reshape(groups, -1) if len(own_k) else None
        out, lse = torch.empty_like(qg), qg.new_empty(qg.shape[:2])
        for a, b, k_start, k_end in _blocks(slots, row_starts):
            at = slice(a * per_group, b * per_group)
            scores = _block_scores(qg[:, at], kg[:, k_start:k_end], slots[a:b], k_start)
            merged = torch.logsumexp(scores, -1)
            lse[:, at] = merged if own_lse is None else torch.logaddexp(merged, own_lse[:, at])
            out[:, at] = torch.exp(scores - lse[:, at, None]) @ vg[:, k_start:k_end]
        lse_s = lse.view(groups, num_slots, per_group).transpose(0, 1)
        result = out.view(groups, num_slots, per_group, size).transpose(0, 1)
        result = result + torch.einsum("jsgh,jsgd->sghd", torch.exp(own_scores - lse_s), own_v)
        ctx.save_for_backward(q, k0, v0, own_k, own_v, slots, row_starts, result, lse_s)
        return result.reshape(num_slots, num_heads, size)

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        q, k0, v0, own_k, own_v, slots, row_starts, result, lse_s = ctx.saved_tensors  # type: ignore[attr-defined]
        num_slots, num_heads, size = q.shape
        groups = k0.shape[1]
        per_group = num_heads // groups
        scale = size**-0.5
        grouped = (q * scale).view(num_slots, groups, per_group, size)
        grad_s = grad.reshape(num_slots, groups, per_group, size)
        delta = (grad_s * result).sum(-1)  # [S, G, g]: Σ_t p_t dp_t over the union, from the merged output

        own_p = torch.exp(torch.einsum("sghd,jsgd->jsgh", grouped, own_k) - lse_s)
        own_ds = own_p * (torch.einsum("sghd,jsgd->jsgh", grad_s, own_v) - delta)
        d_own_v = torch.einsum("jsgh,sghd->jsgd", own_p, grad_s)
        d_own_k = torch.einsum("jsgh,sghd->jsgd", own_ds, grouped)
        dq = torch.einsum("jsgh,jsgd->sghd", own_ds, own_k)

        flat = lambda x: x.transpose(0, 1).reshape(groups, -1, *x.shape[3:])  # noqa: E731
        qg, gg, lse, dg = flat(grouped), flat(grad_s), flat(lse_s), flat(delta)
        kg, vg = k0.transpose(0, 1), v0.transpose(0, 1)
        dk, dv, dqg = torch.zeros_like(kg), torch.zeros_like(vg), torch.empty_like(qg)
        for a, b, k_start, k_end in _blocks(slots, row_starts):
            at, keys = slice(a * per_group, b * per_group), slice(k_start, k_end)
            p = torch.exp(_block_scores(qg[:, at], kg[:, keys], slots[a:b], k_start) - lse[:, at, None])
            dv[:, keys] += p.transpose(1, 2) @ gg[:, at]
            ds = p * (gg[:, at] @ vg[:, keys].transpose(1, 2) - dg[:, at, None])
            dqg[:, at] = ds @ kg[:, keys]
            dk[:, keys] += ds.transpose(1, 2) @ qg[:, at]
        dq = (dq + dqg.view(groups, num_slots, per_group, size).transpose(0, 1)) * scale
        return dq.reshape(q.shape), dk.transpose(0, 1), dv.transpose(0, 1), d_own_k, d_own_v, None, None
