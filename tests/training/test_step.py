"""A pack's loss and gradients do not depend on its neighbours."""

import torch

from eagle3.config.training import TrainConfig
from eagle3.draft.attention import VisibleKeys
from eagle3.draft.batch import PackedBatch, pack_rows
from eagle3.draft.loss import TargetHead
from eagle3.training.step import Objective
from tests.helpers.tiny_draft import ROWS, draft_target_ids, random_row, tiny_draft, tiny_target


def loss_and_gradients(batch: PackedBatch) -> list[torch.Tensor]:
    """Loss of a pack, and the gradients of every trained parameter and of the aux states."""
    draft = tiny_draft(head="target_trained")
    head = TargetHead.from_target(tiny_target(), draft_target_ids())
    objective = Objective(draft, head, torch.float64, TrainConfig())
    aux = batch.aux.clone().requires_grad_()
    object.__setattr__(batch, "aux", aux)
    visible = VisibleKeys.from_batch(batch, torch.device("cpu"))
    loss = objective(batch, visible, torch.ones(len(batch.slots), dtype=torch.float64)).loss
    return [loss, *torch.autograd.grad(loss, [aux, *draft.parameters()])]


def test_padding_changes_neither_loss_nor_gradients() -> None:
    row, padding = random_row("answer", ROWS["answer"]), random_row("nothing supervised", [0] * 9)
    alone, padded = loss_and_gradients(pack_rows([row], 3)), loss_and_gradients(pack_rows([row, padding], 3))
    length = len(row.token_ids)
    assert padded[1][length:].abs().max() == 0
    padded[1] = padded[1][:length]
    for a, b in zip(alone, padded, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)


def test_a_pack_is_the_sum_of_its_rows() -> None:
    """Neighbours that are supervised from their first token to their last included."""
    rows = [
        random_row(name, ROWS[name]) for name in ("all supervised", "answer", "all supervised", "two turns")
    ]
    packed, alone = (
        loss_and_gradients(pack_rows(rows, 3)),
        [loss_and_gradients(pack_rows([row], 3)) for row in rows],
    )
    torch.testing.assert_close(packed[0], sum(a[0] for a in alone), rtol=1e-12, atol=0)
    torch.testing.assert_close(packed[1], torch.cat([a[1] for a in alone]), rtol=1e-11, atol=1e-13)
    for found, *parts in zip(packed[2:], *(a[2:] for a in alone), strict=True):
        torch.testing.assert_close(found, sum(parts), rtol=1e-11, atol=1e-13)
