"""Reading from a remote store through fsspec: retried, stopped when nobody waits any more, damage named."""

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import fsspec
from fsspec.callbacks import Callback

from eagle3.shards import check_chunk_size

logger = logging.getLogger(__name__)
T = TypeVar("T")
TRIES, FIRST_PAUSE_S = 5, 0.5


@dataclass(frozen=True)
class Chunk:
    """One chunk file of a shard. path: local path or URL. entry: its entry in the manifest."""

    path: str
    entry: dict[str, Any]

    @property
    def is_remote(self) -> bool:
        """Whether it has to be fetched."""
        return "://" in self.path

    @property
    def disk_bytes(self) -> int:
        """What it takes in the cache directory, bytes."""
        return int(self.entry["bytes"]) if self.is_remote else 0


class Stopped(Exception):
    """The reader of the packs is gone."""


def try_often(action: Callable[[], T], url: str, stopped: threading.Event | None = None) -> T:
    """Call `action` until it succeeds, waiting longer each time; a missing or wrong file is not waited for.

    Raises:
        FileNotFoundError, ValueError: at once.
        OSError: after the last try; names the URL.
        Stopped: if `stopped` was set meanwhile.
    """
    stopped = stopped or threading.Event()
    for attempt in range(TRIES):
        try:
            return action()
        except (FileNotFoundError, ValueError, Stopped):
            raise
        # Not every store's connection errors are OSErrors: botocore's are not.
        except Exception as e:
            if attempt == TRIES - 1:
                raise OSError(f"{url} could not be read in {TRIES} tries ({e!r}); check the store and the free disk space") from e
            logger.warning("%s: %r, trying again", url, e)
            if stopped.wait(FIRST_PAUSE_S * 2**attempt):
                raise Stopped from e
    raise AssertionError


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
        try_often(get, chunk.path, stopped)
    except FileNotFoundError:
        check_chunk_size(None, chunk.entry, chunk.path)
