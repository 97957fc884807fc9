"""Chunk files of the packs that are read: local ones are checked in place, remote ones fetched in groups.

While the packs of one group of chunks (loader.Pack) are read, the chunks of the next are fetched, and those
of the last are deleted: the disk holds two groups. Where the budget holds all chunks, none is deleted.

Remote chunk 7 is `chunk-0000007-<its sha256>.safetensors` in the cache directory. A later process that finds
it there uses it and deletes other files of that form. Nothing else in the directory is touched.
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
    """One chunk file of a shard. path: local path or URL. entry: its entry in the manifest."""

    path: str
    entry: dict[str, Any]

    @property
    def is_remote(self) -> bool:
        """Whether it has to be fetched."""
        return is_remote(self.path)

    @property
    def disk_bytes(self) -> int:
        """What it takes in the cache directory, bytes."""
        return int(self.entry["bytes"]) if self.is_remote else 0


class ChunkFiles:
    """The chunk files of several shards, by number: their place in `chunks`."""

    def __init__(self, chunks: list[Chunk], cache_dir: Path | None = None, cache_bytes: int = 0) -> None:
        """Nothing is fetched or deleted yet.

        Args:
            chunks: the chunk files.
            cache_dir: directory for remote chunks; no other process may use it.
            cache_bytes: the most that they may take there, those being fetched included.

        Raises:
            ValueError: if there are remote chunks and no cache_dir.
        """
        self.chunks = chunks
        self.cache_bytes = cache_bytes
        self.checked: set[int] = set()
        self.cache_dir = cache_dir if any(chunk.is_remote for chunk in chunks) else None
        if self.cache_dir:
            self.cache_dir.mkdir(parents=True, exist_ok=True)
        elif any(chunk.is_remote for chunk in chunks):
            raise ValueError("remote shards need a cache directory, got none; pass cache_dir and cache_bytes")

    def disk_bytes(self, numbers: Iterable[int]) -> int:
        """What these chunks take in the cache directory together, bytes."""
        return sum(self.chunks[number].disk_bytes for number in numbers)

    def _path(self, number: int) -> Path:
        chunk = self.chunks[number]
        if not chunk.is_remote:
            return Path(chunk.path)
        assert self.cache_dir
        return self.cache_dir / f"chunk-{number:07d}-{chunk.entry['sha256']}.safetensors"

    def delete_all_but(self, kept: Iterable[int]) -> None:
        """Delete what earlier runs left and, without room for all chunks, the cached ones that are not in
        `kept`.
        """
        if self.cache_dir is None:
            return
        every = range(len(self.chunks))
        numbers = every if self.disk_bytes(every) <= self.cache_bytes else kept
        names = {self._path(number).name for number in numbers if self.chunks[number].is_remote}
        for path in self.cache_dir.iterdir():
            if CACHED_NAME.fullmatch(path.name) and path.name.removesuffix(".part") not in names:
                path.unlink()

    def open(self, number: int, stopped: threading.Event) -> ChunkReader:
        """Fetch a chunk if it is not there, check it if this process has not yet, and open it.

        Raises:
            ValueError: if the chunk is damaged or missing.
            ConnectionError: if the store keeps failing.
            Stopped: if `stopped` was set meanwhile.
        """
        chunk, path = self.chunks[number], self._path(number)
        if chunk.is_remote and path.exists():
            try:
                return self._read(number)
            except ValueError:
                logger.warning("%s no longer holds %s, fetching it again", path, chunk.path)
        if chunk.is_remote:
            fetch(chunk, path, stopped)
        return self._read(number)

    def _read(self, number: int) -> ChunkReader:
        chunk, is_checked = self.chunks[number], number in self.checked
        reader = ChunkReader(self._path(number), chunk.entry, name=chunk.path, is_checked=is_checked)
        self.checked.add(number)
        return reader


def fetch(chunk: Chunk, path: Path, stopped: threading.Event) -> None:
    """Copy a remote chunk to a local path, atomically.

    Raises:
        ValueError: if the store has no such file or one of another size.
        ConnectionError: if the store keeps failing.
        Stopped: if `stopped` was set meanwhile.
    """

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
    """Ends a long fetch."""

    def __init__(self, stopped: threading.Event) -> None:
        super().__init__()
        self.stopped = stopped

    def relative_update(self, inc: int = 1) -> None:
        if self.stopped.is_set():
            raise Stopped


class OpenChunks:
    """The opened chunks of the group that is being read and of the next one. Leaving the context ends all
    fetching.

    group: the group that is being read, None before the first.
    """

    def __init__(self, files: ChunkFiles, needs: dict[int, list[int]]) -> None:
        """needs: chunk numbers of every group, in the order of their use."""
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
        """Close and delete what neither this group nor the next needs, and start to fetch what they need.

        Args:
            group: no pack of an earlier one is being read any more.
        """
        if group == self.group:
            return
        self.group = group
        kept = [*self.needs.get(group, []), *self.needs.get(group + 1, [])]
        # Closed first: a file that is still mapped would keep its disk space after its deletion.
        for number in self.opened.keys() - set(kept):
            del self.opened[number]
        self.files.delete_all_but(kept)
        for number in kept:
            if number not in self.opened:
                self.opened[number] = self.pool.submit(self.files.open, number, self.stopped)

    def wait_for(self, number: int) -> ChunkReader:
        """The reader of a chunk of this group or the next; see `ChunkFiles.open` for what it raises."""
        return self.opened[number].result()
