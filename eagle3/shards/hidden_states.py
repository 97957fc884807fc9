"""The format of hidden-state shards, and reading them; eagle3/shards/writer.py writes them.

A shard is a directory of chunks `chunk-00000-<first 8 hex digits of its SHA-256>.safetensors` … and
`manifest.json`, written last: without a manifest it is no shard. A chunk has the tokens of its rows one row
after the other. Its `__metadata__` has one key, `states`: JSON with `encoding` (bf16, fp16, fp32, fp8),
`compression` (none, zstd), `num_aux` A and `hidden_size` H. Its tensors, little-endian:

    token_ids       [T] int32        loss_mask  [T] bool
    row_offsets     [R + 1] int64    row r is [row_offsets[r], row_offsets[r + 1])
    last_positions  [M] int64        positions q with loss_mask[q] and loss_mask[q + 1] in one row, ascending
    aux             [T, A, H]        residual stream after each of the A aux layers, storage dtype
    last            [M, H]           last hidden state, before the final norm, at last_positions only
    aux_scales      [T, A] float32   fp8 only, powers of two: state = stored × scale
    last_scales     [M] float32

Under `zstd`, aux and last are [bytes] uint8 instead: frames of whole rows (eagle3/shards/encoding.py), each
with the elements of its rows in the order above, and three more tensors

    frame_rows      [F + 1] int64    frame f holds rows [frame_rows[f], frame_rows[f + 1])
    aux_frames      [F + 1] int64    and the bytes [aux_frames[f], aux_frames[f + 1]) of aux
    last_frames     [F + 1] int64    and of last

The manifest is JSON: `format_version`, `encoding`, `compression`, counts (`rows`, `tokens`,
`supervised_tokens`, `bytes`), `digest`, `info` (target, layers, engine, versions: all that determines the
states), `checks` (counts of capture, summed over the chunks) and for each chunk {file, sample_ids, lengths,
bytes, sha256, checks}: ids and numbers of tokens of its rows in order, size and SHA-256 (64 hex digits) of
the file. So manifests alone are enough to plan a run, and a reader checks a whole chunk before it uses it.
The digest covers the token rows, the encoding and `info`, not the states' bytes: the last bits of a state
depend on the rows that the engine batched together. Compression and chunk size are lossless and not in it.

Versions: 1 had neither lengths nor sha256, 2 neither encodings nor compression.
"""

import json
import re
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import safe_open
from torch import Tensor

from eagle3.files import file_sha256, file_size, read_bytes
from eagle3.shards.encoding import STORED_DTYPE, decode, decompress

FORMAT_VERSION = 3
MANIFEST_NAME = "manifest.json"
CHUNK_NAME = re.compile(r"chunk-\d+-[0-9a-f]{8}\.safetensors")
SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class HiddenStateRow:
    """One conversation with its states.

    token_ids: [T] int64. loss_mask: [T] bool. aux: [T, A, H] the encoding's dtype, bfloat16 for fp8.
    last: [M, H] the same dtype, before the final norm. last_positions: [M] int64, its positions, ascending.
    """

    sample_id: str
    token_ids: Tensor
    loss_mask: Tensor
    aux: Tensor
    last: Tensor
    last_positions: Tensor


def last_state_positions(loss_mask: Tensor) -> Tensor:
    """Positions q with a last hidden state that some loss needs: loss_mask[q] and loss_mask[q + 1].

    Args:
        loss_mask: [T] bool of one row.

    Returns:
        [M] int64, ascending.
    """
    return torch.nonzero(loss_mask[:-1] & loss_mask[1:]).flatten()


def hidden_state_bytes(tokens: int, last_states: int, num_aux: int, hidden_size: int, encoding: str) -> int:
    """Size of rows in a shard before compression, bytes, without headers.

    Args:
        tokens: T.
        last_states: M, at most the supervised tokens.
        num_aux, hidden_size: A and H.
        encoding: as in the manifest.
    """
    state = hidden_size * STORED_DTYPE[encoding].itemsize + (4 if encoding == "fp8" else 0)
    return tokens * (num_aux * state + 5) + last_states * (state + 8)


