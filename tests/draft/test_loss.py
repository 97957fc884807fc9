"""The chunked loss against autograd over whole tensors."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from eagle3.draft import loss as loss_module
from eagle3.draft.batch import PackedBatch, pack_rows
from eagle3.draft.loss import TargetHead, coverage, unroll_loss
from tests.helpers.tiny_draft import DRAFT_VOCAB, HIDDEN, all_rows, draft_target_ids, random_row, tiny_target


def target_head() -> TargetHead:
    return TargetHead.from_target(tiny_target(), draft_target_ids())


def all_weights(batch: PackedBatch) -> Tensor:
    """Another weight for every pair, zero where it is not valid."""
    g = torch.Generator().manual_seed(5)
    return torch.rand(batch.valid.shape, generator=g, dtype=torch.float64) * batch.valid


@pytest.mark.parametrize("chunk", [1, 3, 512])
@pytest.mark.parametrize("lk_eta", [None, 0.0, 3.0])
def test_loss_and_gradients_equal_autograd_over_every_pair(
    monkeypatch: pytest.MonkeyPatch, chunk: int, lk_eta: float | None
) -> None:
    monkeypatch.setattr(loss_module, "chunk_slots", lambda *_: chunk)
    g = torch.Generator().manual_seed(0)
    batch, target = pack_rows(all_rows(), 3), target_head()
    states = torch.randn(3, len(batch.slots), HIDDEN, generator=g, dtype=torch.float64, requires_grad=True)
    head = torch.randn(DRAFT_VOCAB, HIDDEN, generator=g, dtype=torch.float64, requires_grad=True)
    weights = all_weights(batch)
    result = unroll_loss(states, head, batch, target, weights, lk_eta)

    last = F.rms_norm(batch.last, (HIDDEN,), target.norm_weight, target.norm_eps)
    total, by_step = torch.zeros((), dtype=torch.float64), [0.0, 0.0, 0.0]
    for i in range(3):
        for s in range(len(batch.slots)):
            if not batch.valid[i, s]:
                continue
            p = torch.softmax(target.rows @ last[s + i], 0)
            whole = torch.softmax(target.head @ last[s + i], 0)[target.target_ids]
            log_q = torch.log_softmax(head @ states[i, s], 0)
            pair = (p * (p.log() - log_q)).sum()
            if lk_eta is not None:
                alpha = torch.minimum(whole, log_q.exp()).sum()
                share = torch.exp(-lk_eta * alpha.detach())
                pair = share * pair + (1 - share) * (1 - alpha)
            by_step[i] += pair.item()
            total = total + pair * weights[i, s]
            assert result.argmax[i, s] == target.target_ids[int(log_q.argmax())]
    fast = torch.autograd.grad(result.loss * 2, [states, head])
    slow = torch.autograd.grad(total * 2, [states, head])
    torch.testing.assert_close(result.loss, total, rtol=1e-10, atol=0)
    torch.testing.assert_close(result.per_step, torch.tensor(by_step, dtype=torch.float64))
    for a, b in zip(fast, slow, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


def test_coverage_is_the_targets_mass_inside_the_draft_vocabulary() -> None:
    target, batch = target_head(), pack_rows(all_rows(), 3)
    last = target.normed(batch.last)
    expected = torch.softmax(last @ target.head.T, -1)[:, target.target_ids].sum(-1)
    torch.testing.assert_close(coverage(last, target), expected, rtol=1e-10, atol=0)
    whole = TargetHead.from_target(tiny_target(), torch.arange(len(target.head)))
    assert torch.equal(coverage(last, whole), torch.ones(len(last), dtype=torch.float64))


@pytest.mark.parametrize("vocab_size", [151_936, 262_144])
def test_the_largest_vocabularies_train(vocab_size: int) -> None:
    """float32, no restriction to a draft vocabulary; the chunked pass against autograd over whole tensors."""
    g = torch.Generator().manual_seed(0)
    rows = [random_row("answer", [0, 0, *[1] * 40], torch.float32)]
    batch = pack_rows(rows, 2)
    rows_of_head = 0.1 * torch.randn(vocab_size, HIDDEN, generator=g)
    target = TargetHead(torch.ones(HIDDEN), 1e-5, rows_of_head, torch.arange(vocab_size), rows_of_head)
    states = torch.randn(2, len(batch.slots), HIDDEN, generator=g, requires_grad=True)
    head = (0.1 * torch.randn(vocab_size, HIDDEN, generator=g)).requires_grad_()
    result = unroll_loss(states, head, batch, target, batch.valid.float())
    fast = torch.autograd.grad(result.loss, [states, head])

    log_p = torch.log_softmax(target.normed(batch.last) @ rows_of_head.T, -1)
    total = torch.zeros(())
    for i in range(2):
        log_q = torch.log_softmax(states[i] @ head.T, -1)
        count = len(batch.slots) - i
        kl = (log_p[i:].exp() * (log_p[i:] - log_q[:count])).sum(-1)
        total = total + (kl * batch.valid[i, :count]).sum()
    slow = torch.autograd.grad(total, [states, head])
    torch.testing.assert_close(result.loss, total, rtol=1e-4, atol=0)  # float32 sums over 262,144 terms
    for a, b in zip(fast, slow, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)


def test_the_target_state_of_a_pair_is_the_one_that_predicts_its_label() -> None:
    """Slot p, step i: distribution after position p + 1 + i, whose next token is the label p + 2 + i."""
    row = random_row("answer", [0, 0, 0, 1, 1, 1, 1, 1])
    batch = pack_rows([row], 3)
    for i in range(3):
        for s, p in enumerate(batch.slots.tolist()):
            if batch.valid[i, s]:
                assert row.last_positions[s + i] == p + 1 + i
                assert batch.labels()[i, s] == row.token_ids[p + 2 + i]
                assert batch.fed_ids(i)[s] == row.token_ids[p + 1 + i]


def test_unsupervised_rows_in_the_pack_do_not_change_the_loss() -> None:
    g = torch.Generator().manual_seed(0)
    rows = [random_row("answer", [0, 0, 0, 1, 1, 1, 1, 1])]
    padding = random_row("padding", [0] * 9)
    head = torch.randn(DRAFT_VOCAB, HIDDEN, generator=g, dtype=torch.float64)
    alone, padded = pack_rows(rows, 3), pack_rows([*rows, padding], 3)
    states = torch.randn(3, len(alone.slots), HIDDEN, generator=g, dtype=torch.float64)
    losses = [unroll_loss(states, head, b, target_head(), all_weights(b)).loss for b in (alone, padded)]
    assert losses[0] == losses[1]


def test_a_pack_without_supervised_slots_has_zero_loss_and_gradient() -> None:
    batch = pack_rows([random_row("nothing", [0, 0, 0])], 3)
    states = torch.zeros(3, 0, HIDDEN, dtype=torch.float64, requires_grad=True)
    head = torch.ones(DRAFT_VOCAB, HIDDEN, dtype=torch.float64, requires_grad=True)
    loss = unroll_loss(states, head, batch, target_head(), torch.zeros(3, 0)).loss
    loss.backward()
    assert loss == 0
    assert head.grad is not None
    assert head.grad.abs().max() == 0
