"""The chunks of a hidden-state shard that is written: their rows, the finished ones, the staging directory.

The cut into chunks follows from the rows alone, so a later attempt cuts the shard in the same way. A finished
chunk's manifest entry is in `chunk-00003.json` until the manifest collects it: {"digest", "entry"}. The
digest is the shard's, so chunks of other rows or settings are not taken over.
"""

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import gettempdir
from typing import Any

from eagle3.files import digest_of, file_sha256, file_size, is_remote, read_bytes, try_lock
from eagle3.shards.hidden_states import check_entry, hidden_state_bytes, read_manifest
from eagle3.shards.tokens import TokenRow

# Before compression. Short rows share a frame, because rows with a common prefix repeat its states.
FRAME_BYTES = 1 << 20
Frame = list[int]


def row_bytes(row: TokenRow, num_aux: int, hidden_size: int, encoding: str) -> int:
    """Size of a row in a chunk before compression, bytes."""
    last_states = sum(a and b for a, b in zip(row.loss_mask, row.loss_mask[1:], strict=False))
    return hidden_state_bytes(len(row.token_ids), last_states, num_aux, hidden_size, encoding)


def plan_chunks(sizes: list[int], chunk_bytes: int) -> list[list[Frame]]:
    """Cut a shard into chunks of frames. The row that fills a frame ends it, and so does a frame for a chunk.

    Args:
        sizes: of the rows before compression, bytes.
        chunk_bytes: of a chunk.

    Returns:
        For each chunk its frames, lists of row numbers; over the whole shard they count up from 0.
    """
    chunks: list[list[Frame]] = [[[]]]
    frame_size = chunk_size = 0
    for row, size in enumerate(sizes):
        if chunk_size >= chunk_bytes:
            chunks.append([[]])
            frame_size = chunk_size = 0
        elif frame_size >= min(FRAME_BYTES, chunk_bytes):
            chunks[-1].append([])
            frame_size = 0
        chunks[-1][-1].append(row)
        frame_size += size
        chunk_size += size
    return chunks


def entry_uri(out: str, number: int) -> str:
    """The file of a finished chunk's entry until there is a manifest."""
    return f"{out}/chunk-{number:05d}.json"


def finished_entries(out: str, sample_ids: list[list[str]], digest: str) -> dict[int, dict[str, Any]]:
    """Entries of the finished chunks of a shard, by number.

    Args:
        out: directory or URL of the shard.
        sample_ids: of the rows of each chunk, in order.
        digest: of the shard: its rows and settings.
    """
    found = {number: _usable_entry(out, number, ids, digest) for number, ids in enumerate(sample_ids)}
    return {number: entry for number, entry in found.items() if entry is not None}


def _usable_entry(out: str, number: int, sample_ids: list[str], digest: str) -> dict[str, Any] | None:
    text = read_bytes(entry_uri(out, number))
    try:
        sidecar = json.loads(text or b"{}")
        entry: dict[str, Any] = sidecar["entry"]
        check_entry(entry)
        is_same = (sidecar["digest"], entry["sample_ids"]) == (digest, sample_ids)
    except (ValueError, KeyError, TypeError):
        return None
    uri = f"{out}/{entry['file']}"
    if not is_same or file_size(uri) != entry["bytes"]:
        return None
    # A crash of the machine can tear a local file; a store writes objects atomically.
    return entry if is_remote(uri) or file_sha256(uri) == entry["sha256"] else None


def remove_other_chunks(out: str, entries: dict[int, dict[str, Any]]) -> None:
    """Remove chunk files without an entry: an attempt was killed before it wrote one.

    Not at a URL: another machine may be about to write the entry.
    """
    if is_remote(out):
        return
    named = {entry["file"] for entry in entries.values()}
    for path in Path(out).glob("chunk-*.safetensors"):
        if path.name not in named:
            path.unlink()


def finished_manifest(out: str | Path) -> dict[str, Any] | None:
    """The manifest of a finished shard; None if it or a chunk is missing or damaged."""
    try:
        return read_manifest(out)
    except ValueError:
        return None


class Staging:
    """The directory where a shard's writer makes one chunk at a time, locked against a second writer here.

    It is `.chunk` in a local shard, so that a chunk is moved and not copied; Flyte does not upload dot files.
    For a shard at a URL it is in the temporary directory.
    """

    def __init__(self, out: str) -> None:
        """Take it, also from a writer that was killed.

        Raises:
            OSError: if another writer holds it, or it cannot be written.
        """
        self.dir = Path(gettempdir(), f"eagle3-{digest_of(out)}") if is_remote(out) else Path(out, ".chunk")
        self.dir.mkdir(parents=True, exist_ok=True)
        lock = try_lock(self.dir / "lock")
        if lock is None:
            raise OSError(
                f"{out}: another process is writing this shard; wait until it has ended and run again"
            )
        self.lock = lock
        self._clear()

    @contextmanager
    def file(self) -> Iterator[Path]:
        """A path for one chunk, removed at the end."""
        try:
            yield self.dir / "chunk"
        finally:
            self._clear()

    def close(self) -> None:
        """Remove the directory and let the next writer in."""
        if self.lock.is_locked:
            shutil.rmtree(self.dir, ignore_errors=True)
            self.lock.release()

    def _clear(self) -> None:
        """Remove the chunk, and the temporary file that safetensors writes first."""
        for path in self.dir.iterdir():
            if path.name != "lock":
                path.unlink()
