"""The draft vocabulary against a slow loop, its edges, and its file."""

import logging
import re
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from eagle3 import vocab as vocab_module
from eagle3.shards.tokens import TokenRow
from eagle3.vocab import (
    build_vocab,
    count_tokens,
    coverage_by_size,
    keep_vocab,
    load_vocab,
    most_frequent,
    save_vocab,
)


def kept_slowly(counts: list[int], size: int, always: list[int]) -> list[int]:
    """Reference: pick one id after the other."""
    kept = sorted(set(always))
    while len(kept) < size:
        left = [i for i in range(len(counts)) if i not in kept]
        kept.append(max(left, key=lambda i: (counts[i], -i)))
    return sorted(kept)


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_fast_choice_equals_the_slow_one(data: st.DataObject) -> None:
    counts = data.draw(st.lists(st.integers(0, 4), min_size=1, max_size=12).filter(any))
    size = data.draw(st.integers(1, len(counts)))
    always = data.draw(st.lists(st.integers(0, len(counts) - 1), max_size=size))
    vocab = build_vocab(torch.tensor(counts), size, always)
    kept = kept_slowly(counts, size, always)
    assert [draft_id + int(vocab.d2t[draft_id]) for draft_id in range(size)] == kept
    assert [i for i, used in enumerate(vocab.t2d.tolist()) if used] == kept
    assert vocab.coverage == sum(counts[i] for i in kept) / sum(counts)
    assert (vocab.d2t.dtype, vocab.t2d.dtype, len(vocab.t2d)) == (torch.int64, torch.bool, len(counts))


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_coverage_by_size_equals_a_slow_loop(data: st.DataObject) -> None:
    counts = data.draw(st.lists(st.integers(0, 4), min_size=1, max_size=12).filter(any))
    always = data.draw(st.lists(st.integers(0, len(counts) - 1), max_size=4))
    sizes = [size for size in (1, 2, 4, 8) if size < len(counts)] + [len(counts)]
    expected = [
        (size, sum(counts[i] for i in kept_slowly(counts, size, always)) / sum(counts))
        for size in sizes
        if size >= len(set(always))
    ]
    assert coverage_by_size(torch.tensor(counts), always) == expected


def test_a_size_beyond_the_target_takes_all_its_tokens() -> None:
    assert most_frequent(torch.tensor([4, 0, 7]), 5, always=[1]).tolist() == [True] * 3
    assert most_frequent(torch.tensor([4, 0, 7]), 2, always=[1]).tolist() == [False, True, True]


def test_five_tokens_by_hand() -> None:
    vocab = build_vocab(torch.tensor([4, 0, 7, 1, 0]), 3, always=[4])
    assert vocab.target_ids.tolist() == [0, 2, 4]
    assert vocab.d2t.tolist() == [0, 1, 2]
    assert vocab.t2d.tolist() == [True, False, True, False, True]
    assert vocab.coverage == 11 / 12


def test_the_whole_target_vocabulary_is_the_identity() -> None:
    vocab = build_vocab(torch.tensor([0, 3, 1]), 3, always=[])
    assert vocab.d2t.tolist() == [0, 0, 0]
    assert vocab.t2d.all()
    assert vocab.coverage == 1.0


def test_counts_are_not_changed() -> None:
    counts = torch.tensor([4, 0, 7])
    assert build_vocab(counts, 2, always=[1]).counts.tolist() == counts.tolist() == [4, 0, 7]


def test_only_supervised_tokens_count() -> None:
    rows = [
        TokenRow("a", "s", [3, 3, 1, 2, 3], [False, False, True, True, True]),
        TokenRow("b", "s", [0, 0], [False, False]),
    ]
    assert count_tokens(rows, 5).tolist() == [0, 1, 1, 1, 0]
    assert count_tokens([], 5).tolist() == [0] * 5


@pytest.mark.parametrize("at_once", [1, 3, 10])
def test_counting_in_batches_loses_nothing(monkeypatch: pytest.MonkeyPatch, at_once: int) -> None:
    monkeypatch.setattr(vocab_module, "COUNTED_AT_ONCE", at_once)
    rows = [TokenRow(str(n), "s", list(range(n)), [True] * n) for n in range(6)]
    assert count_tokens(rows, 6).tolist() == [5, 4, 3, 2, 1, 0]


def test_counts_of_shards_add_up() -> None:
    rows = [TokenRow(str(i), "s", [i, i + 1], [True, i % 2 == 0]) for i in range(4)]
    assert torch.equal(count_tokens(rows, 6), count_tokens(rows[:1], 6) + count_tokens(rows[1:], 6))


@pytest.mark.parametrize("token", [-1, 5])
def test_a_token_outside_the_target_vocabulary_names_the_row(token: int) -> None:
    with pytest.raises(
        ValueError,
        match=r"row a: token ids .* do not fit the target's vocabulary of 5; prepare the shard with",
    ):
        count_tokens([TokenRow("a", "s", [0, token], [True, True])], 5)


