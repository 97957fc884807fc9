"""Files by local path or fsspec URL: read, written and looked for alike; a store that fails is tried again.

Credentials are the store's own environment variables.
"""

import hashlib
import logging
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import fsspec
from fsspec.implementations.local import LocalFileSystem

from eagle3.uris import redact, redact_secrets, redact_text

logger = logging.getLogger(__name__)
T = TypeVar("T")
TRIES, FIRST_PAUSE_S = 5, 0.5
READ_SIZE = 1 << 20


def digest_of(*parts: str | bytes) -> str:
    """SHA-256 over the parts, each preceded by its length, as 32 hex digits."""
    sha = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        sha.update(len(data).to_bytes(8, "little"))
        sha.update(data)
    return sha.hexdigest()[:32]


class Stopped(Exception):
    """Nobody waits for the result any more."""


def is_remote(place: str | Path) -> bool:
    """Whether it is a URL."""
    return "://" in str(place)


@redact_secrets()
def retry(action: Callable[[], T], url: str, stopped: threading.Event | None = None) -> T:
    """Call `action` until it succeeds, waiting longer each time; a missing or wrong file is not waited for.

    Raises:
        FileNotFoundError, ValueError: at once.
        ConnectionError: after the last try; names the URL as it may be shown.
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
            told = f"{type(e).__name__}: {redact_text(str(e))}"
            if attempt == TRIES - 1:
                remedy = "check the store and the free disk space"
                raise ConnectionError(
                    f"{redact(url)} could not be reached in {TRIES} tries ({told}); {remedy}"
                ) from e
            logger.warning("%s: %s, trying again", redact(url), told)
            if stopped.wait(FIRST_PAUSE_S * 2**attempt):
                raise Stopped from e
    raise AssertionError


def _store_of(url: str) -> tuple[Any, str]:
    """The file system of a URL, and the path in it."""
    # Everywhere else a directory is there once something lies in it.
    store, path = fsspec.core.url_to_fs(url, **({"auto_mkdir": True} if url.startswith("file://") else {}))
    return store, path


def read_bytes(place: str) -> bytes | None:
    """What a file holds; None if there is none.

    Raises:
        OSError: if it cannot be read.
    """

    def read() -> bytes:
        store, path = _store_of(place)
        return bytes(store.cat_file(path))

    try:
        return retry(read, place) if is_remote(place) else Path(place).read_bytes()
    except FileNotFoundError:
        return None


def file_size(place: str) -> int | None:
    """Size in bytes; None if there is no such file."""

    def look() -> int:
        store, path = _store_of(place)
        store.invalidate_cache()
        return int(store.info(path)["size"])

    try:
        return retry(look, place) if is_remote(place) else Path(place).stat().st_size
    except FileNotFoundError:
        return None


def list_files(place: str, pattern: str) -> list[str]:
    """The files right in a directory whose names match a glob pattern, sorted; none where there is no such directory."""

    def look() -> list[str]:
        store, path = _store_of(place)
        store.invalidate_cache()
        return [f"{place}/{found.rpartition('/')[2]}" for found in store.glob(f"{path}/{pattern}")]

    return sorted(retry(look, place) if is_remote(place) else map(str, Path(place).glob(pattern)))


def file_version(store: Any, path: str) -> str:
    """What changes when a file does: a store's own strong entity tag where it has one; else a hash, at the price of reading it.

    Args:
        store: fsspec file system. path: in it.

    Raises:
        ValueError: if it cannot be read; names it.
        ConnectionError: where another try may help.
    """
    if not isinstance(store, LocalFileSystem):
        info = store.info(path)
        tag = str(info.get("ETag") or info.get("etag") or "")
        if tag and not tag.startswith("W/"):
            return digest_of(tag, str(info.get("size")))
    sha = hashlib.sha256()
    try:
        with store.open(path, "rb") as file:
            while block := file.read(READ_SIZE):
                sha.update(block)
    except (ConnectionError, TimeoutError):
        raise
    except OSError as e:
        raise ValueError(f"{redact(path)} cannot be read ({e}); give a readable file") from e
    return sha.hexdigest()[:32]


def fetch_file(place: str, out: Path) -> None:
    """Copy a file to a local path.

    Raises:
        FileNotFoundError: if it is not there.
        ConnectionError: if the store does not answer.
    """

    def get() -> None:
        store, path = _store_of(place)
        store.get_file(path, str(out))

    retry(get, place)


def write_bytes(place: str, data: bytes) -> None:
    """Write a file whole or not at all.

    Raises:
        OSError: if that cannot be done; names it.
    """
    if not is_remote(place):
        part = Path(f"{place}.part")
        try:
            part.write_bytes(data)
            part.replace(place)
        except OSError as e:  # a full disk's does not say which file
            with suppress(OSError):
                part.unlink()
            raise OSError(
                f"{place} could not be written ({e}); check the free disk space and run again"
            ) from e
        return

    def write() -> None:
        store, path = _store_of(place)
        store.pipe_file(path, data)

    retry(write, place)


def move_file(path: Path, place: str) -> None:
    """Move a local file to a place, where it appears whole or not at all.

    Raises:
        OSError: if the store does not take it, or has another size of it afterwards.
    """
    if not is_remote(place):
        path.replace(place)
        return

    def put() -> None:
        store, remote_path = _store_of(place)
        store.put_file(str(path), remote_path)

    retry(put, place)
    found, size = file_size(place), path.stat().st_size
    if found != size:
        raise OSError(
            f"{redact(place)} should have {size} bytes after its upload, the store says {found}; run again"
        )
    path.unlink()


def remove_file(place: str) -> None:
    """Remove a file; none there is fine."""
    if not is_remote(place):
        Path(place).unlink(missing_ok=True)
        return

    def remove() -> None:
        store, path = _store_of(place)
        store.rm_file(path)

    with suppress(FileNotFoundError):
        retry(remove, place)
