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

The manifest is JSON: the format version, counts, `info`, and for each chunk {file, sample_ids, lengths, bytes, sha256}: ids and
numbers of tokens of its rows in order, size and SHA-256 (64 hex digits) of the file. So a run is planned from manifests alone,
and whoever opens a chunk first checks all of it. Version 1 had neither lengths nor sha256.

Digests hash content, never paths: the same rows give the same digest anywhere. A hidden-state
shard's digest covers its token rows and everything that decides the states (`info`: target, layers, engine, versions), not their
bytes: the last bits of a state depend on which rows the engine happened to batch.
"""

import hashlib
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, cast

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

FORMAT_VERSION = 2
MANIFEST_NAME = "manifest.json"
CHUNK_NAME = re.compile(r"chunk-\d+\.safetensors")
SHA256 = re.compile(r"[0-9a-f]{64}")
BYTES_PER_ELEMENT = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class TokenRow:
    """One conversation.

    sample_id: opening:content, hashes of the conversation's first user text and of all of it. source: name of the source.
    token_ids: T target token ids. loss_mask: T flags, True where the target wrote the token.
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


def file_sha256(path: str | Path) -> str:
    """SHA-256 of a file's bytes, 64 hex digits."""
    with open(path, "rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


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
        entry = {
            "file": name,
            "sample_ids": [r.sample_id for r in rows],
            "lengths": [len(r.token_ids) for r in rows],
            "bytes": part.stat().st_size,
            "sha256": file_sha256(part),
        }
        part.replace(self.dir / name)
        self.chunks.append(entry)
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


def parse_manifest(text: str | bytes | None, path: str | Path) -> dict[str, Any]:
    """Check the text of a hidden-state shard's manifest.

    Args:
        text: what the file holds; None where there is no such file.
        path: path or URL for messages.

    Raises:
        ValueError: if it is missing, unreadable or of another format version.
    """
    if text is None:
        raise ValueError(f"{path} is missing: the shard was not finished; delete the directory and run again")
    try:
        manifest = cast(dict[str, Any], json.loads(text))
        version = manifest["format_version"]
        if version == FORMAT_VERSION:
            for chunk in manifest["chunks"]:
                _check_entry(chunk)
            lengths = [n for chunk in manifest["chunks"] for n in chunk["lengths"]]
            found, said = (len(lengths), sum(lengths)), (manifest["rows"], manifest["tokens"])
            if found != said:
                raise ValueError(f"its chunks hold {found[0]} rows and {found[1]} tokens, it says {said[0]} and {said[1]}")
    except (ValueError, KeyError, TypeError) as e:
        raise ValueError(f"{path} is not a manifest ({e}); delete the directory and run again") from e
    if version != FORMAT_VERSION:
        raise ValueError(
            f"{path} has format version {version}, this reader reads {FORMAT_VERSION}; extract again or update eagle3"
        )
    return manifest


def _check_entry(chunk: dict[str, Any]) -> None:
    # Names become paths on the reader's disk: nothing but a chunk's own name may come through.
    chunk["file"] = Path(chunk["file"]).name
    if not CHUNK_NAME.fullmatch(chunk["file"]) or not SHA256.fullmatch(chunk["sha256"]) or int(chunk["bytes"]) < 0:
        raise ValueError(f"no chunk is described by file {chunk['file']!r}, sha256 {chunk['sha256']!r}, bytes {chunk['bytes']!r}")
    if min(chunk["lengths"], default=0) < 1:
        raise ValueError(f"{chunk['file']} must have rows of at least one token")
    if len(chunk["lengths"]) != len(chunk["sample_ids"]):
        raise ValueError(f"{chunk['file']} has {len(chunk['lengths'])} lengths but {len(chunk['sample_ids'])} sample ids")


def read_manifest(shard_dir: str | Path) -> dict[str, Any]:
    """Read and check a hidden-state shard's manifest, and the sizes of its chunk files.

    Raises:
        ValueError: if it is missing, unreadable, of another format version, or names a chunk file that is gone or cut short.
    """
    path = Path(shard_dir) / MANIFEST_NAME
    manifest = parse_manifest(path.read_bytes() if path.exists() else None, path)
    for chunk in manifest["chunks"]:
        file = path.parent / chunk["file"]
        check_chunk_size(file.stat().st_size if file.exists() else None, chunk, file)
    return manifest


def check_chunk_size(size: int | None, entry: dict[str, Any], name: str | Path) -> None:
    """Compare a chunk file's size, bytes, None if there is none, with its manifest entry; `name` is its path or URL.

    Raises:
        ValueError: if they differ.
    """
    if size != entry["bytes"]:
        _damaged(name, f"{entry['bytes']} bytes", "no file" if size is None else f"{size} bytes")


def _damaged(name: str | Path, expected: str, found: str) -> NoReturn:
    shard = str(name).rpartition("/")[0]
    raise ValueError(f"{name}: {expected} expected, {found} found; the shard {shard} is damaged: delete it and run again")


class ChunkReader:
    """The rows of one chunk file by number, memory-mapped: only what is asked for is read, after one check of the whole file.

    Rows are views of the mapped file: copy what has to outlive it.
    """

    def __init__(self, path: str | Path, entry: dict[str, Any], name: str = "", is_checked: bool = False) -> None:
        """Open and check a chunk file.

        Args:
            path: the file.
            entry: its entry in the manifest.
            name: what messages call it, where it is a copy of something else.
            is_checked: this process has found its content sound before.

        Raises:
            ValueError: if size or content are not those of the manifest.
        """
        name = name or str(path)
        check_chunk_size(Path(path).stat().st_size if Path(path).exists() else None, entry, name)
        if not is_checked and (found := file_sha256(path)) != entry["sha256"]:
            _damaged(name, f"sha256 {entry['sha256']}", found)
        self.sample_ids: list[str] = entry["sample_ids"]
        self.file: Any = safe_open(path, framework="pt")
        self.offsets: list[int] = self.file.get_tensor("row_offsets").tolist()
        self.last_positions: Tensor = self.file.get_tensor("last_positions")

    def row(self, index: int) -> HiddenStateRow:
        """Read row `index` of the chunk."""
        start, stop = self.offsets[index], self.offsets[index + 1]
        m0, m1 = torch.searchsorted(self.last_positions, torch.tensor([start, stop])).tolist()
        return HiddenStateRow(
            self.sample_ids[index],
            self.file.get_slice("token_ids")[start:stop].long(),
            self.file.get_slice("loss_mask")[start:stop],
            self.file.get_slice("aux")[start:stop],
            self.file.get_slice("last")[m0:m1],
            self.last_positions[m0:m1] - start,
        )


class HiddenStateReader:
    """Random access to the rows of a finished shard on the local disk; a chunk is opened and checked when first read.

    lengths: tokens of every row. sample_ids: their ids. manifest: the manifest.
    """

    def __init__(self, shard_dir: str | Path) -> None:
        self.dir = Path(shard_dir)
        self.manifest = read_manifest(shard_dir)
        chunks = self.manifest["chunks"]
        self.lengths: list[int] = [n for chunk in chunks for n in chunk["lengths"]]
        self.sample_ids: list[str] = [i for chunk in chunks for i in chunk["sample_ids"]]
        self.where = [(number, r) for number, chunk in enumerate(chunks) for r in range(len(chunk["lengths"]))]
        self.opened: dict[int, ChunkReader] = {}

    def row(self, index: int) -> HiddenStateRow:
        """Read row `index`, in shard order.

        Raises:
            ValueError: if its chunk is damaged.
        """
        number, r = self.where[index]
        if number not in self.opened:
            entry = self.manifest["chunks"][number]
            self.opened[number] = ChunkReader(self.dir / entry["file"], entry)
        return self.opened[number].row(r)


def read_hidden_states(shard_dir: str | Path) -> Iterator[HiddenStateRow]:
    """Stream all rows of a hidden-state shard in order."""
    reader = HiddenStateReader(shard_dir)
    for index in range(len(reader.lengths)):
        yield reader.row(index)
