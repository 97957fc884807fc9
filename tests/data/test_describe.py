"""Rows described by source against slow loops, and what is written against what is read."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerBase

from eagle3.data.describe import (
    Description,
    describe_rows,
    measure_coverage,
    read_description,
    write_description,
)
from eagle3.shards.tokens import TokenRow
from eagle3.vocab import build_vocab
from tests.helpers.tiny_tokenizer import train_tokenizer

V, END = 400, [2]
TOKENIZER = train_tokenizer()
ROWS = st.lists(
    st.tuples(
        st.sampled_from("abc"),
        st.lists(st.tuples(st.integers(0, 11), st.booleans()), min_size=1, max_size=40),
    ),
    max_size=9,
)


def rows_of(drawn: list[tuple[str, list[tuple[int, bool]]]]) -> list[TokenRow]:
    return [
        TokenRow(f"r{i}", name, [t for t, _ in pairs], [m for _, m in pairs])
        for i, (name, pairs) in enumerate(drawn)
    ]


def described(rows: list[TokenRow], num_samples: int = 8) -> Description:
    return describe_rows(iter(rows), TOKENIZER, V, END, num_samples)


@settings(max_examples=60, deadline=None)
@given(ROWS)
def test_statistics_and_counts_equal_slow_loops(drawn: Any) -> None:
    rows = rows_of(drawn)
    description = described(rows)
    names = list(dict.fromkeys(row.source for row in rows))
    assert list(description.statistics) == names
    assert description.counts.shape == (len(names), V)
    for name, counts in zip(names, description.counts.tolist(), strict=True):
        mine = [row for row in rows if row.source == name]
        supervised = [t for row in mine for t, m in zip(row.token_ids, row.loss_mask, strict=True) if m]
        assert {t: n for t, n in enumerate(counts) if n} == dict(Counter(supervised))
        statistics = description.statistics[name]
        assert (statistics["rows"], statistics["tokens"]) == (
            len(mine),
            sum(len(row.token_ids) for row in mine),
        )
        assert statistics["supervised_tokens"] == len(supervised)
        short = sum(len(row.token_ids) <= 32 for row in mine)
        assert dict(statistics["lengths"]) == {
            size: n for size, n in ((32, short), (64, len(mine) - short)) if n
        }


@settings(max_examples=60, deadline=None)
@given(ROWS, st.integers(1, V))
def test_coverage_by_source_equals_a_slow_loop(drawn: Any, size: int) -> None:
    rows = rows_of(drawn)
    description = described(rows)
    if not description.total.any():
        return
    vocab = build_vocab(description.total, size, END)
    coverage = measure_coverage(description, vocab.t2d)
    kept = set(vocab.target_ids.tolist())
    assert (coverage["size"], coverage["coverage"]) == (size, vocab.coverage)
    for name, (inside, supervised) in coverage["by_source"].items():
        tokens = [
            t
            for row in rows
            if row.source == name
            for t, m in zip(row.token_ids, row.loss_mask, strict=True)
            if m
        ]
        assert (inside, supervised) == (sum(t in kept for t in tokens), len(tokens))
    assert [k for k, _ in coverage["by_size"]] == [1, 2, 4, 8, 16, 32, 64, 128, 256, 400]
    assert all(share == build_vocab(description.total, k, END).coverage for k, share in coverage["by_size"])


def test_samples_are_the_first_row_of_each_source_then_the_second_of_each() -> None:
    rows = [TokenRow(f"{name}{i}", name, [5, 6, 7], [False, True, True]) for name in "abc" for i in range(3)]
    shown = [[s["sample_id"] for s in described(rows, n).samples] for n in (2, 3, 4, 6, 8)]
    assert shown == [
        ["a0", "b0"],
        ["a0", "b0", "c0"],
        ["a0", "a1", "b0", "c0"],
        ["a0", "a1", "b0", "b1", "c0", "c1"],
        ["a0", "a1", "b0", "b1", "c0", "c1"],
    ]


def test_a_sample_shows_the_text_in_runs_of_equal_mask(tokenizer: PreTrainedTokenizerBase) -> None:
    prompt, answer = (
        tokenizer(t, add_special_tokens=False)["input_ids"] for t in ("<|start|>user\nHi", "Hello<|end|>")
    )
    row = TokenRow("o:c", "chats", prompt + answer, [False] * len(prompt) + [True] * len(answer))
    (sample,) = describe_rows([row], tokenizer, V, END, 8).samples
    assert sample == {
        "sample_id": "o:c",
        "source": "chats",
        "tokens": len(row.token_ids),
        "spans": [["<|start|>user\nHi", False], ["Hello<|end|>", True]],
    }


@pytest.mark.parametrize("num_rows", [0, 1, 5])
def test_a_written_description_is_read_back(tmp_path: Path, num_rows: int) -> None:
    written = described(
        [TokenRow(f"r{i}", f'a "{i % 2}"/ü', [3, 4, i], [True, False, True]) for i in range(num_rows)]
    )
    write_description(tmp_path, written)
    read = read_description(tmp_path)
    for name in ("statistics", "samples", "end_of_turn_ids"):
        assert getattr(read, name) == getattr(written, name)
    assert torch.equal(read.counts, written.counts)
