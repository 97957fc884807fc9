"""Attention of the unroll on a CPU: a flash kernel for each block of queries, then the own keys.

Forward and backward are exact: torch's CPU flash kernels return and accept the log-sum-exp, so their backward
runs with the merged O and L (attention.py). Heads of one key group are adjacent inside: [G, S · N/G, D].
"""

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

BLOCK_QUERIES = 128  # slots of one call; 128 was fastest of 64 … 1,024 on two cores
FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
FLASH_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
Blocks = list[tuple[int, int, int, int]]


def query_blocks(slots: Tensor, row_starts: Tensor) -> Blocks:
    """(first slot, end slot, first key, end key) of runs of at most BLOCK_QUERIES slots that share a row.

    Args:
        slots: [S] int64 pack positions, ascending.
        row_starts: [R + 1] int64.
    """
    bounds = torch.searchsorted(slots, row_starts).tolist()
    blocks = []
    for row, start in enumerate(row_starts.tolist()[:-1]):
        for a in range(bounds[row], bounds[row + 1], BLOCK_QUERIES):
            b = min(a + BLOCK_QUERIES, bounds[row + 1])
            blocks.append((a, b, start, int(slots[b - 1]) + 1))
    return blocks


class BlockwiseAttention(torch.autograd.Function):
    """`attention.unroll_attention` on a CPU; slots and blocks as in `query_blocks`.

    The forward keeps the merged output and log-sum-exp for the backward.
    """

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: FunctionCtx,
        q: Tensor,
        k0: Tensor,
        v0: Tensor,
        own_k: Tensor,
        own_v: Tensor,
        slots: Tensor,
        blocks: Blocks,
    ) -> Tensor:
        num_slots, num_heads, size = q.shape
        groups = k0.shape[1]
        per_group = num_heads // groups
        grouped = q.view(num_slots, groups, per_group, size)
        qg, kg, vg = _heads_inside(grouped), k0.transpose(0, 1), v0.transpose(0, 1)
        wide = torch.promote_types(q.dtype, torch.float32)
        out, lse = torch.empty_like(qg), qg.new_empty(qg.shape[:2], dtype=wide)
        for a, b, k_start, k_end in blocks:
            at, seen = slice(a * per_group, b * per_group), slice(k_start, k_end)
            mask = _block_mask(slots[a:b], k_start, k_end, per_group, q.dtype)
            block, block_lse = FLASH(qg[None, :, at], kg[None, :, seen], vg[None, :, seen], attn_mask=mask)
            out[:, at], lse[:, at] = block[0], block_lse[0]
        result, lse_s = _heads_outside(out, num_slots), _heads_outside(lse, num_slots)
        if len(own_k):
            own_scores = torch.einsum("sghd,jsgd->jsgh", grouped, own_k).to(wide) * size**-0.5
            merged = torch.logaddexp(lse_s, torch.logsumexp(own_scores, 0))
            result = result * torch.exp(lse_s - merged)[..., None]
            result = result + torch.einsum("jsgh,jsgd->sghd", torch.exp(own_scores - merged), own_v.to(wide))
            result, lse_s = result.to(q.dtype), merged
        ctx.save_for_backward(q, k0, v0, own_k, own_v, result, lse_s, slots)
        ctx.blocks = blocks  # type: ignore[attr-defined]
        return result.reshape(num_slots, num_heads, size)

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        q, k0, v0, own_k, own_v, result, lse_s, slots = ctx.saved_tensors  # type: ignore[attr-defined]
        num_slots, num_heads, size = q.shape
        groups = k0.shape[1]
        per_group, scale = num_heads // groups, size**-0.5
        grouped = q.view(num_slots, groups, per_group, size)
        grad_s = grad.reshape(num_slots, groups, per_group, size)
        qg, gg, og, lse = (_heads_inside(x) for x in (grouped, grad_s, result, lse_s))
        kg, vg = k0.transpose(0, 1), v0.transpose(0, 1)
        dk, dv, dqg = torch.zeros_like(kg), torch.zeros_like(vg), torch.empty_like(qg)
        for a, b, k_start, k_end in ctx.blocks:  # type: ignore[attr-defined]
            at, seen = slice(a * per_group, b * per_group), slice(k_start, k_end)
            mask = _block_mask(slots[a:b], k_start, k_end, per_group, q.dtype)
            block = qg[None, :, at], kg[None, :, seen], vg[None, :, seen], og[None, :, at], lse[None, :, at]
            dq_block, dk_block, dv_block = FLASH_BACKWARD(gg[None, :, at], *block, 0.0, False, attn_mask=mask)
            dqg[:, at] = dq_block[0]
            dk[:, seen] += dk_block[0]
            dv[:, seen] += dv_block[0]
        dq = _heads_outside(dqg, num_slots)
        d_own_k, d_own_v = torch.zeros_like(own_k), torch.zeros_like(own_v)
        if len(own_k):
            own_p = torch.exp(torch.einsum("sghd,jsgd->jsgh", grouped, own_k) * scale - lse_s).to(q.dtype)
            # [S, G, N/G]: Σ_t p_t dp_t over all keys, from the merged output.
            delta = (grad_s * result).sum(-1)
            own_ds = own_p * (torch.einsum("sghd,jsgd->jsgh", grad_s, own_v) - delta) * scale
            d_own_v = torch.einsum("jsgh,sghd->jsgd", own_p, grad_s)
            d_own_k = torch.einsum("jsgh,sghd->jsgd", own_ds, grouped)
            dq = dq + torch.einsum("jsgh,jsgd->sghd", own_ds, own_k)
        return dq.reshape(q.shape), dk.transpose(0, 1), dv.transpose(0, 1), d_own_k, d_own_v, None, None


def _block_mask(slots: Tensor, first_key: int, end_key: int, per_group: int, dtype: torch.dtype) -> Tensor:
    """[B · N/G, L]: 0 where a slot sees the key, -inf for later keys."""
    hidden = torch.arange(first_key, end_key)[None] > slots[:, None]
    bias = torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, float("-inf"))
    return bias.repeat_interleave(per_group, 0)


def _heads_inside(x: Tensor) -> Tensor:
    """[S, G, N/G, …] -> [G, S · N/G, …], copied."""
    return x.transpose(0, 1).reshape(x.shape[1], -1, *x.shape[3:])


def _heads_outside(x: Tensor, num_slots: int) -> Tensor:
    """[G, S · N/G, …] -> [S, G, N/G, …], a view."""
    per_group = x.shape[1] // num_slots if num_slots else 1
    return x.view(x.shape[0], num_slots, per_group, *x.shape[2:]).transpose(0, 1)
