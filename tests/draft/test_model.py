"""The unroll equals step-by-step drafting, and nothing leaks."""

import pytest
import torch

from eagle3.draft.acceptance import find_hits, guess
from eagle3.draft.batch import pack_rows
from eagle3.draft.decode import ReferenceDraft
from eagle3.draft.model import Eagle3Draft
from tests.helpers.tiny_draft import (
    HIDDEN,
    LAYER_IDS,
    ROWS,
    all_rows,
    draft_target_ids,
    random_row,
    tiny_draft,
)

FLAGS = [
    {},
    {"norm_before_residual": False},
    {"norm_before_fc": True, "norm_output": True},
    {"fc_norm": True, "norm_before_residual": False, "norm_output": True},
]


def reference(draft: Eagle3Draft) -> ReferenceDraft:
    ids = draft_target_ids()
    tensors = {**{n: p.detach() for n, p in draft.named_parameters()}, "d2t": ids - torch.arange(len(ids))}
    return ReferenceDraft(draft.config.to_dict(), tensors, draft.embedding, torch.float64)


@pytest.mark.parametrize("model_type", ["llama", "qwen3"])
@pytest.mark.parametrize("flags", FLAGS)
def test_the_unroll_equals_the_reference_decoder_fed_the_same_tokens(model_type: str, flags: dict) -> None:
    draft = tiny_draft(model_type, **flags)
    rows, steps = all_rows(), 4
    batch = pack_rows(rows, steps)
    logits = draft.lm_head(draft(batch))
    decoder, checked = reference(draft), 0
    for s, slot in enumerate(batch.slots.tolist()):
        r = int(torch.searchsorted(batch.row_starts, slot, right=True)) - 1
        p, row = slot - int(batch.row_starts[r]), rows[r]
        k = int(batch.valid[:, s].sum())
        fed = row.token_ids[p + 2 : p + 1 + k].tolist()
        expected = decoder.propose_logits(row.token_ids[: p + 2].tolist(), row.aux[: p + 1], fed, k)
        torch.testing.assert_close(logits[:k, s], expected, rtol=0, atol=1e-9)
        checked += k
    assert checked == int(batch.valid.sum()) > 20


def test_every_served_pair_is_trained_and_no_other() -> None:
    batch = pack_rows(all_rows(), 3)
    pairs = set()
    for row, (start, mask) in enumerate(zip(batch.row_starts.tolist(), ROWS.values(), strict=False)):
        for p in range(-1, len(mask)):
            for i in range(3):
                label = p + 2 + i
                if p >= 0 and label < len(mask) and all(mask[p + 1 : label + 1]):
                    pairs.add((start + p, i))
        assert row < len(ROWS)
    found = {(int(batch.slots[s]), i) for i in range(3) for s in range(len(batch.slots)) if batch.valid[i, s]}
    assert found == pairs


def test_a_packed_neighbour_changes_nothing() -> None:
    draft, row = tiny_draft(), random_row("all supervised", ROWS["all supervised"])
    alone = pack_rows([row], 3)
    packed = pack_rows(
        [random_row("answer", ROWS["answer"]), row, random_row("two turns", ROWS["two turns"])], 3
    )
    start = int(packed.row_starts[1])
    mine = (packed.slots >= start) & (packed.slots < start + len(row.token_ids))
    a, b = draft(alone), draft(packed)[:, mine]
    torch.testing.assert_close(a[alone.valid], b[alone.valid], rtol=0, atol=1e-12)


def test_a_neighbour_gets_no_gradient() -> None:
    draft = tiny_draft()
    rows = [random_row("answer", ROWS["answer"]), random_row("all supervised", ROWS["all supervised"])]
    batch = pack_rows(rows, 3)
    aux = batch.aux.clone().requires_grad_()
    object.__setattr__(batch, "aux", aux)
    boundary = int(batch.row_starts[1])
    own = batch.slots >= boundary
    (draft(batch)[:, own] * batch.valid[:, own, None]).sum().backward()
    assert aux.grad is not None
    assert aux.grad[boundary:].abs().sum() > 0
    assert aux.grad[:boundary].abs().max() == 0


def test_a_pack_without_supervised_slots_unrolls_to_nothing() -> None:
    batch = pack_rows([random_row("nothing supervised", ROWS["nothing supervised"])], 3)
    assert tiny_draft()(batch).shape == (3, 0, HIDDEN)
    assert batch.aux.shape[1] == len(LAYER_IDS)


def test_a_token_outside_the_draft_vocabulary_is_a_miss() -> None:
    draft, batch = tiny_draft(), pack_rows(all_rows(), 3)
    ids = draft_target_ids()
    hits = find_hits(guess(draft(batch), draft.lm_head.weight, ids), batch)
    outside = ~torch.isin(batch.labels(), ids)
    assert (outside & batch.valid).any()
    assert not hits[outside].any()
    assert not hits[~batch.valid].any()
