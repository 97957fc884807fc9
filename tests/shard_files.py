"""Hidden-state shards for tests and benchmarks: rows and their states, written in order."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torch import Tensor

from eagle3.config import ExtractConfig
from eagle3.hidden_state_writer import HiddenStateWriter
from eagle3.shards import TokenRow


def write_hidden_states(
    shard_dir: Path, rows: list[TokenRow], states: Iterable[Tensor], chunk_bytes: int, info: dict[str, Any], **storage: Any
) -> dict[str, Any]:
    """Write one shard and return its manifest.

    Args:
        states: of each row, [T, A + 1, H].
        storage: encoding and compression; fp32 without compression where not given.
    """
    cfg = ExtractConfig(**{"encoding": "fp32", "compression": "none", "chunk_bytes": chunk_bytes} | storage)
    writer = None
    for i, of_row in enumerate(states):
        writer = writer or HiddenStateWriter(shard_dir, rows, of_row.shape[1] - 1, of_row.shape[2], cfg, info)
        writer.add(i, of_row)
    assert writer is not None
    return writer.close()
