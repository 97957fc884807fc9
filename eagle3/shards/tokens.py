"""Token shards: conversations as token ids with a loss mask, and the digests that name them.

One Parquet file, one row per conversation: `sample_id` string (hash of its content), `source` string,
`token_ids` list<int32>, `loss_mask` list<bool> (True where the target wrote the token), `script` string. A
prompt that waits for an answer has an all-False mask; its `script` tells how the conversation continues
(eagle3/data/script.py), "" if it ends with one answer. Digests hash content, never paths.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from eagle3.files import atomic_path, digest_of

HELDOUT_NAME = "heldout.parquet"


@dataclass(frozen=True)
class TokenRow:
    """One conversation; the fields are the columns of a token shard.

    sample_id: opening:content, hashes of the conversation's first user text and of all of it.
    """

    sample_id: str
    source: str
    token_ids: list[int]
    loss_mask: list[bool]
    script: str = ""

    def __post_init__(self) -> None:
        if len(self.token_ids) != len(self.loss_mask):
            raise ValueError(
                f"row {self.sample_id}: {len(self.token_ids)} token ids but {len(self.loss_mask)} mask "
                "flags; they must pair up"
            )


@dataclass(frozen=True)
class TokenShardSummary:
    """Counts, content digest and source names (sorted) of a token shard."""

    rows: int
    tokens: int
    supervised_tokens: int
    digest: str
    sources: list[str]


def row_digest(row: TokenRow) -> str:
    """Content digest of one row."""
    ids = np.array(row.token_ids, np.int32).tobytes()
    script = [row.script] if row.script else []
    return digest_of(row.sample_id, row.source, ids, bytes(row.loss_mask), *script)


def summarise_rows(rows: Iterable[TokenRow]) -> TokenShardSummary:
    """Count rows, hash them in order, and name their sources."""
    digests: list[str] = []
    sources: set[str] = set()
    tokens = supervised = 0
    for row in rows:
        digests.append(row_digest(row))
        sources.add(row.source)
        tokens += len(row.token_ids)
        supervised += sum(row.loss_mask)
    return TokenShardSummary(len(digests), tokens, supervised, digest_of(*digests), sorted(sources))


def write_token_shard(path: str | Path, rows: list[TokenRow]) -> TokenShardSummary:
    """Write rows to a Parquet file atomically.

    Raises:
        ValueError: if there are no rows.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    if not rows:
        raise ValueError(f"a token shard needs at least one row, got none for {path}; check what was dropped")
    table = pa.table(
        {
            "sample_id": pa.array([r.sample_id for r in rows], pa.string()),
            "source": pa.array([r.source for r in rows], pa.string()),
            "token_ids": pa.array([r.token_ids for r in rows], pa.list_(pa.int32())),
            "loss_mask": pa.array([r.loss_mask for r in rows], pa.list_(pa.bool_())),
            "script": pa.array([r.script for r in rows], pa.string()),
        }
    )
    with atomic_path(path) as part:
        pq.write_table(table, part, compression="zstd")
    return summarise_rows(rows)


def read_token_shard(path: str | Path) -> list[TokenRow]:
    """Read the rows of a token shard, in order.

    Raises:
        ValueError: if the file is not a token shard; names the file.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        columns = pq.read_table(
            path, columns=["sample_id", "source", "token_ids", "loss_mask", "script"]
        ).to_pydict()
    except (pa.ArrowException, OSError, KeyError) as e:
        raise ValueError(f"{path} is not a readable token shard ({e}); delete it and run again") from e
    return [TokenRow(*values) for values in zip(*columns.values(), strict=True)]


def is_tool_task(script: str) -> bool:
    """Whether a row's script offers tools; `script` as in a token shard."""
    return bool(script) and bool(json.loads(script)["tools"])
