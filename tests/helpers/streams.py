"""Shards of many small chunks, and the reading of them pack by pack."""

import itertools
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from eagle3.draft.batch import PackedBatch
from eagle3.shards.tokens import TokenRow
from eagle3.training import fetch
from eagle3.training.loader import Pack, ShardRows, read_packs
from eagle3.training.schedule import plan_packs
from tests.helpers.shard_files import write_hidden_states

NUM_AUX, HIDDEN = 3, 16
PACK_TOKENS, STEPS = 64, 3
SHARDS, ROWS, CHUNK_BYTES = 2, 60, 10_000


def write_shards(root: Path) -> list[str]:
    """Two shards of about twenty chunks of a few rows each; some rows are longer than a pack."""
    g = torch.Generator().manual_seed(0)
    dirs = []
    for shard in range(SHARDS):
        rows, states = [], []
        for r in range(ROWS):
            length = 80 if r == 7 else int(torch.randint(2, 40, (1,), generator=g))
            mask = (torch.rand(length, generator=g) < 0.7).tolist()
            rows.append(
                TokenRow(f"row-{shard}-{r}", "test", torch.randint(99, (length,), generator=g).tolist(), mask)
            )
            states.append(torch.randn(length, NUM_AUX + 1, HIDDEN, generator=g))
        write_hidden_states(root / f"shard{shard}", rows, states, CHUNK_BYTES, {})
        dirs.append(str(root / f"shard{shard}"))
    return dirs


def file_urls(dirs: list[str]) -> list[str]:
    return [f"file://{d}" for d in dirs]


def plan(rows: ShardRows, epochs: int = 1, shuffle_chunks: int = 3) -> list[Pack]:
    every = list(range(len(rows.lengths)))
    plans = [
        plan_packs(rows.lengths, rows.chunk_of, every, PACK_TOKENS, shuffle_chunks, 0, epoch)
        for epoch in range(epochs)
    ]
    return list(itertools.chain(*plans))


def chunk_bytes(rows: ShardRows) -> list[int]:
    """Size of every chunk file."""
    return [chunk.entry["bytes"] for chunk in rows.files.chunks]


def assert_same(batches: list[PackedBatch], expected: list[PackedBatch]) -> None:
    assert [b.sample_ids for b in batches] == [b.sample_ids for b in expected]
    for batch, other in zip(batches, expected, strict=True):
        for name, value in vars(other).items():
            assert torch.equal(getattr(batch, name), value) if isinstance(value, torch.Tensor) else True, name


def read(rows: ShardRows, packs: list[Pack]) -> list[PackedBatch]:
    return list(read_packs(rows, packs, PACK_TOKENS, STEPS))


def threads_of_the_loader() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith(("read-packs", "fetch-chunks"))]


def chunks_of(rows: ShardRows, packs: list[Pack]) -> set[int]:
    """Numbers of the chunks that packs need."""
    return {rows.chunk_of[row] for pack in packs for row in pack.rows}


def two_groups_bytes(rows: ShardRows, packs: list[Pack]) -> int:
    """The most that the packs of two neighbouring groups need."""
    last = packs[-1].group
    pairs = [[pack for pack in packs if pack.group in (g, g + 1)] for g in range(last + 1)]
    return max(sum(chunk_bytes(rows)[chunk] for chunk in chunks_of(rows, pair)) for pair in pairs)


class Watch:
    """Counts fetches, and measures a directory at each and between them.

    reads_maps: looks for deleted files that this process still maps, too; the system takes milliseconds to
    list them.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, cache_dir: Path, reads_maps: bool = False) -> None:
        self.urls: list[str] = []
        self.most = 0
        self.lost: list[str] = []
        self.dir, self.reads_maps = cache_dir, reads_maps
        self.lock = threading.Lock()
        copy = fetch.fetch

        def watched(chunk: Any, path: Path, stopped: threading.Event) -> None:
            self.measure()
            copy(chunk, path, stopped)
            self.measure()
            with self.lock:
                self.urls.append(chunk.path)

        monkeypatch.setattr(fetch, "fetch", watched)

    def measure(self) -> None:
        total = 0
        for path in self.dir.glob("*"):
            try:
                total += path.stat().st_size
            except FileNotFoundError:
                continue
        with self.lock:
            self.most = max(self.most, total)
            self.lost += deleted_but_mapped(self.dir) if self.reads_maps else []


def deleted_but_mapped(directory: Path) -> list[str]:
    """Files that are gone from a directory and still take disk space, where the system tells."""
    maps = Path("/proc/self/maps")
    lines = maps.read_text().splitlines() if maps.exists() else []
    return [line for line in lines if str(directory) in line and line.endswith("(deleted)")]
