"""Supervised slots by hand, and packing against a slow loop."""

import random

import pytest
import torch

from eagle3.draft.batch import PackedBatch, pack_rows, valid_steps
from eagle3.shards.hidden_states import HiddenStateRow, last_state_positions

NUM_AUX, HIDDEN = 3, 4


def make_row(sample_id: str, mask: list[bool], base: int) -> HiddenStateRow:
    """Token p is base + p; its aux states hold that number, its last hidden state minus that."""
    length = len(mask)
    ids = base + torch.arange(length)
    loss_mask = torch.tensor(mask, dtype=torch.bool)
    positions = last_state_positions(loss_mask)
    aux = ids.float()[:, None, None].expand(length, NUM_AUX, HIDDEN).contiguous()
    last = -ids[positions].float()[:, None].expand(len(positions), HIDDEN).contiguous()
    return HiddenStateRow(sample_id, ids, loss_mask, aux, last, positions)


@pytest.mark.parametrize(
    ("mask", "steps"),
    [
        # a prompt token, then an answer of four: the last slot is two before the end of turn
        ("01111", ["11100", "11000", "10000"]),
        ("001111", ["011100", "011000", "010000"]),
        # the turn's last token is never fed; two turns do not join
        ("011011", ["100100", "000000", "000000"]),
        ("0110", ["1000", "0000", "0000"]),
        # one answer token trains nothing: it comes from the target's prefill
        ("0100", ["0000", "0000", "0000"]),
        ("0000", ["0000", "0000", "0000"]),
        # supervised from the first token on: no slot before it
        ("1111", ["1100", "1000", "0000"]),
        ("1", ["0", "0", "0"]),
        ("11", ["00", "00", "00"]),
    ],
)
def test_valid_steps_by_hand(mask: str, steps: list[str]) -> None:
    valid = valid_steps(torch.tensor([c == "1" for c in mask]), len(steps))
    assert ["".join(str(int(v)) for v in row) for row in valid.tolist()] == steps


def test_more_steps_than_tokens_are_fine() -> None:
    assert (
        valid_steps(torch.tensor([True, True, True]), 6).tolist()
        == [[True, False, False]] + [[False] * 3] * 5
    )
    assert valid_steps(torch.zeros(0, dtype=torch.bool), 2).shape == (2, 0)


def check_slowly(batch: PackedBatch, rows: list[HiddenStateRow], num_steps: int) -> None:
    """Reference: one loop over rows, positions and steps."""
    slots, start = [], 0
    for row in rows:
        mask = row.loss_mask.tolist()
        for p in range(len(mask)):
            steps = [
                all(m < len(mask) and mask[m] for m in range(p + 1, p + 3 + i)) for i in range(num_steps)
            ]
            if steps[0]:
                slots.append((start + p, steps, row, p))
        start += len(mask)
    assert batch.slots.tolist() == [s[0] for s in slots]
    labels = batch.labels()
    assert labels.shape == batch.valid.shape == (num_steps, len(slots))
    assert len(batch.last) == len(batch.slot_rows) == len(slots)
    assert [rows[r] for r in batch.slot_rows.tolist()] == [s[2] for s in slots]
    for s, (_, steps, row, p) in enumerate(slots):
        for i, trained in enumerate(steps):
            assert bool(batch.valid[i, s]) == trained
            if trained:
                assert int(batch.fed_ids(i)[s]) == int(row.token_ids[p + 1 + i])
                assert int(labels[i, s]) == int(row.token_ids[p + 2 + i])
                assert float(batch.last[s + i, 0]) == -float(row.token_ids[p + 1 + i])


