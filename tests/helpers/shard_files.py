"""Rows, their states and hidden-state shards for tests and benchmarks."""

from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eagle3.config.engine import ExtractConfig
from eagle3.shards.hidden_states import ChunkReader, HiddenStateRow, read_manifest
from eagle3.shards.tokens import TokenRow
from eagle3.shards.writer import HiddenStateWriter

# Odd sizes, one token, nothing supervised, everything supervised, two turns.
MASKS = ["0", "1", "0111011", "000", "11", "0110"]


def token_rows(masks: list[str] = MASKS) -> list[TokenRow]:
    """Rows id-0, id-1 … with these loss masks; all their tokens differ while masks have at most ten."""
    return [
        TokenRow(f"id-{i}", "train", [10 * i + p for p in range(len(m))], [c == "1" for c in m])
        for i, m in enumerate(masks)
    ]


def states_of(row: TokenRow, num_aux: int, hidden_size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """States [T, A + 1, H], the same in every call."""
    generator = torch.Generator().manual_seed(len(row.token_ids) + row.token_ids[0])
    return torch.randn(len(row.token_ids), num_aux + 1, hidden_size, generator=generator).to(dtype)


def open_rows(shard_dir: Path) -> list[Callable[[], HiddenStateRow]]:
    """For every row of a shard a function that reads it."""
    readers = [ChunkReader(shard_dir / entry["file"], entry) for entry in read_manifest(shard_dir)["chunks"]]
    return [partial(reader.row, index) for reader in readers for index in range(len(reader.sample_ids))]


def write_hidden_states(
    shard_dir: Path,
    rows: list[TokenRow],
    states: Iterable[Tensor],
    chunk_bytes: int,
    info: dict[str, Any],
    **storage: Any,
) -> dict[str, Any]:
    """Write one shard and return its manifest.

    Args:
        states: of each row, [T, A + 1, H].
        storage: encoding and compression; by default fp32 without compression.
    """
    cfg = ExtractConfig(**{"encoding": "fp32", "compression": "none", "chunk_bytes": chunk_bytes} | storage)
    writer = None
    for i, of_row in enumerate(states):
        writer = writer or HiddenStateWriter(shard_dir, rows, of_row.shape[1] - 1, of_row.shape[2], cfg, info)
        writer.add(i, of_row)
    assert writer is not None
    return writer.close()
