"""Writes one hidden-state shard: rows in any order, chunk by chunk, resuming after finished chunks.

A finished chunk is moved to the shard (a local directory or a URL), then its manifest entry is written next
to it; at the end the manifest collects the entries. On one machine a shard has one writer at a time. Two
machines may write to one URL: chunk names contain their hash and no chunk is deleted there, so all files are
whole and the last manifest names some that exist.

Threads encode frames. One more thread saves, hashes and uploads a chunk while the next one is filled. `add`
waits for both: in memory are at most two encoded chunks and the one that is filled (one of them twice while
its file is assembled), on the local disk one.
"""

import json
import logging
import os
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import accumulate
from pathlib import Path
from threading import BoundedSemaphore
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from eagle3.config.engine import ExtractConfig
from eagle3.errors import StoreError
from eagle3.files import digest_of, file_sha256, move_file, remove_file, write_bytes
from eagle3.shards.chunks import (
    Frame,
    Staging,
    entry_uri,
    finished_entries,
    plan_chunks,
    remove_other_chunks,
    row_bytes,
)
from eagle3.shards.encoding import compress, encode
from eagle3.shards.hidden_states import FORMAT_VERSION, MANIFEST_NAME, last_state_positions
from eagle3.shards.tokens import TokenRow, row_digest

