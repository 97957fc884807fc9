"""Writes one hidden-state shard: rows in any order, chunk after chunk, going on behind the last finished one.

Which rows share a frame and a chunk follows from the rows alone, so whoever goes on after a kill cuts the shard as the first
attempt did. A finished chunk is moved to where it belongs (a local directory or a URL), then its manifest entry is written
beside it as `chunk-00003.json`; the last attempt gathers these entries into the manifest. A machine has one writer of a shard at
a time. Two machines may write to one URL: chunk files carry their hash in their name and nobody deletes them there, so all files
are whole, and the last manifest names some that are there.

Frames are encoded in threads. A chunk is saved, hashed and uploaded in one more thread while the next is filled. Whoever adds
rows waits for both: at most two encoded chunks lie in memory besides the one that is filled (one of them twice while its file is
put together), and one on the local disk.
"""

import json
import logging
import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from threading import BoundedSemaphore
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from eagle3.config.engine import ExtractConfig
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
# Byte shuffle and zstd take 0.15 GB/s on a Zen 3 core; an H200 may hand over 1 GB/s and more of an 8B target's states.
ENCODE_THREADS = max(1, min(8, (os.cpu_count() or 1) // 2))
Check = Callable[[list[int]], dict[str, int]]


@dataclass(frozen=True)
class EncodedFrame:
    """The states of a frame's rows. aux: [t, A, H] and last: [m, H] storage dtype, or compressed; their scales for fp8 only."""

    aux: Tensor | bytes
    last: Tensor | bytes
    aux_scales: Tensor | None
    last_scales: Tensor | None


class HiddenStateWriter:
    """One shard's writer; `close` writes the manifest, and only then is it a shard.

    plan: the rows of every frame of every chunk. entries: manifest entries of the chunks that are finished, by number; the rows
    of the others have to be added.
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
        """Look for the chunks that an earlier attempt finished.

        Args:
            out: directory or fsspec URL of the shard.
            rows: of the shard, in order, at least one.
            num_aux, hidden_size: A and H.
            cfg: encoding, compression, chunk size.
            info: goes into the manifest; chunks made under another one are not gone on from.
            check: called with the row numbers of each chunk before it is written, may raise; its counts go into the manifest.

        Raises:
            ValueError: if there are no rows.
            OSError: if another process here is writing this shard, or the place cannot be written or read.
        """
        self.out = str(out).rstrip("/")
        if not rows:
            raise ValueError(
                f"{self.out}: a hidden-state shard needs at least one row, got none; check what was dropped"
            )
        self.rows, self.num_aux, self.hidden_size, self.cfg, self.info = rows, num_aux, hidden_size, cfg, info
        self.check = check or (lambda _: {})
        self.plan = plan_chunks(
            [row_bytes(row, num_aux, hidden_size, cfg.encoding) for row in rows], cfg.chunk_bytes
        )
        self.digest = digest_of(
            str(FORMAT_VERSION), *map(row_digest, rows), cfg.encoding, json.dumps(info, sort_keys=True)
        )
        self.staging = Staging(self.out)
        self.entries = self._take_over()
        self.frame_of = {
            row: (c, f) for c, frames in enumerate(self.plan) for f, rows in enumerate(frames) for row in rows
        }
        self.states: dict[int, Tensor] = {}
        self.frames: dict[tuple[int, int], Future[EncodedFrame]] = {}
        self.chunks: list[Future[None]] = []
        self.room_for_frame, self.room_for_chunk = (
            BoundedSemaphore(2 * ENCODE_THREADS),
            BoundedSemaphore(CHUNKS_IN_MEMORY),
        )
        self.encoders = ThreadPoolExecutor(ENCODE_THREADS, "encode-frames", lambda: torch.set_num_threads(1))
        self.saver = ThreadPoolExecutor(1, "write-chunks", lambda: torch.set_num_threads(1))

    def add(self, row: int, states: Tensor) -> None:
        """Take the states of one row; waits where encoding or writing lags behind.

        Args:
            row: its place in the shard, of a chunk that is not finished yet; every row once.
            states: [T, A + 1, H] any float dtype: A aux states in ascending layer order, then the last hidden state.

        Raises:
            ValueError: on a wrong shape.
            Exception: what stopped an earlier row or chunk.
        """
        self._raise_failure()
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
        if all((chunk, f) in self.frames for f in range(len(self.plan[chunk]))):
            encoded = [self.frames.pop((chunk, f)) for f in range(len(self.plan[chunk]))]
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
        """End the threads once all chunks that have their rows are written, which stay for the next attempt, and let it begin."""
        self.saver.shutdown()
        self.encoders.shutdown(cancel_futures=True)
        self.staging.close()

    def _take_over(self) -> dict[int, dict[str, Any]]:
        """The entries of what an earlier attempt finished; what it left unfinished is removed."""
        sample_ids = [[self.rows[row].sample_id for frame in frames for row in frame] for frames in self.plan]
        try:
            entries = finished_entries(self.out, sample_ids, self.digest)
            remove_other_chunks(self.out, entries)
        except OSError:
            self.staging.close()
            raise
        logger.info("%s: %d of %d chunks are there already", self.out, len(entries), len(self.plan))
        return entries

    def _raise_failure(self) -> None:
        futures: list[Future[Any]] = [*self.frames.values(), *self.chunks]
        for future in futures:
            if future.done():
                future.result()

    def _encode(self, rows: Frame, states: list[Tensor]) -> EncodedFrame:
        try:
            aux, last = zip(
                *(self._encode_row(*pair) for pair in zip(rows, states, strict=True)), strict=True
            )
        finally:
            self.room_for_frame.release()
        pressed: list[Tensor | bytes] = []
        scales: list[Tensor | None] = []
        for parts in (aux, last):
            stored = torch.cat([p[0] for p in parts])
            pressed.append(compress(stored) if self.cfg.compression == "zstd" else stored)
            scales.append(torch.cat([p[1] for p in parts]) if self.cfg.encoding == "fp8" else None)
        return EncodedFrame(pressed[0], pressed[1], scales[0], scales[1])

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
        """Save, move and note down one chunk."""
        try:
            rows = [row for frame in self.plan[number] for row in frame]
            checks = self.check(rows)
            tensors = self._tensors(number, [frame.result() for frame in frames])
            frames.clear()
            entry = self._save(number, rows, tensors) | {"checks": checks}
            sidecar = {"digest": self.digest, "entry": entry}
            write_bytes(entry_uri(self.out, number), json.dumps(sidecar).encode())
            self.entries[number] = entry
        except (OSError, SafetensorError) as e:
            raise OSError(
                f"{self.out}: chunk {number} of {len(self.plan)} could not be written ({e}); the {len(self.entries)} that are "
                "finished are kept: mend that (on a full disk, make room) and run again"
            ) from e
        finally:
            self.room_for_chunk.release()

    def _tensors(self, number: int, frames: list[EncodedFrame]) -> dict[str, Tensor]:
        """The tensors of a chunk file, as eagle3/shards/hidden_states.py lists them."""
        rows = [self.rows[row] for frame in self.plan[number] for row in frame]
        offsets = torch.tensor([0, *accumulate(len(r.token_ids) for r in rows)])
        loss_mask = torch.tensor([m for r in rows for m in r.loss_mask], dtype=torch.bool)
        positions = [last_state_positions(torch.tensor(r.loss_mask, dtype=torch.bool)) for r in rows]
        tensors = {
            "token_ids": torch.tensor([t for r in rows for t in r.token_ids], dtype=torch.int32),
            "loss_mask": loss_mask,
            "row_offsets": offsets,
            "last_positions": torch.cat(
                [p + start for p, start in zip(positions, offsets.tolist(), strict=False)]
            ),
        }
        for kind in ("aux", "last"):
            parts = [getattr(frame, kind) for frame in frames]
            if self.cfg.compression == "zstd":
                tensors[kind] = torch.frombuffer(bytearray().join(parts), dtype=torch.uint8)
                tensors[f"{kind}_frames"] = torch.tensor([0, *accumulate(len(p) for p in parts)])
            else:
                tensors[kind] = torch.cat(parts)
            if self.cfg.encoding == "fp8":
                tensors[f"{kind}_scales"] = torch.cat([getattr(frame, f"{kind}_scales") for frame in frames])
        if self.cfg.compression == "zstd":
            tensors["frame_rows"] = torch.tensor([0, *accumulate(len(frame) for frame in self.plan[number])])
        return tensors

    def _save(self, number: int, rows: list[int], tensors: dict[str, Tensor]) -> dict[str, Any]:
        """Write the chunk file; returns its manifest entry without checks."""
        states = {
            "encoding": self.cfg.encoding,
            "compression": self.cfg.compression,
            "num_aux": self.num_aux,
            "hidden_size": self.hidden_size,
        }
        with self.staging.file() as path:
            # One key: safetensors writes several in random order, and equal chunks are to be equal files.
            save_file(tensors, path, {"states": json.dumps(states)})
            path.chmod(0o644)  # safetensors makes files that only their owner reads
            sha256 = file_sha256(path)
            entry = {
                "file": f"chunk-{number:05d}-{sha256[:8]}.safetensors",
                "sample_ids": [self.rows[row].sample_id for row in rows],
                "lengths": [len(self.rows[row].token_ids) for row in rows],
                "bytes": path.stat().st_size,
                "sha256": sha256,
            }
            move_file(path, f"{self.out}/{entry['file']}")
        return entry

    def _manifest(self) -> dict[str, Any]:
        entries = [self.entries[number] for number in range(len(self.plan))]
        checks: dict[str, int] = {}
        for entry in entries:
            for name, count in entry["checks"].items():
                checks[name] = checks.get(name, 0) + count
        return {
            "format_version": FORMAT_VERSION,
            "encoding": self.cfg.encoding,
            "compression": self.cfg.compression,
            "rows": len(self.rows),
            "tokens": sum(len(r.token_ids) for r in self.rows),
            "supervised_tokens": sum(sum(r.loss_mask) for r in self.rows),
            "bytes": sum(entry["bytes"] for entry in entries),
            "digest": self.digest,
            "info": self.info,
            "checks": checks,
            "chunks": entries,
        }
