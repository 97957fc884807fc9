"""Rows are cut into frames and chunks; equal content makes equal files and digests."""

import itertools
import random
from pathlib import Path
from typing import Any

import pytest

from eagle3.config.engine import ExtractConfig
from eagle3.shards import writer as hidden_state_writer
from eagle3.shards.chunks import plan_chunks, row_bytes
from eagle3.shards.encoding import STORED_DTYPE
from eagle3.shards.tokens import TokenRow
from tests.helpers.shard_files import token_rows
from tests.helpers.writers import CFG, HIDDEN, INFO, NUM_AUX, ROWS, files_of, finish, open_writer


@pytest.mark.parametrize("seed", range(20))
def test_chunks_and_frames_end_with_the_row_that_fills_them(seed: int) -> None:
    generator = random.Random(seed)
    sizes = [generator.randint(1, 60) for _ in range(generator.randint(1, 40))]
    chunk_bytes = generator.randint(1, 500)
    chunks = plan_chunks(sizes, chunk_bytes)
    assert [row for frames in chunks for frame in frames for row in frame] == list(range(len(sizes)))
    for frames in chunks:
        whole = list(itertools.chain(*frames))
        assert sum(sizes[r] for r in whole[:-1]) < chunk_bytes
        assert sum(sizes[r] for r in whole) >= chunk_bytes or frames is chunks[-1]
        for frame in frames:
            assert sum(sizes[r] for r in frame[:-1]) < min(100, chunk_bytes)
            assert sum(sizes[r] for r in frame) >= min(100, chunk_bytes) or frame is frames[-1]


@pytest.mark.parametrize("encoding", sorted(STORED_DTYPE))
def test_size_is_known_before_compression(tmp_path: Path, encoding: str) -> None:
    rows = token_rows(["0" * 40 + "1" * 60] * 7)
    cfg = ExtractConfig(encoding=encoding, compression="none", chunk_bytes=1 << 20)
    manifest = finish(open_writer(tmp_path, rows, cfg))
    bound = sum(row_bytes(row, NUM_AUX, HIDDEN, encoding) for row in rows)
    # The header and the row offsets, which the estimate leaves out.
    assert bound < manifest["bytes"] < bound + 1024


def test_equal_content_makes_equal_files_with_any_threads_and_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, uninterrupted: tuple[dict[str, Any], dict[str, str]]
) -> None:
    for threads, order in ((1, None), (4, random.Random(0).shuffle), (4, list.reverse)):
        monkeypatch.setattr(hidden_state_writer, "ENCODE_THREADS", threads)
        out = tmp_path / f"{threads}-{order}"
        assert (finish(open_writer(out), order), files_of(out)) == uninterrupted


def test_digest_depends_on_content_and_settings_not_on_how_it_is_stored(tmp_path: Path) -> None:
    def digest(rows: list[TokenRow] = ROWS, info: dict[str, Any] = INFO, **changed: Any) -> str:
        out = tmp_path / str(len(list(tmp_path.iterdir())))
        return str(finish(open_writer(out, rows, CFG.model_copy(update=changed), info=info))["digest"])

    same = [
        digest(),
        digest(),
        digest(compression="none"),
        digest(chunk_bytes=1),
        digest(info=dict(reversed(INFO.items()))),
    ]
    assert len(set(same)) == 1
    changed = [
        digest(ROWS[1:]),
        digest(ROWS[::-1]),
        digest(encoding="fp8"),
        digest(encoding="fp32"),
        digest(info={**INFO, "layer_ids": [1, 2, 4]}),
    ]
    assert len({same[0], *changed}) == 6


def test_a_shard_without_rows_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError,
        match=r"out: a hidden-state shard needs at least one row, got none; check what was dropped",
    ):
        open_writer(tmp_path / "out", [])
    assert list(tmp_path.iterdir()) == []
