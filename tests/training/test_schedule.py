"""Packs: every row once, nearly full, a group of chunks at a time, the same for the same seed; a cut row
trains what is left.
"""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle3.draft.batch import pack_rows
from eagle3.training.loader import Pack, cut_row
from eagle3.training.schedule import choose_validation, fill_packs, plan_packs, split_pack
from tests.helpers.tiny_draft import random_row


def lengths(count: int, low: int = 5, high: int = 300) -> list[int]:
    return torch.randint(low, high, (count,), generator=torch.Generator().manual_seed(0)).tolist()


def chunks(count: int, rows_per_chunk: int = 40) -> list[int]:
    return [row // rows_per_chunk for row in range(count)]


def plan(
    sizes: list[int], pack_tokens: int = 512, seed: int = 1, epoch: int = 0, shuffle_chunks: int = 4
) -> list[list[int]]:
    rows = list(range(len(sizes)))
    return rows_of(plan_packs(sizes, chunks(len(sizes)), rows, pack_tokens, shuffle_chunks, seed, epoch))


def rows_of(packs: list[Pack]) -> list[list[int]]:
    return [pack.rows for pack in packs]


def filled_slowly(rows: list[int], sizes: list[int], pack_tokens: int, window: int) -> list[list[int]]:
    """Every choice by looking at all waiting rows."""
    packs: list[list[int]] = [[]]
    line, waiting = list(rows), []
    while line or waiting:
        while line and len(waiting) < window:
            waiting.append(line.pop(0))
        room = pack_tokens - sum(min(sizes[r], pack_tokens) for r in packs[-1])
        fitting = [r for r in waiting if min(sizes[r], pack_tokens) <= room]
        if not fitting:
            packs.append([])
            fitting = waiting[:1]
        longest = max(min(sizes[r], pack_tokens) for r in fitting)
        row = next(r for r in fitting if min(sizes[r], pack_tokens) == longest)
        waiting.remove(row)
        packs[-1].append(row)
    return packs


@settings(max_examples=200, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 40), max_size=80),
    rows_per_chunk=st.integers(1, 20),
    pack_tokens=st.integers(2, 50),
    shuffle_chunks=st.integers(1, 5),
    seed=st.integers(0, 3),
    every=st.integers(1, 3),
)
def test_every_row_stands_in_exactly_one_pack_that_it_fits(
    sizes: list[int], rows_per_chunk: int, pack_tokens: int, shuffle_chunks: int, seed: int, every: int
) -> None:
    rows, chunk_of = list(range(0, len(sizes), every)), chunks(len(sizes), rows_per_chunk)
    packs = rows_of(plan_packs(sizes, chunk_of, rows, pack_tokens, shuffle_chunks, seed, 0))
    assert sorted(r for pack in packs for r in pack) == rows
    assert all(pack and sum(min(sizes[r], pack_tokens) for r in pack) <= pack_tokens for pack in packs)


