"""Token shards: rows are read as written, digests depend on content alone, and damage is named."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle3.files import digest_of
from eagle3.shards.tokens import TokenRow, read_token_shard, row_digest, summarise_rows, write_token_shard
from tests.helpers.shard_files import token_rows


@settings(max_examples=30, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.text(st.characters(exclude_categories=["Cs"]), max_size=5),
            st.lists(st.tuples(st.integers(0, 2**31 - 1), st.booleans()), max_size=9),
        ),
        min_size=1,
        max_size=5,
    )
)
def test_token_rows_are_read_as_they_were_written(
    tmp_path_factory: pytest.TempPathFactory, drawn: list[Any]
) -> None:
    rows = [TokenRow(name, name[::-1], [t for t, _ in pairs], [m for _, m in pairs]) for name, pairs in drawn]
    path = tmp_path_factory.mktemp("shard") / "a.parquet"
    summary = write_token_shard(path, rows)
    assert read_token_shard(path) == rows
    assert summary == summarise_rows(rows) == summarise_rows(read_token_shard(path))
    assert (summary.rows, summary.tokens) == (len(rows), sum(len(r.token_ids) for r in rows))
    assert summary.supervised_tokens == sum(sum(r.loss_mask) for r in rows)


def test_token_shard_digest_is_independent_of_path_and_run(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    digests = {
        write_token_shard(tmp_path / name, token_rows()).digest
        for name in ("a.parquet", "b/c.parquet", "a.parquet")
    }
    assert len(digests) == 1
    assert sorted(p.name for p in tmp_path.rglob("*.parquet*")) == ["a.parquet", "c.parquet"]


def test_every_part_of_a_row_and_the_order_of_rows_change_the_digest() -> None:
    base = [TokenRow("a", "s", [1, 2], [False, True]), TokenRow("b", "s", [3], [True])]
    changed = [
        [TokenRow("x", "s", [1, 2], [False, True]), base[1]],
        [TokenRow("a", "x", [1, 2], [False, True]), base[1]],
        [TokenRow("a", "s", [1, 9], [False, True]), base[1]],
        [TokenRow("a", "s", [1, 2], [True, True]), base[1]],
        base[::-1],
        base[:1],
    ]
    assert len({summarise_rows(rows).digest for rows in [base, *changed]}) == len(changed) + 1


def test_digests_keep_parts_apart() -> None:
    assert digest_of("ab", "c") != digest_of("a", "bc") != digest_of("abc")
    assert digest_of("a") == digest_of(b"a")
    assert row_digest(TokenRow("ab", "c", [], [])) != row_digest(TokenRow("a", "bc", [], []))


def test_ids_and_flags_of_different_lengths_name_the_row() -> None:
    with pytest.raises(ValueError, match="row a: 2 token ids but 1 mask flags; they must pair up"):
        TokenRow("a", "s", [1, 2], [True])


def test_a_token_shard_without_rows_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"at least one row, got none for .*a\.parquet; check what was dropped"
    ):
        write_token_shard(tmp_path / "a.parquet", [])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("keep", [0, 3, 100, -200, -9, -1])
def test_a_truncated_token_shard_is_named(tmp_path: Path, keep: int) -> None:
    path = tmp_path / "a.parquet"
    write_token_shard(path, token_rows())
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(
        ValueError, match=r"a\.parquet is not a readable token shard .*; delete it and run again"
    ):
        read_token_shard(path)


def test_a_damaged_token_shard_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    write_token_shard(path, token_rows())
    data = path.read_bytes()
    path.write_bytes(data[:4] + b"\xff" * 200 + data[204:])
    with pytest.raises(ValueError, match=r"a\.parquet is not a readable token shard"):
        read_token_shard(path)


def test_a_parquet_file_with_other_columns_is_named(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": ["Hi"]}), path)
    with pytest.raises(ValueError, match=r"a\.parquet is not a readable token shard"):
        read_token_shard(path)