def parse_manifest(text: str | bytes | None, path: str | Path) -> dict[str, Any]:
    """Parse and check a manifest.

    Args:
        text: content of the file; None if there is no file.
        path: path or URL for messages.

    Raises:
        ValueError: if it is missing, unreadable or of another format version.
    """
    if text is None:
        raise ValueError(
            f"{path} is missing: the shard was not finished; run its extraction again, which resumes where "
            "it ended"
        )
    try:
        manifest = cast(dict[str, Any], json.loads(text))
        version = manifest["format_version"]
        if version == FORMAT_VERSION:
            _check_content(manifest)
    except (ValueError, KeyError, TypeError) as e:
        raise ValueError(f"{path} is not a manifest ({e}); delete the directory and run again") from e
    if version != FORMAT_VERSION:
        raise ValueError(
            f"{path} has format version {version}, this reader reads {FORMAT_VERSION}; extract again or "
            "update eagle3"
        )
    return manifest


def _check_content(manifest: dict[str, Any]) -> None:
    for chunk in manifest["chunks"]:
        check_entry(chunk)
    lengths = [n for chunk in manifest["chunks"] for n in chunk["lengths"]]
    found = f"{len(lengths)} rows and {sum(lengths)} tokens"
    counted = f"{manifest['rows']} rows and {manifest['tokens']} tokens"
    if found != counted:
        raise ValueError(f"its chunks hold {found}, its counts are {counted}")


def check_entry(chunk: dict[str, Any]) -> None:
    """Refuse an entry of a manifest that does not describe a chunk.

    Raises:
        ValueError, KeyError, TypeError: if it does not.
    """
    # Names become paths on the reader's disk: only a chunk's own name may pass.
    chunk["file"] = Path(chunk["file"]).name
    is_file = CHUNK_NAME.fullmatch(chunk["file"]) and SHA256.fullmatch(chunk["sha256"])
    if not is_file or int(chunk["bytes"]) < 0:
        raise ValueError(
            f"no chunk is described by file {chunk['file']!r}, sha256 {chunk['sha256']!r}, bytes "
            f"{chunk['bytes']!r}"
        )
    if min(chunk["lengths"], default=0) < 1:
        raise ValueError(f"{chunk['file']} must have rows of at least one token")
    if len(chunk["lengths"]) != len(chunk["sample_ids"]):
        raise ValueError(
            f"{chunk['file']} has {len(chunk['lengths'])} lengths but {len(chunk['sample_ids'])} sample ids"
        )
    dict(chunk["checks"])


def read_manifest(shard_dir: str | Path) -> dict[str, Any]:
    """Read and check the manifest of a shard, by path or URL, and the sizes of its chunk files.

    Raises:
        ValueError: as `parse_manifest`, and if a chunk file is missing or truncated.
    """
    root = str(shard_dir).rstrip("/")
    manifest = parse_manifest(read_bytes(f"{root}/{MANIFEST_NAME}"), f"{root}/{MANIFEST_NAME}")
    for chunk in manifest["chunks"]:
        check_chunk_size(file_size(f"{root}/{chunk['file']}"), chunk, f"{root}/{chunk['file']}")
    return manifest


def check_chunk_size(size: int | None, entry: dict[str, Any], name: str | Path) -> None:
    """Compare a chunk file's size in bytes, None if it is missing, with its entry; `name` is its path or URL.

    Raises:
        ValueError: if they differ.
    """
    if size != entry["bytes"]:
        raise _damaged(name, f"{entry['bytes']} bytes", "no file" if size is None else f"{size} bytes")


def _damaged(name: str | Path, expected: str, found: str) -> ValueError:
    shard = str(name).rpartition("/")[0]
    return ValueError(
        f"{name}: {expected} expected, {found} found; the shard {shard} is damaged: delete it and run again"
    )


