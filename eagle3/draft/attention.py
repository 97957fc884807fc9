"""Attention of the unroll: a slot sees its row's step-0 keys up to its position, and its own later keys.

One softmax runs over both. O0 and L0 are the output and log-sum-exp over the step-0 keys, e_j the scores of
own keys:

    L = logaddexp(L0, e_1 … e_J)      O = exp(L0 - L) O0 + Σ_j exp(e_j - L) v_j

so no mask of size T × (T · steps) exists. Only supervised slots have queries; all positions have step-0 keys.
`unroll_attention` has three exact forms: torch's flash kernels over blocks of queries on a CPU
(attention_cpu.py), FlexAttention for the step-0 part on CUDA, and full score matrices as the reference.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from eagle3.draft.attention_cpu import BlockwiseAttention, query_blocks
from eagle3.draft.batch import PackedBatch

FLEX_BLOCK = 128  # queries and keys of a FlexAttention tile


@dataclass(frozen=True)
class VisibleKeys:
    """For each slot of a pack, the step-0 keys that it sees: from its row's start up to its own position.

    slots: [S] int64 pack positions, ascending. row_starts: [R + 1] int64. blocks: the result of
    attention_cpu.query_blocks, empty on a GPU. block_mask: a BlockMask, None on a CPU or if S is 0.
    """

    slots: Tensor
    row_starts: Tensor
    blocks: list[tuple[int, int, int, int]]
    block_mask: Any = None

    @classmethod
    def from_slots(cls, slots: Tensor, row_starts: Tensor, device: torch.device) -> "VisibleKeys":
        """Move both tensors from the CPU to `device`. Build the blocks for a CPU or the mask for a GPU."""
        moved = slots.to(device, non_blocking=True), row_starts.to(device, non_blocking=True)
        if device.type == "cuda":
            return cls(*moved, [], flex_mask(*moved, int(row_starts[-1])))
        return cls(*moved, query_blocks(slots, row_starts))

    @classmethod
    def from_batch(cls, batch: PackedBatch, device: torch.device) -> "VisibleKeys":
        """Compute them for a pack."""
        return cls.from_slots(batch.slots.cpu(), batch.row_starts.cpu(), device)


class UnrollCache:
    """Keys and values so far: k0, v0 [T, G, D] of step 0; own_k, own_v [J, S, G, D] of steps 1 … J."""

    def __init__(self, visible: VisibleKeys) -> None:
        self.visible = visible
        self.num_steps = 0

    def append(self, keys: Tensor, values: Tensor) -> None:
        """Add the next step: [T, G, D] each at step 0, [S, G, D] later."""
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
    """Attend from supervised slots to their row's step-0 keys and their own later keys.

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
        out: Tensor = BlockwiseAttention.apply(q, k0, v0, own_k, own_v, keys.slots, keys.blocks)
        return out
    form = flex_attention_form if q.device.type == "cuda" else dense_attention
    return form(q, k0, v0, own_k, own_v, keys)


def flex_attention_form(
    q: Tensor, k0: Tensor, v0: Tensor, own_k: Tensor, own_v: Tensor, keys: VisibleKeys
) -> Tensor:
    """`unroll_attention` with FlexAttention over the step-0 keys; own keys are merged in float32."""
    num_slots, num_heads, size = q.shape
    groups = k0.shape[1]
    if not num_slots:  # keep the autograd graph: every parameter needs a gradient, here zero
        return q + 0 * (k0.sum() + v0.sum() + own_k.sum() + own_v.sum())
    heads_first = [x.transpose(0, 1)[None] for x in (q, k0, v0)]
    out, aux = compiled_flex_attention()(
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
def compiled_flex_attention() -> Callable[..., Any]:
    """FlexAttention, compiled on its first call."""
    # fullgraph: fail rather than fall back to the eager form with its full score matrices.
    return torch.compile(flex_attention, dynamic=True, fullgraph=True)


def flex_mask(slots: Tensor, row_starts: Tensor, num_keys: int) -> Any:
    """FlexAttention's BlockMask of a pack, computed from row bounds without an [S, T] mask.

    A tile of queries needs the key tiles between its first slot's row start and its last slot. Every query
    sees all keys of a tile between the last slot's row start and the first slot: that tile is full.
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
    """[Q, K] bool -> counts of True [1, 1, Q] and indices, True first, [1, 1, Q, K]; int32 for BlockMask."""
    order = torch.argsort(tiles.to(torch.int32), dim=-1, descending=True, stable=True)
    return tiles.sum(-1, dtype=torch.int32)[None, None], order.to(torch.int32)[None, None].contiguous()


def dense_attention(
    q: Tensor, k0: Tensor, v0: Tensor, own_k: Tensor, own_v: Tensor, keys: VisibleKeys
) -> Tensor:
    """`unroll_attention` with full [N, S, T + J] score matrices and autograd: the reference."""
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
