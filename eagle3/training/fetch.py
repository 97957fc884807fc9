"""Chunk files of the packs to read: local chunks are checked in place, remote ones fetched in groups.

While the loader reads the packs of one group of chunks (loader.Pack), the chunks of the next are fetched and
those of the previous one deleted, so the disk holds two groups. If the budget holds all chunks, none is
deleted. Remote chunk 7 is `chunk-0000007-<its sha256>.safetensors` in the cache directory. A later process
uses it, and deletes other files with such names, but nothing else in the directory.
"""

import logging
import re
import threading
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fsspec
from fsspec.callbacks import Callback

from eagle3.files import Stopped, atomic_path, is_remote, retry
from eagle3.shards.hidden_states import ChunkReader, check_chunk_size

logger = logging.getLogger(__name__)
# A core hashes about 1 GB/s; a large GPU trains through 3 to 4 GB/s.
FETCH_THREADS = 4
CACHED_NAME = re.compile(r"chunk-\d{7}-[0-9a-f]{64}\.safetensors(\.part)?")


@dataclass(frozen=True)
class Chunk:
    """A chunk file of a shard. path: local path or URL. entry: its entry in the manifest."""

    path: str
    entry: dict[str, Any]

    @property
    def is_remote(self) -> bool:
        """Whether it must be fetched."""
        return is_remote(self.path)


class ChunkFiles:
    """The chunk files of several shards; a chunk's number is its index in `chunks`."""

    def __init__(self, chunks: list[Chunk], cache_dir: Path | None = None, cache_bytes: int = 0) -> None:
        """Fetches and deletes nothing yet.

        Args:
            cache_dir: directory for remote chunks; no other process may use it.
            cache_bytes: limit of their total size there, including those being fetched.
        """
        has_remote = any(chunk.is_remote for chunk in chunks)
        if has_remote and not cache_dir:
            raise ValueError("remote shards need a cache directory, got none; pass cache_dir and cache_bytes")
        self.chunks = chunks
        self.cache_bytes = cache_bytes
        self.checked: set[int] = set()
        self.cache_dir = cache_dir if has_remote else None
        if self.cache_dir:
            self.cache_dir.mkdir(parents=True, exist_ok=True)

    def disk_bytes(self, numbers: Iterable[int]) -> int:
        """Total size of these chunks in the cache directory."""
        chunks = [self.chunks[number] for number in numbers]
        return sum(int(chunk.entry["bytes"]) for chunk in chunks if chunk.is_remote)

    def _path(self, number: int) -> Path:
        chunk = self.chunks[number]
        if not chunk.is_remote:
            return Path(chunk.path)
        assert self.cache_dir
        return self.cache_dir / f"chunk-{number:07d}-{chunk.entry['sha256']}.safetensors"

    def delete_all_but(self, kept: Iterable[int]) -> None:
        """Delete chunks of other runs and, if the budget does not hold all chunks, those not in `kept`."""
        if self.cache_dir is None:
            return
        all_chunks = range(len(self.chunks))
        numbers = all_chunks if self.disk_bytes(all_chunks) <= self.cache_bytes else kept
        names = {self._path(number).name for number in numbers if self.chunks[number].is_remote}
        for path in self.cache_dir.iterdir():
            if CACHED_NAME.fullmatch(path.name) and path.name.removesuffix(".part") not in names:
                path.unlink()

    def open(self, number: int, stopped: threading.Event) -> ChunkReader:
        """Fetch a chunk unless it is on disk, check it the first time, and open it.

        Raises:
            ValueError: if the chunk is damaged or missing.
            ConnectionError: if the store keeps failing.
            Stopped: if `stopped` was set during the fetch.
        """
        chunk, path = self.chunks[number], self._path(number)
        if chunk.is_remote and path.exists():
            try:
                return self._read(number)
            except ValueError:
                logger.warning("%s is damaged: fetching %s again", path, chunk.path)
        if chunk.is_remote:
            fetch(chunk, path, stopped)
        return self._read(number)

    def _read(self, number: int) -> ChunkReader:
        chunk = self.chunks[number]
        is_checked = number in self.checked
        reader = ChunkReader(self._path(number), chunk.entry, name=chunk.path, is_checked=is_checked)
        self.checked.add(number)
        return reader


def fetch(chunk: Chunk, path: Path, stopped: threading.Event) -> None:
    """Copy a remote chunk to a local path atomically; raises as `ChunkFiles.open`."""

    def get(part: Path) -> None:
        store, remote_path = fsspec.core.url_to_fs(chunk.path)
        size = store.info(remote_path)["size"]
        if size is not None:
            check_chunk_size(size, chunk.entry, chunk.path)
        store.get_file(remote_path, str(part), callback=_StopBetweenBlocks(stopped))

    try:
        with atomic_path(path) as part:
            retry(lambda: get(part), chunk.path, stopped)
    except FileNotFoundError:
        check_chunk_size(None, chunk.entry, chunk.path)


class _StopBetweenBlocks(Callback):  # type: ignore[misc]
    """Ends a fetch between two blocks once `stopped` is set."""

    def __init__(self, stopped: threading.Event) -> None:
        super().__init__()
        self.stopped = stopped

    def relative_update(self, inc: int = 1) -> None:
        if self.stopped.is_set():
            raise Stopped


class OpenChunks:
    """The open chunks of the current group (None before the first) and of the next.

    needs: chunk numbers of every group, in order of use. Leaving the context ends all fetching.
    """

    def __init__(self, files: ChunkFiles, needs: dict[int, list[int]]) -> None:
        self.files = files
        self.needs = needs
        self.group: int | None = None
        self.opened: dict[int, Future[ChunkReader]] = {}
        self.stopped = threading.Event()
        self.pool = ThreadPoolExecutor(FETCH_THREADS, thread_name_prefix="fetch-chunks")

    def __enter__(self) -> "OpenChunks":
        return self

    def __exit__(self, *_: object) -> None:
        self.stopped.set()
        self.pool.shutdown(cancel_futures=True)

    def covers(self, group: int) -> bool:
        """Whether the chunks of a group are open or being fetched."""
        return self.group is not None and group <= self.group + 1

    def enter(self, group: int) -> None:
        """Start to fetch the chunks of this group and the next; close and delete all others.

        The caller must have read all packs of earlier groups.
        """
        if group == self.group:
            return
        self.group = group
        kept = [*self.needs.get(group, []), *self.needs.get(group + 1, [])]
        # Close first: a deleted file that is still mapped keeps its disk space.
        for number in self.opened.keys() - set(kept):
            del self.opened[number]
        self.files.delete_all_but(kept)
        for number in kept:
            if number not in self.opened:
                self.opened[number] = self.pool.submit(self.files.open, number, self.stopped)

    def wait_for(self, number: int) -> ChunkReader:
        """The reader of a chunk of this group or the next; raises as `ChunkFiles.open`."""
        return self.opened[number].result()
