"""Attention of the unroll: a slot sees its row's step-0 keys up to itself, and its own keys of later steps.

One softmax runs over the union. With O0 and L0 the output and log-sum-exp over the step-0 keys, e_j the
own-key scores:

    L = logaddexp(L0, e_1 … e_J)      O = exp(L0 - L) O0 + Σ_j exp(e_j - L) v_j

so no mask of size T × (T · steps) ever exists. Only supervised slots have queries; step-0 keys are dense.
`unroll_attention` has three exact forms: torch's flash kernels over blocks of queries (attention_cpu.py),
FlexAttention for the step-0 part (CUDA; it has no backward on a CPU), and whole score matrices (the
reference).
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from eagle3.draft.attention_cpu import blockwise_attention, query_blocks
from eagle3.draft.batch import PackedBatch

FLEX_BLOCK = 128  # FlexAttention: queries and keys of one tile


@dataclass(frozen=True)
class VisibleKeys:
    """The step-0 keys that the slots of a pack see: slot s sees its row's keys up to slots[s].

    slots: [S] int64 pack positions, ascending. row_starts: [R + 1] int64, row r is [row_starts[r],
    row_starts[r + 1]). blocks: see attention_cpu.query_blocks, empty on a GPU. block_mask: FlexAttention's,
    None without slots or on a CPU.
    """

    slots: Tensor
    row_starts: Tensor
    blocks: list[tuple[int, int, int, int]]
    block_mask: Any = None

    @classmethod
    def from_slots(cls, slots: Tensor, row_starts: Tensor, device: torch.device) -> "VisibleKeys":
        """Work them out; slots and row_starts are on the CPU, the result's are on `device`."""
        moved = slots.to(device, non_blocking=True), row_starts.to(device, non_blocking=True)
        if device.type == "cuda":
            return cls(*moved, [], flex_mask(*moved, int(row_starts[-1])))
        return cls(*moved, query_blocks(slots, row_starts))

    @classmethod
    def from_batch(cls, batch: PackedBatch, device: torch.device) -> "VisibleKeys":
        """Work them out for a pack."""
        return cls.from_slots(batch.slots.cpu(), batch.row_starts.cpu(), device)


class UnrollCache:
    """Keys and values of an unroll so far.

    k0, v0: [T, G, D] of every pack position at step 0. own_k, own_v: [J, S, G, D] of the slots at steps 1 …
    J.
    """

    def __init__(self, visible: VisibleKeys) -> None:
        self.visible = visible
        self.num_steps = 0

    def append(self, keys: Tensor, values: Tensor) -> None:
        """Take the keys and values of the next step: [T, G, D] at step 0, [S, G, D] later."""
        if self.num_steps == 0:
            self.k0, self.v0 = keys, values
            self.own_k = self.own_v = keys.new_empty(0, len(self.visible.slots), *keys.shape[1:])
        else:
            self.own_k = torch.cat([self.own_k, keys[None]])
            self.own_v = torch.cat([self.own_v, values[None]])
        self.num_steps += 1


def unroll_attention(
    q: Tensor, k0: Tensor, v0: Tensor, own_k: Tensor, own_v: Tensor, keys: VisibleKeys
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
    if q.device.type == "cpu":
        return blockwise_attention(q, k0, v0, own_k, own_v, keys.slots, keys.blocks)
    form = flex_attention_form if q.device.type == "cuda" else dense_attention
    return form(q, k0, v0, own_k, own_v, keys)


def flex_attention_form(
    q: Tensor, k0: Tensor, v0: Tensor, own_k: Tensor, own_v: Tensor, keys: VisibleKeys
) -> Tensor:
    """`unroll_attention` with FlexAttention over the step-0 keys; own keys are merged in float32."""
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
    # fullgraph: an error if it cannot be compiled, never the eager form with its whole score matrices.
    return torch.compile(flex_attention, dynamic=True, fullgraph=True)


def flex_mask(slots: Tensor, row_starts: Tensor, num_keys: int) -> Any:
    """FlexAttention's BlockMask of a pack, from row bounds: no [S, T] mask is made to find the tiles.

    A tile of queries sees a run of key tiles: from the one with its first slot's row start to the one with
    its last slot. A tile is full, and needs no mask, when it is between the last slot's row start and the
    first slot.
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
    """[Q, K] bool -> number of tiles [1, 1, Q] and their indices first [1, 1, Q, K], int32, for BlockMask."""
    order = torch.argsort(tiles.to(torch.int32), dim=-1, descending=True, stable=True)
    return tiles.sum(-1, dtype=torch.int32)[None, None], order.to(torch.int32)[None, None].contiguous()


def dense_attention(
    q: Tensor, k0: Tensor, v0: Tensor, own_k: Tensor, own_v: Tensor, keys: VisibleKeys
) -> Tensor:
    """`unroll_attention` with whole [N, S, T + J] score matrices and autograd: the reference."""
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
