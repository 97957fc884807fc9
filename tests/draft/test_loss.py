"""The chunked loss against autograd over whole tensors."""

import pytest
import torch
from torch.nn import functional as F

from eagle3.batch import pack_rows
from eagle3.draft import loss as loss_module
from eagle3.draft.loss import TargetHead, unroll_loss
from tests.draft.tiny import DRAFT_VOCAB, HIDDEN, all_rows, draft_target_ids, random_row, tiny_target


def target_head() -> TargetHead:
    target, ids = tiny_target(), draft_target_ids()
    return TargetHead(target.norm_weight, target.norm_eps, target.head[ids], ids)


@pytest.mark.parametrize("chunk", [1, 3, 512])
def test_loss_and_gradients_equal_autograd_over_every_pair(monkeypatch: pytest.MonkeyPatch, chunk: int) -> None:
    monkeypatch.setattr(loss_module, "CHUNK_SLOTS", chunk)
    g = torch.Generator().manual_seed(0)
    batch, target = pack_rows(all_rows(), 3), target_head()
    states = torch.randn(3, len(batch.slots), HIDDEN, generator=g, dtype=torch.float64, requires_grad=True)
    head = torch.randn(DRAFT_VOCAB, HIDDEN, generator=g, dtype=torch.float64, requires_grad=True)
    step_weights = torch.tensor([1.0, 0.8, 0.64], dtype=torch.float64)
    result = unroll_loss(states, head, batch, target, step_weights, 7.0)

    last = F.rms_norm(batch.last, (HIDDEN,), target.norm_weight, target.norm_eps)
    total, by_step = torch.zeros((), dtype=torch.float64), [0.0, 0.0, 0.0]
    for i in range(3):
        for s in range(len(batch.slots)):
            if not batch.valid[i, s]:
                continue
            p = torch.softmax(target.rows @ last[batch.last_index[i, s]], 0)
            log_q = torch.log_softmax(head @ states[i, s], 0)
            kl = (p * (p.log() - log_q)).sum()
            by_step[i] += kl.item()
            total = total + kl * step_weights[i] / 7.0
            assert result.argmax[i, s] == target.target_ids[int(log_q.argmax())]
    fast = torch.autograd.grad(result.loss * 2, [states, head])
    slow = torch.autograd.grad(total * 2, [states, head])
    torch.testing.assert_close(result.loss, total, rtol=1e-10, atol=0)
    torch.testing.assert_close(result.per_step, torch.tensor(by_step, dtype=torch.float64))
    for a, b in zip(fast, slow, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


def test_the_target_state_of_a_pair_is_the_one_that_predicts_its_label() -> None:
    """Slot p, step i: distribution after position p + 1 + i, whose next token is the label p + 2 + i."""
    row = random_row("answer", [0, 0, 0, 1, 1, 1, 1, 1])
    batch = pack_rows([row], 3)
    for i in range(3):
        for s, p in enumerate(batch.slots.tolist()):
            if batch.valid[i, s]:
                assert row.last_positions[batch.last_index[i, s]] == p + 1 + i
                assert batch.labels()[i, s] == row.token_ids[p + 2 + i]
                assert batch.fed_ids(i)[s] == row.token_ids[p + 1 + i]


def test_unsupervised_rows_in_the_pack_do_not_change_the_loss() -> None:
    g = torch.Generator().manual_seed(0)
    rows = [random_row("answer", [0, 0, 0, 1, 1, 1, 1, 1])]
    padding = random_row("padding", [0] * 9)
    head = torch.randn(DRAFT_VOCAB, HIDDEN, generator=g, dtype=torch.float64)
    alone, padded = pack_rows(rows, 3), pack_rows([*rows, padding], 3)
    states = torch.randn(3, len(alone.slots), HIDDEN, generator=g, dtype=torch.float64)
    ones = torch.ones(3, dtype=torch.float64)
    losses = [unroll_loss(states, head, b, target_head(), ones, len(b.slots)).loss for b in (alone, padded)]
    assert losses[0] == losses[1]


def test_a_pack_without_supervised_slots_has_zero_loss_and_gradient() -> None:
    batch = pack_rows([random_row("nothing", [0, 0, 0])], 3)
    states = torch.zeros(3, 0, HIDDEN, dtype=torch.float64, requires_grad=True)
    head = torch.ones(DRAFT_VOCAB, HIDDEN, dtype=torch.float64, requires_grad=True)
    loss = unroll_loss(states, head, batch, target_head(), torch.ones(3), 1).loss
    loss.backward()
    assert loss == 0
    assert head.grad is not None
    assert head.grad.abs().max() == 0