class ChunkReader:
    """The rows of one chunk file by number. The file is checked as a whole and then memory-mapped.

    Rows of an uncompressed chunk are views of the mapped file: copy them to keep them longer than the reader.
    """

    def __init__(
        self, path: str | Path, entry: dict[str, Any], name: str = "", is_checked: bool = False
    ) -> None:
        """Open and check a chunk file.

        Args:
            path: the file.
            entry: its entry in the manifest.
            name: for messages, if the file is a copy.
            is_checked: this process has checked its content before.

        Raises:
            ValueError: if size or content are not those of the manifest.
        """
        name = name or str(path)
        check_chunk_size(file_size(str(path)), entry, name)
        if not is_checked and (found := file_sha256(path)) != entry["sha256"]:
            raise _damaged(name, f"sha256 {entry['sha256']}", found)
        self.sample_ids: list[str] = entry["sample_ids"]
        self.file: Any = safe_open(path, framework="pt")
        self.offsets: list[int] = self.file.get_tensor("row_offsets").tolist()
        self.last_positions: Tensor = self.file.get_tensor("last_positions")
        metadata = json.loads(self.file.metadata()["states"])
        self.dtype = STORED_DTYPE[metadata["encoding"]]
        self.has_scales = metadata["encoding"] == "fp8"
        self.num_aux: int = metadata["num_aux"]
        self.hidden_size: int = metadata["hidden_size"]
        self.frame_rows: list[int] = []
        if metadata["compression"] != "none":
            self.frame_rows = self.file.get_tensor("frame_rows").tolist()
            self.frame_bytes = {
                kind: self.file.get_tensor(f"{kind}_frames").tolist() for kind in ("aux", "last")
            }
        # (frame, aux, last) of the last frame with several rows: its rows are often read one after the other.
        self.recent: tuple[int, Tensor, Tensor] | None = None

    def row(self, index: int) -> HiddenStateRow:
        """Read row `index` of the chunk."""
        start, stop = self.offsets[index], self.offsets[index + 1]
        m0, m1 = self._last_range(start, stop)
        if self.frame_rows:
            aux, last = self._from_frame(index)
        else:
            aux, last = self.file.get_slice("aux")[start:stop], self.file.get_slice("last")[m0:m1]
        if self.has_scales:
            aux = decode(aux, self.file.get_slice("aux_scales")[start:stop])
            last = decode(last, self.file.get_slice("last_scales")[m0:m1])
        return HiddenStateRow(
            self.sample_ids[index],
            self.file.get_slice("token_ids")[start:stop].long(),
            self.file.get_slice("loss_mask")[start:stop],
            aux,
            last,
            self.last_positions[m0:m1] - start,
        )

    def _last_range(self, start: int, stop: int) -> tuple[int, int]:
        """The rows of `last` for the positions [start, stop)."""
        m0, m1 = torch.searchsorted(self.last_positions, torch.tensor([start, stop])).tolist()
        return m0, m1

    def _from_frame(self, index: int) -> tuple[Tensor, Tensor]:
        """aux [T, A, H] and last [M, H] of one row, storage dtype."""
        frame = bisect_right(self.frame_rows, index) - 1
        start, stop = (self.offsets[row] for row in self.frame_rows[frame : frame + 2])
        m0, m1 = self._last_range(start, stop)
        recent = self.recent
        if recent is None or recent[0] != frame:
            aux = self._decompress("aux", frame, (stop - start, self.num_aux, self.hidden_size))
            recent = (frame, aux, self._decompress("last", frame, (m1 - m0, self.hidden_size)))
            if self.frame_rows[frame + 1] - self.frame_rows[frame] > 1:
                self.recent = recent
        _, aux, last = recent
        row_start, row_stop = self.offsets[index] - start, self.offsets[index + 1] - start
        r0, r1 = self._last_range(row_start + start, row_stop + start)
        return aux[row_start:row_stop], last[r0 - m0 : r1 - m0]

    def _decompress(self, kind: str, frame: int, shape: tuple[int, ...]) -> Tensor:
        begin, end = self.frame_bytes[kind][frame : frame + 2]
        return decompress(self.file.get_slice(kind)[begin:end], shape, self.dtype)


def read_hidden_states(shard_dir: str | Path) -> Iterator[HiddenStateRow]:
    """Stream all rows of a local shard in order.

    Raises:
        ValueError: if a chunk is damaged.
    """
    for entry in read_manifest(shard_dir)["chunks"]:
        chunk = ChunkReader(Path(shard_dir) / entry["file"], entry)
        for index in range(len(entry["lengths"])):
            yield chunk.row(index)