@settings(max_examples=100, deadline=None)
@given(sizes=st.lists(st.integers(1, 30), min_size=1, max_size=60), pack_tokens=st.integers(2, 40))
def test_one_group_is_filled_as_by_looking_at_all_waiting_rows(sizes: list[int], pack_tokens: int) -> None:
    rows = list(range(len(sizes)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("eagle3.training.schedule.WINDOW_ROWS", 7)
        packs = fill_packs([], rows, sizes, pack_tokens)
    assert packs == filled_slowly(rows, sizes, pack_tokens, 7)


@pytest.mark.parametrize("shuffle_chunks", [1, 4, 8, 1000])
@pytest.mark.parametrize("rows_per_chunk", [16, 40])
def test_packs_are_filled_to_95_percent(shuffle_chunks: int, rows_per_chunk: int) -> None:
    sizes = lengths(3000)
    packs = plan_packs(sizes, chunks(3000, rows_per_chunk), list(range(3000)), 2048, shuffle_chunks, 1, 0)
    assert sum(sizes) / (len(packs) * 2048) >= 0.95


def test_only_the_chunks_of_one_group_and_of_one_pack_are_in_use_at_a_time() -> None:
    sizes, chunk_of = lengths(3000), chunks(3000)
    packs = plan(sizes, shuffle_chunks=4)
    uses: dict[int, list[int]] = {}
    for position, pack in enumerate(packs):
        for row in pack:
            uses.setdefault(chunk_of[row], []).append(position)
    in_use = [sum(min(p) <= position <= max(p) for p in uses.values()) for position in range(len(packs))]
    assert max(in_use) <= 4 + max(map(len, packs))
    assert sum(n <= 4 for n in in_use) >= 0.9 * len(packs)
    # No chunk comes back in a later group: 75 chunks, about a fourth of whose packs' worth passes between
    # first and last use.
    assert max(max(p) - min(p) for p in uses.values()) <= 2 * len(packs) * 4 / 75


def test_rows_of_the_chunks_of_a_group_mix() -> None:
    sizes, chunk_of = lengths(3000), chunks(3000)
    mixed = [len({chunk_of[r] for r in pack}) for pack in plan(sizes, pack_tokens=2048, shuffle_chunks=8)]
    assert sum(mixed) / len(mixed) > 4


def test_the_order_depends_on_seed_and_epoch_alone() -> None:
    sizes = lengths(500)
    first = plan(sizes)
    assert plan(sizes) == first
    others = [plan(sizes, epoch=1), plan(sizes, seed=2)]
    assert first not in others
    chunk_of = chunks(500)
    order = [[chunk_of[r] for pack in packs for r in pack] for packs in (first, *others)]
    starts = [list(dict.fromkeys(o))[:4] for o in order]
    assert len({tuple(sorted(s)) for s in starts}) == 3, "chunks come in another order each epoch"


def test_pack_order_does_not_follow_row_length() -> None:
    sizes = lengths(20_000)
    packs = plan(sizes, pack_tokens=2048, shuffle_chunks=8)
    mean = torch.tensor([sum(sizes[r] for r in pack) / len(pack) for pack in packs])
    # 1,500 packs: a correlation of nothing has a deviation of 0.026.
    assert abs(torch.corrcoef(torch.stack([torch.arange(len(packs)), mean]))[0, 1]) < 0.1
    # Places within a group's worth of packs (8 chunks of 40 rows of 152 tokens); the pack that two groups
    # share has shorter rows.
    position = torch.arange(len(packs)) % (8 * 40 * 152 / 2048)
    assert abs(torch.corrcoef(torch.stack([position, mean]))[0, 1]) < 0.15
    assert abs(torch.corrcoef(torch.stack([mean[:-1], mean[1:]]))[0, 1]) < 0.1


def test_no_row_waits_for_ever() -> None:
    # Rows of 7 of 10 tokens fit with nothing but rows of 3, and there is always a longer row that fits
    # better.
    sizes = [7, *[5] * 999]
    packs = fill_packs([], [*range(1, 11), 0, *range(11, 1000)], sizes, 10)
    at = next(position for position, pack in enumerate(packs) if 0 in pack)
    assert at <= 10


def test_a_row_longer_than_a_pack_is_alone_in_one() -> None:
    assert plan([700]) == [[0]]
    assert sorted(plan([700, 10])) == [[0], [1]]


def test_parts_keep_the_rows_their_order_and_their_group() -> None:
    lengths = [5, 3, 9, 2, 2, 4]
    parts = split_pack(Pack([0, 1, 2, 3, 4, 5], 7), lengths, 8)
    assert parts == [Pack([0, 1], 7), Pack([2], 7), Pack([3, 4, 5], 7)]
    assert rows_of(split_pack(Pack([5, 0], 0), lengths, 100)) == [[5, 0]]
    assert rows_of(split_pack(Pack([2], 0), lengths, 4)) == [[2]]


def test_no_rows_make_no_packs() -> None:
    assert plan([]) == []


def test_a_pack_that_its_group_does_not_fill_continues_in_the_next() -> None:
    packs = plan_packs([10] * 9, list(range(9)), list(range(9)), 20, 1, 0, 0)
    assert [len(pack.rows) for pack in packs] == [2, 2, 2, 2, 1]
    assert [pack.group for pack in packs] == [0, 2, 4, 6, 8]


@settings(max_examples=100, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 40), max_size=80), shuffle_chunks=st.integers(1, 5), epoch=st.integers(0, 2)
)
def test_groups_come_in_order_and_only_their_last_pack_needs_chunks_of_a_later_one(
    sizes: list[int], shuffle_chunks: int, epoch: int
) -> None:
    rows, chunk_of = list(range(len(sizes))), chunks(len(sizes), 4)
    packs = plan_packs(sizes, chunk_of, rows, 50, shuffle_chunks, 0, epoch)
    groups = [pack.group for pack in packs]
    assert groups == sorted(groups)
    group_of = {chunk_of[row]: pack.group for pack in packs for row in pack.rows}
    for pack, following in itertools.pairwise(packs):
        needs = {group_of[chunk_of[row]] for row in pack.rows}
        assert needs == {pack.group} or following.group > pack.group
        assert min(needs) >= pack.group
    num_groups = -(-len(set(chunk_of)) // shuffle_chunks)
    assert all(epoch * num_groups <= group < (epoch + 1) * num_groups for group in groups)


def test_a_cut_row_trains_what_its_tokens_allow() -> None:
    row = random_row("long", [0, 1, 1, 1, 1, 1, 1, 1])
    cut = cut_row(row, 5)
    assert len(cut.token_ids) == len(cut.loss_mask) == len(cut.aux) == 5
    assert cut.last_positions.tolist() == [1, 2, 3]
    whole, short = pack_rows([row], 3), pack_rows([cut], 3)
    assert [
        (short.slots[s].item(), i) for i in range(3) for s in range(len(short.slots)) if short.valid[i, s]
    ] == [(p, i) for i in range(3) for p in range(8) if p + 2 + i < 5]
    assert torch.equal(whole.aux[:5], short.aux)


def test_conversations_that_open_alike_are_on_one_side_of_the_choose_validation() -> None:
    ids = [f"{i // 3}:{i}" for i in range(60)]
    for wanted in (0, 1, 2, 3, 10, 60):
        held = choose_validation(ids, wanted)
        assert len(held) == wanted // 3 * 3
        openings = {ids[row].partition(":")[0] for row in held}
        assert held == {row for row, i in enumerate(ids) if i.partition(":")[0] in openings}


def test_rows_that_are_added_never_turn_training_rows_into_validation_rows() -> None:
    ids = [f"opening {i}:content" for i in range(300)]
    held = choose_validation(ids[:100], 20)
    assert len(held) == 20
    assert {row for row in choose_validation(ids, 20) if row < 100} <= held
