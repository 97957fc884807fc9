"""The two shard formats, written and read: token shards (Parquet) and hidden-state shards (safetensors chunks).

**Token shard.** One Parquet file, one row a conversation: `sample_id` string (hash of its content), `source` string,
`token_ids` list<int32>, `loss_mask` list<bool> (True where the target wrote the token). Prompts that wait for an answer have an
all-False mask.

**Hidden-state shard.** A directory of `chunk-00000.safetensors` … and `manifest.json`, written last: no manifest, no shard. A
chunk lays its rows' tokens end to end:

    token_ids       [T] int32        loss_mask  [T] bool
    row_offsets     [R + 1] int64    row r is [row_offsets[r], row_offsets[r + 1])
    aux             [T, A, H]        residual stream after each of the A aux layers, storage dtype
    last            [M, H]           last hidden state, before the final norm, only where a loss needs it:
    last_positions  [M] int64        positions q with loss_mask[q] and loss_mask[q + 1] in one row, ascending

`sample_ids` stand in the manifest. Digests hash content, never paths: the same rows give the same digest anywhere. A hidden-state
shard's digest covers its token rows and everything that decides the states (`info`: target, layers, engine, versions), not their
bytes: the last bits of a state depend on which rows the engine happened to batch.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

FORMAT_VERSION = 1
MANIFEST_NAME = "manifest.json"
BYTES_PER_ELEMENT = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class TokenRow:
    """One conversation.

    sample_id: hash of the source row's content. source: name of the source. token_ids: T target token ids.
    loss_mask: T flags, True where the target wrote the token.
    """

    sample_id: str
    source: str
    token_ids: list[int]
    loss_mask: list[bool]

    def __post_init__(self) -> None:
        if len(self.token_ids) != len(self.loss_mask):
            raise ValueError(
                f"row {self.sample_id}: {len(self.token_ids)} token ids but {len(self.loss_mask)} mask flags; they must pair up"
            )


@dataclass(frozen=True)
class TokenShardSummary:
    """Counts and content digest of a token shard."""

    rows: int
    tokens: int
    supervised_tokens: int
    digest: str


@dataclass(frozen=True)
class HiddenStateRow:
    """One conversation with its states.

    token_ids: [T] int64. loss_mask: [T] bool. aux: [T, A, H] storage dtype. last: [M, H] storage dtype, the last hidden state
    before the final norm. last_positions: [M] int64, the row positions q of `last`, ascending.
    """

    sample_id: str
    token_ids: Tensor
    loss_mask: Tensor
    aux: Tensor
    last: Tensor
    last_positions: Tensor


def digest_of(*parts: str | bytes) -> str:
    """SHA-256 over the parts, each preceded by its length, as 32 hex digits."""
    sha = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        sha.update(len(data).to_bytes(8, "little"))
        sha.update(data)
    return sha.hexdigest()[:32]


def row_digest(row: TokenRow) -> str:
    """Content digest of one row; the order of rows matters to a shard, not to a row."""
    ids = torch.tensor(row.token_ids, dtype=torch.int32).numpy().tobytes()
    return digest_of(row.sample_id, row.source, ids, bytes(row.loss_mask))


def summarise_rows(rows: Iterable[TokenRow]) -> TokenShardSummary:
    """Count rows and hash them in order."""
    digests, tokens, supervised = [], 0, 0
    for row in rows:
        digests.append(row_digest(row))
        tokens += len(row.token_ids)
        supervised += sum(row.loss_mask)
    return TokenShardSummary(len(digests), tokens, supervised, digest_of(*digests))


def write_token_shard(path: str | Path, rows: list[TokenRow]) -> TokenShardSummary:
    """Write rows to a Parquet file, whole or not at all.

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
        }
    )
    part = f"{path}.part"
    pq.write_table(table, part, compression="zstd")
    Path(part).replace(path)
    return summarise_rows(rows)


