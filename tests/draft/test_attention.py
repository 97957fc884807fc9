"""The attention of the unroll against a slow loop, values and gradients, in float64."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxOutput, AuxRequest

from eagle3.draft import attention, attention_cpu
from eagle3.draft.attention import (
    VisibleKeys,
    dense_attention,
    flex_attention_form,
    flex_mask,
    unroll_attention,
)

CPU = torch.device("cpu")


def slow_attention(
    q: Tensor, k0: Tensor, v0: Tensor, own_k: Tensor, own_v: Tensor, keys: VisibleKeys
) -> Tensor:
    """One query and head at a time: softmax over the row's keys up to the slot and the slot's own keys."""
    num_heads, size = q.shape[1:]
    out = []
    for s, slot in enumerate(keys.slots.tolist()):
        start = max(r for r in keys.row_starts.tolist() if r <= slot)
        for n in range(num_heads):
            g = n * k0.shape[1] // num_heads
            seen = torch.cat([k0[start : slot + 1, g], own_k[:, s, g]])
            values = torch.cat([v0[start : slot + 1, g], own_v[:, s, g]])
            out.append(torch.softmax(seen @ q[s, n] / size**0.5, 0) @ values)
    return torch.stack(out).view(q.shape) if out else q * 0


def dense_flex(
    q: Tensor, k: Tensor, v: Tensor, block_mask: Any, enable_gqa: bool, return_aux: AuxRequest
) -> tuple[Tensor, AuxOutput]:
    """Stands in for FlexAttention, which has no backward on a CPU: same arguments and results, whole score
    matrices, autograd. Tiles that the mask skips are hidden, so a wrong tile shows.
    """
    assert return_aux.lse
    assert enable_gqa == (q.shape[1] != k.shape[1])
    count, length = q.shape[2], k.shape[2]
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    query, key = torch.arange(count)[:, None], torch.arange(length)[None]
    zero = torch.zeros((), dtype=torch.int64)
    seen = block_mask.mask_mod(zero, zero, query, key) & tiles_of(block_mask, count, length)
    scores = (q @ k.transpose(2, 3) / q.shape[-1] ** 0.5).masked_fill(~seen, float("-inf"))
    return torch.softmax(scores, -1) @ v, AuxOutput(lse=torch.logsumexp(scores, -1))


def tiles_of(block_mask: Any, count: int, length: int) -> Tensor:
    """[count, length] bool: pairs inside a tile that the mask visits."""
    tile = attention.FLEX_BLOCK
    return (
        block_mask.to_dense()[0, 0]
        .bool()
        .repeat_interleave(tile, 0)
        .repeat_interleave(tile, 1)[:count, :length]
    )


@pytest.mark.parametrize("num_own", [0, 1, 3])
@pytest.mark.parametrize(("heads", "groups"), [(4, 4), (6, 2), (3, 1)])
@pytest.mark.parametrize("block", [1, 2, 256])
@pytest.mark.parametrize("slots", [[0, 1, 4, 5, 6, 11], [2], [], list(range(12))])
def test_attention_equals_a_slow_loop(
    monkeypatch: pytest.MonkeyPatch, num_own: int, heads: int, groups: int, block: int, slots: list[int]
) -> None:
    monkeypatch.setattr(attention_cpu, "BLOCK_QUERIES", block)
    g = torch.Generator().manual_seed(0)
    starts, count, size = torch.tensor([0, 4, 5, 12]), len(slots), 5
    shapes = [
        (count, heads, size),
        (12, groups, size),
        (12, groups, size),
        (num_own, count, groups, size),
        (num_own, count, groups, size),
    ]
    tensors = [torch.randn(s, generator=g, dtype=torch.float64, requires_grad=True) for s in shapes]
    weight = torch.randn(count, heads, size, generator=g, dtype=torch.float64)
    keys = VisibleKeys.from_slots(torch.tensor(slots, dtype=torch.int64), starts, CPU)
    compare([unroll_attention, slow_attention, dense_attention], tensors, weight, keys)


def compare(
    forms: list[Any], tensors: list[Tensor], weight: Tensor, keys: VisibleKeys, rtol: float = 1e-10
) -> None:
    results = []
    for form in forms:
        out = form(*tensors, keys)
        grads = torch.autograd.grad((out * weight).sum(), tensors, allow_unused=True)
        results.append(
            [out, *(torch.zeros_like(t) if x is None else x for x, t in zip(grads, tensors, strict=True))]
        )
    for first, *others in zip(*results, strict=True):
        for other in others:
            torch.testing.assert_close(first, other, rtol=rtol, atol=rtol / 10)


@pytest.mark.parametrize("num_own", [0, 1, 3])
@pytest.mark.parametrize("slots", [[0, 1, 4, 5, 6, 11], [2], [], list(range(12))])
def test_the_flex_form_equals_a_slow_loop(
    monkeypatch: pytest.MonkeyPatch, num_own: int, slots: list[int]
) -> None:
    monkeypatch.setattr(attention, "FLEX_BLOCK", 4)
    monkeypatch.setattr(attention, "compiled_flex_attention", lambda: dense_flex)
    g = torch.Generator().manual_seed(0)
    starts, index, size = torch.tensor([0, 4, 5, 12]), torch.tensor(slots, dtype=torch.int64), 8
    count = len(slots)
    shapes = [
        (count, 6, size),
        (12, 2, size),
        (12, 2, size),
        (num_own, count, 2, size),
        (num_own, count, 2, size),
    ]
    tensors = [torch.randn(s, generator=g, requires_grad=True) for s in shapes]
    keys = VisibleKeys(index, starts, [], flex_mask(index, starts, 12))
    # float32: the merge runs in it
    compare(
        [flex_attention_form, slow_attention], tensors, torch.randn(shapes[0], generator=g), keys, rtol=1e-4
    )


@pytest.mark.parametrize("seed", range(8))
def test_the_tiles_cover_what_is_seen_and_full_tiles_nothing_else(
    monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    monkeypatch.setattr(attention, "FLEX_BLOCK", 8)
    g = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 30, (6,), generator=g)
    starts = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    total = int(starts[-1])
    slots = torch.nonzero(torch.rand(total, generator=g) < (0.3 if seed % 2 else 1.0)).flatten()
    mask = flex_mask(slots, starts, total)
    row = torch.searchsorted(starts, torch.arange(total), right=True)
    seen = (row[slots][:, None] == row[None]) & (torch.arange(total)[None] <= slots[:, None])
    zero = torch.zeros((), dtype=torch.int64)
    assert torch.equal(
        mask.mask_mod(zero, zero, torch.arange(len(slots))[:, None], torch.arange(total)[None]), seen
    )
    visited = tiles_of(mask, len(slots), total)
    assert not (seen & ~visited).any()
    for q in range(mask.full_kv_num_blocks.shape[-1]):
        for tile in mask.full_kv_indices[0, 0, q, : mask.full_kv_num_blocks[0, 0, q]].tolist():
            assert seen[q * 8 : q * 8 + 8, tile * 8 : tile * 8 + 8].all()
            assert tile * 8 + 8 <= total
    needed = sum(bool(tile.any()) for block in seen.split(8) for tile in block.split(8, 1))
    assert int(mask.kv_num_blocks.sum() + mask.full_kv_num_blocks.sum()) == needed


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="FlexAttention has a backward on GPUs only")
@pytest.mark.parametrize("heads", [4, 12])
@pytest.mark.parametrize("count", [0, 1, 100, 129, 900])
def test_real_flex_attention_equals_the_blockwise_form(heads: int, count: int) -> None:
    g = torch.Generator().manual_seed(0)
    starts = torch.tensor([0, 700, 701, 1500])
    slots = torch.randperm(1500, generator=g)[:count].sort().values
    shapes = [(count, heads, 64), (1500, 4, 64), (1500, 4, 64), (2, count, 4, 64), (2, count, 4, 64)]
    values = [torch.randn(s, generator=g) for s in shapes]
    weight = torch.randn(shapes[0], generator=g)
    results = []
    for device in ("cpu", "cuda"):
        keys = VisibleKeys.from_slots(slots, starts, torch.device(device))
        tensors = [v.to(device).requires_grad_() for v in values]
        out = unroll_attention(*tensors, keys)
        results.append([out, *torch.autograd.grad((out * weight.to(device)).sum(), tensors)])
    for flex, blockwise in zip(*results, strict=True):
        torch.testing.assert_close(flex.cpu(), blockwise, rtol=2e-3, atol=2e-3)  # TF32 products