@pytest.mark.parametrize(
    ("counts", "size", "always", "message"),
    [
        ([1, 1], 3, [], "draft vocab must not exceed the target's 2, got 3; lower vocab.size"),
        ([1, 1, 1], 1, [0, 2], "draft vocab must hold the 2 end-of-turn tokens, got 1; raise vocab.size"),
        (
            [1, 1, 1],
            2,
            [3],
            "end-of-turn ids must lie below the target's 3, got [3]; check the target's config.json",
        ),
        ([0, 0, 0], 2, [], "needs supervised tokens, got none; check the loss masks"),
    ],
)
def test_an_impossible_vocabulary_names_the_setting_to_change(
    counts: list[int], size: int, always: list[int], message: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        build_vocab(torch.tensor(counts), size, always)


def test_too_few_distinct_tokens_are_filled_with_the_lowest_unused_ids_and_warned_of(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING, "eagle3.vocab"):
        vocab = build_vocab(torch.tensor([0, 0, 0, 2, 0, 0]), 4, always=[5])
    assert vocab.target_ids.tolist() == [0, 1, 3, 5]
    assert "only 2 distinct tokens are supervised, vocab.size is 4" in caplog.text
    caplog.clear()
    build_vocab(torch.tensor([1, 1, 0]), 2, always=[])
    assert not caplog.text


def test_a_saved_vocabulary_is_loaded_unchanged(tmp_path: Path) -> None:
    vocab = build_vocab(torch.tensor([4, 0, 7, 1, 0]), 3, always=[4])
    digest = save_vocab(tmp_path / "vocab.safetensors", vocab)
    loaded = load_vocab(tmp_path / "vocab.safetensors")
    for name in ("d2t", "t2d", "counts"):
        assert torch.equal(getattr(loaded, name), getattr(vocab, name))
    assert loaded.coverage == vocab.coverage
    assert loaded.digest == digest == save_vocab(tmp_path / "elsewhere", vocab)
    assert digest != build_vocab(torch.tensor([4, 0, 7, 1, 0]), 2, always=[4]).digest
    assert sorted(p.name for p in tmp_path.iterdir()) == ["elsewhere", "vocab.safetensors"]


def swap(tensors: dict[str, Tensor], **changes: Tensor) -> dict[str, Tensor]:
    return {**tensors, **changes}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: swap(t, d2t=t["d2t"].flip(0)), "d2t names other target tokens than the 3 marked in t2d"),
        (lambda t: swap(t, d2t=t["d2t"][:2]), "d2t names other target tokens"),
        (lambda t: swap(t, d2t=t["d2t"] + 1), "d2t names other target tokens"),
        (lambda t: swap(t, t2d=~t["t2d"]), "d2t names other target tokens than the 2 marked"),
        (lambda t: swap(t, d2t=t["d2t"].int()), "d2t must be int64 [K], t2d bool [V] and counts int64 [V]"),
        (lambda t: swap(t, t2d=t["t2d"].long()), "t2d bool [V]"),
        (lambda t: swap(t, counts=t["counts"][:4]), "t2d has 5 target tokens but counts has 4"),
        (lambda t: swap(t, counts=-t["counts"]), "counts must be natural numbers"),
        (lambda t: {k: v for k, v in t.items() if k != "t2d"}, "is not a readable draft vocab ('t2d')"),
    ],
)
def test_a_contradictory_file_is_named(tmp_path: Path, change: object, message: str) -> None:
    path = tmp_path / "vocab.safetensors"
    save_vocab(path, build_vocab(torch.tensor([4, 0, 7, 1, 0]), 3, always=[4]))
    save_file(change(load_file(path)), path)  # type: ignore[operator]
    with pytest.raises(ValueError, match=re.escape(message)) as e:
        load_vocab(path)
    assert str(e.value).startswith(str(path))
    assert str(e.value).endswith("delete it and run again")


@pytest.mark.parametrize("data", [None, b"", b"{}"])
def test_an_unreadable_file_is_named(tmp_path: Path, data: bytes | None) -> None:
    path = tmp_path / "vocab.safetensors"
    if data is not None:
        path.write_bytes(data)
    with pytest.raises(
        ValueError, match=r"vocab\.safetensors is not a readable draft vocab .*; delete it and run again"
    ):
        load_vocab(path)


def test_a_truncated_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "vocab.safetensors"
    save_vocab(path, build_vocab(torch.tensor([1, 1]), 2, always=[]))
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ValueError, match="is not a readable draft vocab"):
        load_vocab(path)


def test_the_vocabulary_of_an_initial_draft_is_kept_with_the_counts_of_the_data() -> None:
    vocab = keep_vocab(torch.tensor([4, 0, 7, 1, 0]), torch.tensor([1, 2, 3]))
    assert vocab.target_ids.tolist() == [1, 2, 3]
    assert vocab.t2d.tolist() == [False, True, True, True, False]
    assert vocab.coverage == 8 / 12


def test_an_identity_vocabulary_covers_everything() -> None:
    vocab = keep_vocab(torch.tensor([4, 0, 7]), torch.arange(3))
    assert (vocab.d2t.tolist(), vocab.t2d.all().item(), vocab.coverage) == ([0, 0, 0], True, 1.0)


@pytest.mark.parametrize(
    ("counts", "ids", "message"),
    [
        ([1, 1], [0, 2], "ascending target ids below 2, got 0 to 2"),
        ([1, 1, 1], [1, 0], "ascending target ids below 3, got 0 to 1"),
        ([0, 0], [0, 1], "needs supervised tokens, got none"),
    ],
)
def test_an_initial_vocabulary_that_does_not_fit_is_refused(
    counts: list[int], ids: list[int], message: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        keep_vocab(torch.tensor(counts), torch.tensor(ids))
