"""Shards of many small chunks, and the reading of them pack by pack."""

import itertools
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from eagle3.draft.batch import PackedBatch
from eagle3.shards.tokens import TokenRow
from eagle3.training import chunk_cache
from eagle3.training.loader import ShardRows, plan_packs, read_packs
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


def plan(rows: ShardRows, epochs: int = 1, shuffle_chunks: int = 3) -> list[list[int]]:
    every = list(range(len(rows.lengths)))
    plans = [
        plan_packs(rows.lengths, rows.chunk_of, every, PACK_TOKENS, 0, epoch, shuffle_chunks)
        for epoch in range(epochs)
    ]
    return list(itertools.chain(*plans))


def chunk_bytes(rows: ShardRows) -> list[int]:
    """Size of every chunk file."""
    return [chunk.entry["bytes"] for chunk in rows.cache.chunks]


def assert_same(batches: list[PackedBatch], expected: list[PackedBatch]) -> None:
    assert [b.sample_ids for b in batches] == [b.sample_ids for b in expected]
    for batch, other in zip(batches, expected, strict=True):
        for name, value in vars(other).items():
            assert torch.equal(getattr(batch, name), value) if isinstance(value, torch.Tensor) else True, name


def read(rows: ShardRows, packs: list[list[int]]) -> list[PackedBatch]:
    return list(read_packs(rows, packs, PACK_TOKENS, STEPS))


def threads_of_the_loader() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith(("read-packs", "fetch-chunks"))]


def live_bytes(rows: ShardRows, packs: list[list[int]]) -> int:
    """What an epoch has in use at one time, counted pack by pack."""
    most = 0
    for place in range(len(packs)):
        before, after = (
            {rows.chunk_of[r] for pack in part for r in pack} for part in (packs[: place + 1], packs[place:])
        )
        most = max(most, sum(chunk_bytes(rows)[c] for c in before & after))
    return most


class Watch:
    """Counts fetches, and measures a directory at each and between them.

    reads_maps: looks for deleted files that this process still maps, too; the system takes milliseconds to list them.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, cache_dir: Path, reads_maps: bool = False) -> None:
        self.urls: list[str] = []
        self.most = 0
        self.lost: list[str] = []
        self.dir, self.reads_maps = cache_dir, reads_maps
        self.lock = threading.Lock()
        fetch = chunk_cache.fetch

        def watched(chunk: Any, path: Path, stopped: threading.Event) -> None:
            self.measure()
            fetch(chunk, path, stopped)
            self.measure()
            with self.lock:
                self.urls.append(chunk.path)

        monkeypatch.setattr(chunk_cache, "fetch", watched)

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