def random_masks(seed: int) -> list[list[bool]]:
    rng = random.Random(seed)
    return [
        [rng.random() < 0.7 for _ in range(rng.choice([1, 2, 3, 7, 11]))] for _ in range(rng.randint(1, 5))
    ]


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("num_steps", [1, 3, 5])
def test_packing_equals_the_slow_loop(seed: int, num_steps: int) -> None:
    rows = [make_row(str(i), mask, 100 * (i + 1)) for i, mask in enumerate(random_masks(seed))]
    batch = pack_rows(rows, num_steps)
    check_slowly(batch, rows, num_steps)
    lengths = [len(r.token_ids) for r in rows]
    assert batch.token_ids.tolist() == [int(t) for r in rows for t in r.token_ids]
    assert batch.positions.tolist() == [p for n in lengths for p in range(n)]
    assert batch.row_starts.tolist() == [sum(lengths[:i]) for i in range(len(rows) + 1)]
    assert batch.aux[:, 1, 2].tolist() == [float(t) for t in batch.token_ids]
    assert batch.sample_ids == [r.sample_id for r in rows]


def test_the_neighbours_tokens_are_no_labels_when_a_row_is_supervised_from_its_first_token() -> None:
    rows = [make_row("a", [False, True, True], 10), make_row("b", [True, True, True], 20)]
    batch = pack_rows(rows, 3)
    assert batch.slots.tolist() == [0, 3]
    assert batch.valid.tolist() == [[True, True], [False, False], [False, False]]
    check_slowly(batch, rows, 3)


def test_a_pack_of_its_rows_is_the_rows_packed_alone() -> None:
    rows = [make_row("a", [False, True, True, True], 10), make_row("b", [True, True, False, True, True], 20)]
    batch, start = pack_rows(rows, 2), 0
    for row in rows:
        alone = pack_rows([row], 2)
        here = (batch.slots >= start) & (batch.slots < start + len(row.token_ids))
        assert torch.equal(batch.slots[here] - start, alone.slots)
        assert torch.equal(batch.valid[:, here], alone.valid)
        start += len(row.token_ids)


@pytest.mark.parametrize("masks", [[[False]], [[True]], [[False, False], [True]]])
def test_a_pack_without_supervised_slots_is_empty_but_whole(masks: list[list[bool]]) -> None:
    batch = pack_rows([make_row(str(i), m, 10 * i) for i, m in enumerate(masks)], 3)
    assert batch.slots.shape == (0,)
    assert batch.valid.shape == batch.labels().shape == (3, 0)
    assert batch.last.shape == (0, HIDDEN)
    assert len(batch.token_ids) == sum(map(len, masks))


def test_a_missing_last_hidden_state_is_an_error() -> None:
    row = make_row("a", [False, True, True, True], 10)
    broken = HiddenStateRow("a", row.token_ids, row.loss_mask, row.aux, row.last[1:], row.last_positions[1:])
    with pytest.raises(ValueError, match="row a: last hidden states must be at the 2 positions"):
        pack_rows([broken], 2)


def test_moving_to_a_device_keeps_everything() -> None:
    batch = pack_rows([make_row("a", [False, True, True, True], 10)], 2)
    moved = batch.to("cpu")
    for name, value in vars(batch).items():
        other = getattr(moved, name)
        assert torch.equal(value, other) if isinstance(value, torch.Tensor) else value == other


def test_conversations_weigh_the_same_whatever_their_length() -> None:
    rows = [
        make_row("a", [False, True, True, True, True], 10),
        make_row("b", [False], 20),
        make_row("c", [False, True, True], 30),
    ]
    batch = pack_rows(rows, 2)
    weights, total = batch.slot_weights("conversation")
    assert weights.tolist() == pytest.approx([1 / 3, 1 / 3, 1 / 3, 1.0])
    assert total == 2
    assert batch.slot_weights("token")[0].tolist() == [1.0] * 4
    assert batch.slot_weights("token")[1] == 4


def test_a_pack_without_its_slots_keeps_its_rows() -> None:
    batch = pack_rows([make_row("a", [False, True, True, True], 10)], 2).without_slots()
    assert batch.slots.shape == batch.slot_rows.shape == (0,)
    assert batch.valid.shape == (2, 0)
    assert len(batch.token_ids) == len(batch.aux) == 4
