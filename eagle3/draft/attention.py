"""Attention of the unroll: every slot sees its row's step-0 keys up to itself, and its own keys of the later steps.

One softmax runs over the union. With O0 and L0 the output and log-sum-exp over the step-0 keys, e_j the own-key scores:

    L = logaddexp(L0, e_1 … e_J)      O = exp(L0 - L) O0 + Σ_j exp(e_j - L) v_j

so no mask of size T × (T · steps) ever exists. Only supervised slots have queries; step-0 keys are dense. Three exact forms
behind `unroll_attention`: torch's flash kernels over blocks of queries (CPU), FlexAttention for the step-0 part (CUDA; it has no
backward on a CPU), and whole score matrices (the reference). What they need to know of a pack is worked out once, in
`StepZeroKeys`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

BLOCK_QUERIES = 128  # blockwise form: slots of one call; 128 was fastest of 64 … 1,024 on two cores
FLEX_BLOCK = 128  # FlexAttention: queries and keys of one tile
FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
FLASH_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


@dataclass(frozen=True)
class StepZeroKeys:
    """Which step-0 keys the slots of a pack see; slot s sees its row's keys up to slots[s].

    slots: [S] int64 pack positions, ascending. row_starts: [R + 1] int64, row r is [row_starts[r], row_starts[r + 1]).
    blocks: CPU form, (first slot, end slot, first key, end key) of queries that share a row. block_mask: FlexAttention's, None
    without slots.
    """

    slots: Tensor
    row_starts: Tensor
    blocks: list[tuple[int, int, int, int]]
    block_mask: Any = None

    @classmethod
    def of(cls, slots: Tensor, row_starts: Tensor, device: torch.device) -> "StepZeroKeys":
        """Work them out.

        Args:
            slots, row_starts: on the CPU; the result's are on `device`.
        """
        here, starts = slots.to(device, non_blocking=True), row_starts.to(device, non_blocking=True)
        if device.type == "cuda":
            return cls(here, starts, [], flex_mask(here, starts, int(row_starts[-1])))
        bounds = torch.searchsorted(slots, row_starts).tolist()
        blocks = []
        for row, start in enumerate(row_starts.tolist()[:-1]):
            for a in range(bounds[row], bounds[row + 1], BLOCK_QUERIES):
                b = min(a + BLOCK_QUERIES, bounds[row + 1])
                blocks.append((a, b, start, int(slots[b - 1]) + 1))
        return cls(here, starts, blocks)


def unroll_attention(
    q: Tensor, k0: Tensor, v0: Tensor, own_k: Tensor, own_v: Tensor, keys: StepZeroKeys
) -> Tensor:
    """Attend from supervised slots to their row's step-0 keys and to their own later keys.

    Args:
        q: [S, N, D] queries of one step, RoPE applied.
        k0: [T, G, D] step-0 keys of every pack position, RoPE applied; N is a multiple of G.
        v0: [T, G, D] step-0 values.
        own_k: [J, S, G, D] keys of steps 1 … J of the same slots, J >= 0.
        own_v: [J, S, G, D] values of those steps.
        keys: which step-0 keys each slot sees.

    Returns:
        [S, N, D], dtype of q. Scores are scaled by D ** -0.5; softmax at least in float32.
    """
    form = {"cpu": blockwise_attention, "cuda": flex_attention_form}.get(q.device.type, dense_attention)
    out: Tensor = form(q, k0, v0, own_k, own_v, keys)
    return out


def dense_attention(
    q: Tensor, k0: Tensor, v0: Tensor, own_k: Tensor, own_v: Tensor, keys: StepZeroKeys
) -> Tensor:
    """`unroll_attention` with whole [N, S, T + J] score matrices and autograd: the reference for sizes beyond a slow loop."""
    per_group = q.shape[1] // k0.shape[1]
    k0, v0, own_k, own_v = (x.repeat_interleave(per_group, -2) for x in (k0, v0, own_k, own_v))
    positions = torch.arange(len(k0), device=q.device)
    start = keys.row_starts[torch.searchsorted(keys.row_starts, keys.slots, right=True) - 1]
    seen = (positions[None] >= start[:, None]) & (positions[None] <= keys.slots[:, None])
    dense = torch.einsum("snd,tnd->nst", q, k0).masked_fill(~seen, float("-inf"))
    own = torch.einsum("snd,jsnd->nsj", q, own_k)
    p = torch.softmax(torch.cat([dense, own], -1) * q.shape[-1] ** -0.5, -1)
    out = torch.einsum("nst,tnd->snd", p[..., : len(k0)], v0)
    return out + torch.einsum("nsj,jsnd->snd", p[..., len(k0) :], own_v)


def blockwise_attention(
    q: Tensor, k0: Tensor, v0: Tensor, own_k: Tensor, own_v: Tensor, keys: StepZeroKeys
) -> Tensor:
    """`unroll_attention` on a CPU: a flash kernel for each block of queries over their row's keys, own keys merged in."""
    return BlockwiseAttention.apply(q, k0, v0, own_k, own_v, keys)  # type: ignore[no-any-return]


