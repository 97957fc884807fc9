"""Chunk files fetched from a remote store: stopped when nobody waits any more, damage named."""

import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fsspec
from fsspec.callbacks import Callback

from eagle3.files import Stopped, is_remote, retry
from eagle3.shards.hidden_states import check_chunk_size


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


class _StopCallback(Callback):  # type: ignore[misc]
    """Ends a long fetch between two blocks."""

    def __init__(self, stopped: threading.Event) -> None:
        super().__init__()
        self.stopped = stopped

    def relative_update(self, inc: int = 1) -> None:
        if self.stopped.is_set():
            raise Stopped


def fetch(chunk: Chunk, path: Path, stopped: threading.Event) -> None:
    """Copy a remote chunk to a local path.

    Raises:
        ValueError: if the store has no such file or one of another size.
        OSError: if the store fails again and again.
    """

    def get() -> None:
        store, remote_path = fsspec.core.url_to_fs(chunk.path)
        size = store.info(remote_path)["size"]
        if size is not None:
            check_chunk_size(size, chunk.entry, chunk.path)
        store.get_file(remote_path, str(path), callback=_StopCallback(stopped))

    try:
        retry(get, chunk.path, stopped)
    except FileNotFoundError:
        check_chunk_size(None, chunk.entry, chunk.path)