logger = logging.getLogger(__name__)
CHUNKS_IN_MEMORY = 2
# Byte shuffle and zstd take 0.15 GB/s on a Zen 3 core; an H200 makes 1 GB/s of an 8B target's states.
ENCODE_THREADS = max(1, min(8, (os.cpu_count() or 1) // 2))
Check = Callable[[list[int]], dict[str, int]]
# aux and last of a frame's rows, encoded and perhaps compressed, and for fp8 aux_scales and last_scales.
EncodedFrame = dict[str, Any]


class HiddenStateWriter:
    """Writer of one shard; `close` writes the manifest, which makes it a shard.

    plan: the rows of every frame of every chunk. entries: manifest entries of the finished chunks, by number;
    the rows of the other chunks have to be added.
    """

    def __init__(
        self,
        out: str | Path,
        rows: list[TokenRow],
        num_aux: int,
        hidden_size: int,
        cfg: ExtractConfig,
        info: dict[str, Any],
        check: Check | None = None,
    ) -> None:
        """Find the chunks that an earlier attempt finished.

        Args:
            out: directory or URL of the shard.
            rows: of the shard, in order, at least one.
            num_aux, hidden_size: A and H.
            cfg: encoding, compression, chunk size.
            info: for the manifest; chunks of an attempt with another info are not used.
            check: called with the rows of each chunk before it is written; returns counts for the manifest.

        Raises:
            ValueError: if there are no rows.
            OSError: if another process here is writing this shard, or it cannot be written or read.
        """
        self.out = str(out).rstrip("/")
        if not rows:
            raise ValueError(
                f"{self.out}: a hidden-state shard needs at least one row, got none; check what was dropped"
            )
        self.rows = rows
        self.num_aux = num_aux
        self.hidden_size = hidden_size
        self.cfg = cfg
        self.info = info
        self.check = check or (lambda _: {})
        sizes = [row_bytes(row, num_aux, hidden_size, cfg.encoding) for row in rows]
        self.plan = plan_chunks(sizes, cfg.chunk_bytes)
        row_digests = map(row_digest, rows)
        self.digest = digest_of(
            str(FORMAT_VERSION), *row_digests, cfg.encoding, json.dumps(info, sort_keys=True)
        )
        self.frame_of = {
            row: (c, f) for c, frames in enumerate(self.plan) for f, rows in enumerate(frames) for row in rows
        }
        self.staging = Staging(self.out)
        self.entries = self._take_over()
        self.states: dict[int, Tensor] = {}
        self.frames: dict[tuple[int, int], Future[EncodedFrame]] = {}
        self.chunks: list[Future[None]] = []
        self.room_for_frame = BoundedSemaphore(2 * ENCODE_THREADS)
        self.room_for_chunk = BoundedSemaphore(CHUNKS_IN_MEMORY)
        self.encoders = ThreadPoolExecutor(ENCODE_THREADS, "encode-frames", lambda: torch.set_num_threads(1))
        self.saver = ThreadPoolExecutor(1, "write-chunks", lambda: torch.set_num_threads(1))

    def add(self, row: int, states: Tensor) -> None:
        """Take the states of one row; waits until encoding and writing have caught up.

        Args:
            row: its number in the shard, once each, of a chunk that is not finished.
            states: [T, A + 1, H] any float dtype: aux states by ascending layer, then the last hidden state.

        Raises:
            ValueError: on a wrong shape.
            Exception: what stopped an earlier row or chunk.
        """
        futures: list[Future[Any]] = [*self.frames.values(), *self.chunks]
        for future in futures:
            if future.done():
                future.result()
        expected = (len(self.rows[row].token_ids), self.num_aux + 1, self.hidden_size)
        if tuple(states.shape) != expected:
            sample_id = self.rows[row].sample_id
            raise ValueError(
                f"row {sample_id}: states must be {expected}, got {tuple(states.shape)}; the engine lost some"
            )
        chunk, frame = self.frame_of[row]
        self.states[row] = states
        members = self.plan[chunk][frame]
        if any(r not in self.states for r in members):
            return
        taken = [self.states.pop(r) for r in members]
        self.room_for_frame.acquire()
        self.frames[chunk, frame] = self.encoders.submit(self._encode, members, taken)
        keys = [(chunk, f) for f in range(len(self.plan[chunk]))]
        if all(key in self.frames for key in keys):
            encoded = list(map(self.frames.pop, keys))
            self.room_for_chunk.acquire()
            self.chunks.append(self.saver.submit(self._finish_chunk, chunk, encoded))

    def close(self) -> dict[str, Any]:
        """Wait for the last chunk, write the manifest and return it."""
        try:
            for chunk in self.chunks:
                chunk.result()
            assert len(self.entries) == len(self.plan), "every row must be added before the shard is closed"
            manifest = self._manifest()
            write_bytes(f"{self.out}/{MANIFEST_NAME}", json.dumps(manifest, indent=1).encode())
            for number in range(len(self.plan)):
                remove_file(entry_uri(self.out, number))
            remove_other_chunks(self.out, self.entries)
            return manifest
        finally:
            self.stop()

    def stop(self) -> None:
        """Write the chunks that have all their rows, end the threads and release the lock."""
        self.saver.shutdown()
        self.encoders.shutdown(cancel_futures=True)
        self.staging.close()

    def _take_over(self) -> dict[int, dict[str, Any]]:
        """The entries of the finished chunks; removes what an earlier attempt did not finish."""
        sample_ids = [self._sample_ids(number) for number in range(len(self.plan))]
        try:
            entries = finished_entries(self.out, sample_ids, self.digest)
            remove_other_chunks(self.out, entries)
        except OSError:
            self.staging.close()
            raise
        logger.info("%s: %d of %d chunks are finished", self.out, len(entries), len(self.plan))
        return entries

    def _encode(self, rows: Frame, states: list[Tensor]) -> EncodedFrame:
        try:
            encoded = [self._encode_row(row, of_row) for row, of_row in zip(rows, states, strict=True)]
        finally:
            self.room_for_frame.release()
        frame: EncodedFrame = {}
        for kind, pairs in zip(("aux", "last"), zip(*encoded, strict=True), strict=True):
            stored = torch.cat([stored for stored, _ in pairs])
            frame[kind] = compress(stored) if self.cfg.compression == "zstd" else stored
            if self.cfg.encoding == "fp8":
                frame[f"{kind}_scales"] = torch.cat([scales for _, scales in pairs])
        return frame

    def _encode_row(self, row: int, states: Tensor) -> tuple[tuple[Tensor, Any], tuple[Tensor, Any]]:
        positions = last_state_positions(torch.tensor(self.rows[row].loss_mask, dtype=torch.bool))
        try:
            return encode(states[:, :-1], self.cfg.encoding), encode(states[positions, -1], self.cfg.encoding)
        except ValueError as e:
            raise ValueError(
                f"{self.out}: row {self.rows[row].sample_id} has {e} in {self.cfg.encoding}; "
                "if the row is sound, set extract.encoding to bf16 or fp32"
            ) from e

    def _finish_chunk(self, number: int, frames: list[Future[EncodedFrame]]) -> None:
        """Save one chunk, move it to the shard and write its entry."""
        try:
            checks = self.check([row for frame in self.plan[number] for row in frame])
            tensors = self._tensors(number, [frame.result() for frame in frames])
            frames.clear()
            entry = self._save(number, tensors) | {"checks": checks}
            sidecar = {"digest": self.digest, "entry": entry}
            write_bytes(entry_uri(self.out, number), json.dumps(sidecar).encode())
            self.entries[number] = entry
        except (OSError, SafetensorError) as e:
            raise (StoreError if isinstance(e, StoreError) else OSError)(
                f"{self.out}: chunk {number} of {len(self.plan)} could not be written ({e}); the "
                f"{len(self.entries)} that are finished are kept: mend that (on a full disk, make room) and "
                "run again"
            ) from e
        finally:
            self.room_for_chunk.release()

    def _rows(self, number: int) -> list[TokenRow]:
        return [self.rows[row] for frame in self.plan[number] for row in frame]

    def _sample_ids(self, number: int) -> list[str]:
        return [row.sample_id for row in self._rows(number)]

    def _tensors(self, number: int, frames: list[EncodedFrame]) -> dict[str, Tensor]:
        """The tensors of a chunk file, as in eagle3/shards/hidden_states.py."""
        rows = self._rows(number)
        masks = [torch.tensor(row.loss_mask, dtype=torch.bool) for row in rows]
        offsets = [0, *accumulate(len(row.token_ids) for row in rows)]
        positions = [last_state_positions(mask) + start for mask, start in zip(masks, offsets, strict=False)]
        tensors = {
            "token_ids": torch.tensor([t for row in rows for t in row.token_ids], dtype=torch.int32),
            "loss_mask": torch.cat(masks),
            "row_offsets": torch.tensor(offsets),
            "last_positions": torch.cat(positions),
        }
        for kind in ("aux", "last"):
            parts = [frame[kind] for frame in frames]
            if self.cfg.compression == "zstd":
                tensors[kind] = torch.frombuffer(bytearray().join(parts), dtype=torch.uint8)
                tensors[f"{kind}_frames"] = torch.tensor([0, *accumulate(map(len, parts))])
            else:
                tensors[kind] = torch.cat(parts)
            if self.cfg.encoding == "fp8":
                tensors[f"{kind}_scales"] = torch.cat([frame[f"{kind}_scales"] for frame in frames])
        if self.cfg.compression == "zstd":
            tensors["frame_rows"] = torch.tensor([0, *accumulate(map(len, self.plan[number]))])
        return tensors

    def _save(self, number: int, tensors: dict[str, Tensor]) -> dict[str, Any]:
        """Write the chunk file; returns its manifest entry without checks."""
        states = {
            "encoding": self.cfg.encoding,
            "compression": self.cfg.compression,
            "num_aux": self.num_aux,
            "hidden_size": self.hidden_size,
        }
        with self.staging.file() as path:
            # One key: safetensors writes several in random order, and equal chunks must be equal files.
            save_file(tensors, path, {"states": json.dumps(states)})
            path.chmod(0o644)  # safetensors makes files that only their owner can read
            sha256 = file_sha256(path)
            entry = {
                "file": f"chunk-{number:05d}-{sha256[:8]}.safetensors",
                "sample_ids": self._sample_ids(number),
                "lengths": [len(row.token_ids) for row in self._rows(number)],
                "bytes": path.stat().st_size,
                "sha256": sha256,
            }
            move_file(path, f"{self.out}/{entry['file']}")
        return entry

    def _manifest(self) -> dict[str, Any]:
        entries = [self.entries[number] for number in range(len(self.plan))]
        checks: Counter[str] = Counter()
        for entry in entries:
            checks.update(entry["checks"])
        return {
            "format_version": FORMAT_VERSION,
            "encoding": self.cfg.encoding,
            "compression": self.cfg.compression,
            "rows": len(self.rows),
            "tokens": sum(len(row.token_ids) for row in self.rows),
            "supervised_tokens": sum(sum(row.loss_mask) for row in self.rows),
            "bytes": sum(entry["bytes"] for entry in entries),
            "digest": self.digest,
            "info": self.info,
            "checks": dict(checks),
            "chunks": entries,
        }