def read_token_shard(path: str | Path) -> list[TokenRow]:
    """Read the rows of a token shard, in order.

    Raises:
        ValueError: if the file is not a token shard; names the file.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        columns = pq.read_table(path, columns=["sample_id", "source", "token_ids", "loss_mask"]).to_pydict()
    except (pa.ArrowException, OSError, KeyError) as e:
        raise ValueError(f"{path} is not a readable token shard ({e}); delete it and run again") from e
    return [TokenRow(*values) for values in zip(*columns.values(), strict=True)]


def last_state_positions(loss_mask: Tensor) -> Tensor:
    """Positions whose last hidden state some loss needs: q with loss_mask[q] and loss_mask[q + 1].

    Args:
        loss_mask: [T] bool of one row.

    Returns:
        [M] int64, ascending.
    """
    return torch.nonzero(loss_mask[:-1] & loss_mask[1:]).flatten()


def hidden_state_bytes(tokens: int, supervised_tokens: int, num_aux: int, hidden_size: int, dtype: str) -> int:
    """Upper bound of a shard's size on disk, bytes: what to compare with the free space before the engine starts."""
    per_state = hidden_size * BYTES_PER_ELEMENT[dtype]
    return tokens * (num_aux * per_state + 5) + supervised_tokens * (per_state + 8)


class HiddenStateWriter:
    """Writes one hidden-state shard chunk by chunk; `close` writes the manifest, and only then is it a shard.

    Rows must come in shard order. `info` goes into the manifest as it is: target, revision, layer ids, engine version.
    """

    def __init__(self, shard_dir: str | Path, storage_dtype: str, chunk_bytes: int, info: dict[str, Any]) -> None:
        self.dir = Path(shard_dir)
        self.dir.mkdir(parents=True, exist_ok=True)
        self.dtype = cast(torch.dtype, getattr(torch, storage_dtype))
        self.storage_dtype, self.chunk_bytes, self.info = storage_dtype, chunk_bytes, info
        self.pending: list[tuple[TokenRow, Tensor, Tensor, Tensor]] = []
        self.pending_bytes = 0
        self.chunks: list[dict[str, Any]] = []
        self.row_digests: list[str] = []
        self.tokens = self.supervised = 0

    def add(self, row: TokenRow, states: Tensor) -> None:
        """Append one row.

        Args:
            row: the conversation.
            states: [T, A + 1, H] any float dtype: A aux states in ascending layer order, then the last hidden state.

        Raises:
            ValueError: on a wrong length, a non-finite or an all-zero state; names the row.
        """
        if states.shape[0] != len(row.token_ids):
            raise ValueError(
                f"row {row.sample_id}: {len(row.token_ids)} tokens but {states.shape[0]} states; the engine lost some"
            )
        stored = states.to(self.dtype)
        if not torch.isfinite(stored).all() or not stored.float().abs().amax(-1).gt(0).all():
            raise ValueError(
                f"{self.dir}: row {row.sample_id} has a zero or non-finite hidden state in {self.storage_dtype}; "
                "if the row is sound, set extract.storage_dtype to bfloat16 or float32"
            )
        mask = torch.tensor(row.loss_mask, dtype=torch.bool)
        positions = last_state_positions(mask)
        aux, last = stored[:, :-1].contiguous(), stored[positions, -1].contiguous()
        self.pending.append((row, aux, last, positions))
        self.pending_bytes += aux.nbytes + last.nbytes
        self.row_digests.append(row_digest(row))
        self.tokens += len(row.token_ids)
        self.supervised += sum(row.loss_mask)
        if self.pending_bytes >= self.chunk_bytes:
            self._write_chunk()

    def _write_chunk(self) -> None:
        rows = [p[0] for p in self.pending]
        lengths = torch.tensor([0] + [len(r.token_ids) for r in rows])
        offsets = lengths.cumsum(0)
        tensors = {
            "token_ids": torch.tensor([t for r in rows for t in r.token_ids], dtype=torch.int32),
            "loss_mask": torch.tensor([m for r in rows for m in r.loss_mask], dtype=torch.bool),
            "row_offsets": offsets,
            "aux": torch.cat([p[1] for p in self.pending]),
            "last": torch.cat([p[2] for p in self.pending]),
            "last_positions": torch.cat([p[3] + offsets[i] for i, p in enumerate(self.pending)]),
        }
        name = f"chunk-{len(self.chunks):05d}.safetensors"
        part = self.dir / f"{name}.part"
        save_file(tensors, part)
        part.replace(self.dir / name)
        self.chunks.append({"file": name, "sample_ids": [r.sample_id for r in rows], "bytes": (self.dir / name).stat().st_size})
        self.pending, self.pending_bytes = [], 0

    def close(self) -> dict[str, Any]:
        """Write the last chunk and the manifest; returns the manifest."""
        if self.pending:
            self._write_chunk()
        if not self.chunks:
            raise ValueError(f"{self.dir}: a hidden-state shard needs at least one row")
        manifest = {
            "format_version": FORMAT_VERSION,
            "storage_dtype": self.storage_dtype,
            "rows": len(self.row_digests),
            "tokens": self.tokens,
            "supervised_tokens": self.supervised,
            "bytes": sum(c["bytes"] for c in self.chunks),
            "digest": digest_of(
                str(FORMAT_VERSION), *self.row_digests, self.storage_dtype, json.dumps(self.info, sort_keys=True)
            ),
            "info": self.info,
            "chunks": self.chunks,
        }
        part = self.dir / f"{MANIFEST_NAME}.part"
        part.write_text(json.dumps(manifest, indent=1))
        part.replace(self.dir / MANIFEST_NAME)
        return manifest


