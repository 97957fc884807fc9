"""Writers of small shards, and their files."""

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec

from eagle3.config.engine import ExtractConfig
from eagle3.shards.tokens import TokenRow
from eagle3.shards.writer import HiddenStateWriter
from tests.helpers.shard_files import states_of, token_rows

NUM_AUX, HIDDEN = 3, 5
INFO = {"target": "tiny", "layer_ids": [1, 2, 3]}
# Eight rows of different lengths in four chunks of two frames.
ROWS = token_rows(["0111011", "11111", "0110000111", "011111"] * 2)
CFG = ExtractConfig(encoding="bf16", compression="zstd", chunk_bytes=410)
NUM_CHUNKS = 4

BIG_ROWS = [
    TokenRow(f"big-{i}", "train", list(range(1000 * i, 1000 * i + 3000)), [True] * 3000) for i in range(8)
]
# 160 KB a row, 320 KB a chunk: four take 1.3 of 2 MiB.
BIG = {"rows": BIG_ROWS, "cfg": ExtractConfig(encoding="bf16", compression="none", chunk_bytes=200_000)}


def open_writer(
    out: Path | str, rows: list[TokenRow] = ROWS, cfg: ExtractConfig = CFG, **more: Any
) -> HiddenStateWriter:
    return HiddenStateWriter(out, rows, NUM_AUX, HIDDEN, cfg, **({"info": INFO} | more))


def missing_rows(writer: HiddenStateWriter) -> list[int]:
    """Rows of the chunks that are not finished, in order."""
    return [
        r
        for number, frames in enumerate(writer.plan)
        if number not in writer.entries
        for frame in frames
        for r in frame
    ]


def finish(writer: HiddenStateWriter, order: Callable[[list[int]], Any] | None = None) -> dict[str, Any]:
    """Add the missing rows and close."""
    missing = missing_rows(writer)
    if order is not None:
        order(missing)
    try:
        for row in missing:
            writer.add(row, states_of(writer.rows[row], NUM_AUX, HIDDEN))
        return writer.close()
    finally:
        writer.stop()


def leave_unfinished(out: Path | str, num_chunks: int = 2, **more: Any) -> None:
    """Write some chunks and stop."""
    writer = open_writer(out, **more)
    for row in range(2 * num_chunks):
        writer.add(row, states_of(writer.rows[row], NUM_AUX, HIDDEN))
    writer.stop()


def files_of(out: Path | str) -> dict[str, str]:
    """SHA-256 of every file by its name."""
    store, root = fsspec.core.url_to_fs(str(out))
    store.invalidate_cache()
    return {
        path.removeprefix(f"{root}/"): hashlib.sha256(store.cat_file(path)).hexdigest()
        for path in store.find(root)
    }