def flex_attention_form(
    q: Tensor, k0: Tensor, v0: Tensor, own_k: Tensor, own_v: Tensor, keys: StepZeroKeys
) -> Tensor:
    """`unroll_attention` with FlexAttention over the step-0 keys; own keys are merged by log-sum-exp, in float32."""
    num_slots, num_heads, size = q.shape
    groups = k0.shape[1]
    if not num_slots:  # keeps the graph whole, so that every parameter gets its zero gradient
        return q + 0 * (k0.sum() + v0.sum() + own_k.sum() + own_v.sum())
    heads_first = [x.transpose(0, 1)[None] for x in (q, k0, v0)]
    out, aux = _flex()(
        *heads_first,
        block_mask=keys.block_mask,
        enable_gqa=num_heads != groups,
        return_aux=AuxRequest(lse=True),
    )
    out, lse = out[0].transpose(0, 1).float(), aux.lse[0].T
    if len(own_k):
        grouped = q.view(num_slots, groups, num_heads // groups, size)
        own = torch.einsum("sghd,jsgd->jsgh", grouped.float(), own_k.float()).flatten(2) * size**-0.5
        merged = torch.logaddexp(lse, torch.logsumexp(own, 0))
        p_own = torch.exp(own - merged).view(len(own_k), num_slots, groups, -1)
        out = torch.exp(lse - merged)[..., None] * out
        out = out + torch.einsum("jsgh,jsgd->sghd", p_own, own_v.float()).reshape(q.shape)
    attended: Tensor = out.to(q.dtype)
    return attended


@cache
def _flex() -> Callable[..., Any]:
    # fullgraph: an error where it cannot be compiled, never the eager form with its whole score matrices.
    return torch.compile(flex_attention, dynamic=True, fullgraph=True)


def flex_mask(slots: Tensor, row_starts: Tensor, num_keys: int) -> Any:
    """FlexAttention's BlockMask of a pack, worked out from row bounds: no [S, T] mask is made to find the tiles.

    A tile of queries sees a run of key tiles: from the one with its first slot's row start to the one with its last slot. A tile
    is full, and needs no mask, when it lies between the last slot's row start and the first slot.
    """
    if not len(slots):
        return None
    last_row = len(row_starts) - 2
    starts = row_starts[(torch.searchsorted(row_starts, slots, right=True) - 1).clamp(max=last_row)]
    first = torch.arange(0, len(slots), FLEX_BLOCK, device=slots.device)
    final = (first + FLEX_BLOCK - 1).clamp(max=len(slots) - 1)
    tiles = torch.arange(-(-num_keys // FLEX_BLOCK), device=slots.device)
    tile_start, tile_end = tiles * FLEX_BLOCK, (tiles + 1) * FLEX_BLOCK
    seen = (tile_end[None] > starts[first, None]) & (tile_start[None] <= slots[final, None])
    full = (tile_start[None] >= starts[final, None]) & (tile_end[None] <= slots[first, None] + 1)

    def visible(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key >= starts[query]) & (key <= slots[query])

    return BlockMask.from_kv_blocks(
        *_ordered(seen & ~full),
        *_ordered(full),
        BLOCK_SIZE=FLEX_BLOCK,
        mask_mod=visible,
        seq_lengths=(len(slots), num_keys),
    )


def _ordered(tiles: Tensor) -> tuple[Tensor, Tensor]:
    """[Q, K] bool -> number of tiles [1, 1, Q] int32 and their indices first [1, 1, Q, K] int32, as BlockMask wants them."""
    order = torch.argsort(tiles.to(torch.int32), dim=-1, descending=True, stable=True)
    return tiles.sum(-1, dtype=torch.int32)[None, None], order.to(torch.int32)[None, None].contiguous()


class BlockwiseAttention(torch.autograd.Function):
    """Exact in both directions: torch's CPU flash kernels give and take the log-sum-exp, so their backward runs with the merged O
    and L. Inner layout: heads of one key group side by side, [G, S · N/G, D]."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: FunctionCtx, q: Tensor, k0: Tensor, v0: Tensor, own_k: Tensor, own_v: Tensor, keys: StepZeroKeys
    ) -> Tensor:
        num_slots, num_heads, size = q.shape
        groups = k0.shape[1]
        per_group = num_heads // groups
        grouped = q.view(num_slots, groups, per_group, size)
        qg, kg, vg = _heads_inside(grouped), k0.transpose(0, 1), v0.transpose(0, 1)
        wide = torch.promote_types(q.dtype, torch.float32)
        out, lse = torch.empty_like(qg), qg.new_empty(qg.shape[:2], dtype=wide)
        for a, b, k_start, k_end in keys.blocks:
            at, seen = slice(a * per_group, b * per_group), slice(k_start, k_end)
            mask = _block_mask(keys.slots[a:b], k_start, k_end, per_group, q.dtype)
            block, block_lse = FLASH(qg[None, :, at], kg[None, :, seen], vg[None, :, seen], attn_mask=mask)
            out[:, at], lse[:, at] = block[0], block_lse[0]
        result, lse_s = _heads_outside(out, num_slots), _heads_outside(lse, num_slots)
        if len(own_k):
            own_scores = torch.einsum("sghd,jsgd->jsgh", grouped, own_k).to(wide) * size**-0.5
            merged = torch.logaddexp(lse_s, torch.logsumexp(own_scores, 0))
            result = result * torch.exp(lse_s - merged)[..., None]
            result = result + torch.einsum("jsgh,jsgd->sghd", torch.exp(own_scores - merged), own_v.to(wide))
            result, lse_s = result.to(q.dtype), merged
        ctx.save_for_backward(q, k0, v0, own_k, own_v, result, lse_s)
        ctx.keys = keys  # type: ignore[attr-defined]
        return result.reshape(num_slots, num_heads, size)

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        q, k0, v0, own_k, own_v, result, lse_s = ctx.saved_tensors  # type: ignore[attr-defined]
        keys: StepZeroKeys = ctx.keys  # type: ignore[attr-defined]
        num_slots, num_heads, size = q.shape
        groups = k0.shape[1]
        per_group, scale = num_heads // groups, size**-0.5
        grouped = q.view(num_slots, groups, per_group, size)
        grad_s = grad.reshape(num_slots, groups, per_group, size)

        qg, gg, og, lse = (_heads_inside(x) for x in (grouped, grad_s, result, lse_s))
        kg, vg = k0.transpose(0, 1), v0.transpose(0, 1)
        dk, dv, dqg = torch.zeros_like(kg), torch.zeros_like(vg), torch.empty_like(qg)
        for a, b, k_start, k_end in keys.blocks:
            at, seen = slice(a * per_group, b * per_group), slice(k_start, k_end)
            mask = _block_mask(keys.slots[a:b], k_start, k_end, per_group, q.dtype)
            block = qg[None, :, at], kg[None, :, seen], vg[None, :, seen], og[None, :, at], lse[None, :, at]
            dq_block, dk_block, dv_block = FLASH_BACKWARD(gg[None, :, at], *block, 0.0, False, attn_mask=mask)
            dqg[:, at] = dq_block[0]
            dk[:, seen] += dk_block[0]
            dv[:, seen] += dv_block[0]
        dq = _heads_outside(dqg, num_slots)
        d_own_k, d_own_v = torch.zeros_like(own_k), torch.zeros_like(own_v)
        if len(own_k):
            own_p = torch.exp(torch.einsum("sghd,jsgd->jsgh", grouped, own_k) * scale - lse_s).to(q.dtype)
            delta = (grad_s * result).sum(
                -1
            )  # [S, G, g]: Σ_t p_t dp_t over the union, from the merged output
            own_ds = own_p * (torch.einsum("sghd,jsgd->jsgh", grad_s, own_v) - delta) * scale
            d_own_v = torch.einsum("jsgh,sghd->jsgd", own_p, grad_s)
            d_own_k = torch.einsum("jsgh,sghd->jsgd", own_ds, grouped)
            dq = dq + torch.einsum("jsgh,jsgd->sghd", own_ds, own_k)
        return dq.reshape(q.shape), dk.transpose(0, 1), dv.transpose(0, 1), d_own_k, d_own_v, None


def _block_mask(slots: Tensor, first_key: int, end_key: int, per_group: int, dtype: torch.dtype) -> Tensor:
    """[B · N/G, L]: 0 where a slot sees the key, -inf where the key comes after it."""
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