def read_manifest(shard_dir: str | Path) -> dict[str, Any]:
    """Read and check a hidden-state shard's manifest.

    Raises:
        ValueError: if it is missing, unreadable, of another format version, or names a chunk file that is gone or cut short.
    """
    path = Path(shard_dir) / MANIFEST_NAME
    try:
        manifest = cast(dict[str, Any], json.loads(path.read_text()))
        version = manifest["format_version"]
    except FileNotFoundError as e:
        raise ValueError(f"{path} is missing: the shard was not finished; delete the directory and run again") from e
    except (ValueError, KeyError, TypeError) as e:
        raise ValueError(f"{path} is not a manifest ({e}); delete the directory and run again") from e
    if version != FORMAT_VERSION:
        raise ValueError(
            f"{path} has format version {version}, this reader reads {FORMAT_VERSION}; extract again or update eagle3"
        )
    for chunk in manifest["chunks"]:
        file = path.parent / Path(chunk["file"]).name
        size = file.stat().st_size if file.exists() else -1
        if size != chunk["bytes"]:
            raise ValueError(f"{file}: {chunk['bytes']} bytes expected, {size} found; delete the directory and run again")
    return manifest


class HiddenStateReader:
    """Random access to the rows of a finished shard; chunks are memory-mapped, only what is asked for is read.

    lengths: tokens of every row. sample_ids: their ids. manifest: the manifest.
    """

    def __init__(self, shard_dir: str | Path) -> None:
        self.manifest = read_manifest(shard_dir)
        self.lengths: list[int] = []
        self.sample_ids: list[str] = []
        self.where: list[tuple[int, int]] = []
        self.chunks: list[Any] = []
        self.offsets: list[Tensor] = []
        for number, chunk in enumerate(self.manifest["chunks"]):
            path = Path(shard_dir) / Path(chunk["file"]).name
            try:
                file = safe_open(path, framework="pt")
            except SafetensorError as e:
                raise ValueError(f"{path} is not a readable chunk ({e}); delete the directory and run again") from e
            offsets = file.get_tensor("row_offsets")
            self.chunks.append(file)
            self.offsets.append(offsets)
            self.lengths += offsets.diff().tolist()
            self.sample_ids += chunk["sample_ids"]
            self.where += [(number, r) for r in range(len(chunk["sample_ids"]))]

    def row(self, index: int) -> HiddenStateRow:
        """Read row `index`, in shard order."""
        number, r = self.where[index]
        file, offsets = self.chunks[number], self.offsets[number]
        start, stop = int(offsets[r]), int(offsets[r + 1])
        positions = file.get_tensor("last_positions")
        m0, m1 = torch.searchsorted(positions, torch.tensor([start, stop])).tolist()
        return HiddenStateRow(
            self.sample_ids[index],
            file.get_slice("token_ids")[start:stop].long(),
            file.get_slice("loss_mask")[start:stop],
            file.get_slice("aux")[start:stop],
            file.get_slice("last")[m0:m1],
            positions[m0:m1] - start,
        )


def read_hidden_states(shard_dir: str | Path) -> Iterator[HiddenStateRow]:
    """Stream all rows of a hidden-state shard in order."""
    reader = HiddenStateReader(shard_dir)
    for index in range(len(reader.lengths)):
        yield reader.row(index)
