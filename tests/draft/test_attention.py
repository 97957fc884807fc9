"""The attention of the unroll against a slow loop, values and gradients, in float64."""

import pytest
import torch
from torch import Tensor

from eagle3.draft import attention
from eagle3.draft.attention import unroll_attention


def slow_attention(q: Tensor, k0: Tensor, v0: Tensor, own_k: Tensor, own_v: Tensor, slots: Tensor, row_starts: Tensor) -> Tensor:
    """One query and one head at a time: softmax over the row's keys up to the slot and the slot's own keys."""
    num_heads, size = q.shape[1:]
    out = []
    for s, slot in enumerate(slots.tolist()):
        start = max(r for r in row_starts.tolist() if r <= slot)
        for n in range(num_heads):
            g = n * k0.shape[1] // num_heads
            keys = torch.cat([k0[start : slot + 1, g], own_k[:, s, g]])
            values = torch.cat([v0[start : slot + 1, g], own_v[:, s, g]])
            out.append(torch.softmax(keys @ q[s, n] / size**0.5, 0) @ values)
    return torch.stack(out).view(q.shape) if out else q * 0


@pytest.mark.parametrize("num_own", [0, 1, 3])
@pytest.mark.parametrize(("heads", "groups"), [(4, 4), (6, 2), (3, 1)])
@pytest.mark.parametrize("block", [1, 2, 256])
@pytest.mark.parametrize("slots", [[0, 1, 4, 5, 6, 11], [2], [], list(range(12))])
def test_attention_equals_a_slow_loop(
    monkeypatch: pytest.MonkeyPatch, num_own: int, heads: int, groups: int, block: int, slots: list[int]
) -> None:
    monkeypatch.setattr(attention, "BLOCK_QUERIES", block)
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
    index = torch.tensor(slots, dtype=torch.int64)
    results = []
    for fn in (unroll_attention, slow_attention):
        out = fn(*tensors, index, starts)
        grads = torch.autograd.grad((out * weight).sum(), tensors, allow_unused=True)
        results.append([out, *(torch.zeros_like(t) if x is None else x for x, t in zip(grads, tensors, strict=True))])
    for fast, slow in zip(*results, strict=True):
        torch.testing.assert_close(fast, slow, rtol=1e-10, atol=1e-11)
