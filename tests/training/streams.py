"""Shards of many small chunks, and the reading of them pack by pack."""

import itertools
import threading
from pathlib import Path

import torch

from eagle3.batch import PackedBatch
from eagle3.shards import TokenRow
from eagle3.training.loader import ShardRows, plan_packs, read_packs
from tests.shard_files import write_hidden_states

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
            rows.append(TokenRow(f"row-{shard}-{r}", "test", torch.randint(99, (length,), generator=g).tolist(), mask))
            states.append(torch.randn(length, NUM_AUX + 1, HIDDEN, generator=g))
        write_hidden_states(root / f"shard{shard}", rows, states, CHUNK_BYTES, {})
        dirs.append(str(root / f"shard{shard}"))
    return dirs


def file_urls(dirs: list[str]) -> list[str]:
    return [f"file://{d}" for d in dirs]


def plan(rows: ShardRows, epochs: int = 1, shuffle_chunks: int = 3) -> list[list[int]]:
    every = list(range(len(rows.lengths)))
    plans = [plan_packs(rows.lengths, rows.chunk_of, every, PACK_TOKENS, 0, epoch, shuffle_chunks) for epoch in range(epochs)]
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
