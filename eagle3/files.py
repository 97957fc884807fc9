"""Files by local path or fsspec URL: hash, read, write, copy, list and lock.

Whatever is written appears atomically. A store that fails is asked again. A store's credentials are its own
environment variables. `uri` is a path or a URL everywhere.
"""

import hashlib
import logging
import os
import shutil
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, TypeVar

import fsspec
from filelock import FileLock, Timeout
from fsspec.implementations.local import LocalFileSystem

from eagle3.errors import StoreError
from eagle3.uris import redact, redact_secrets, redact_text

logger = logging.getLogger(__name__)
T = TypeVar("T")
TRIES = 5
FIRST_PAUSE_S = 0.5
LOCK_TIMEOUT_S = 0.2  # the last owner may just be removing the lock's directory


def digest_of(*parts: str | bytes) -> str:
    """SHA-256 over the parts, each preceded by its length, as 32 hex digits."""
    sha = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        sha.update(len(data).to_bytes(8, "little"))
        sha.update(data)
    return sha.hexdigest()[:32]


def file_sha256(uri: str | Path) -> str:
    """SHA-256 of a file, 64 hex digits."""

    def read() -> str:
        with fsspec.open(str(uri), "rb") if is_remote(uri) else open(uri, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    return retry(read, str(uri)) if is_remote(uri) else read()


def files_digest(*paths: str | Path) -> str:
    """One digest over the contents of files, in order, 32 hex digits."""
    digests = [bytes.fromhex(file_sha256(path)) for path in paths]
    return hashlib.sha256(b"".join(digests)).hexdigest()[:32]


def file_version(store: Any, path: str) -> str:
    """A text that changes when a file does: from a store's strong entity tag, else a hash of the whole file.

    Args:
        store: fsspec file system.
        path: in it.

    Raises:
        ValueError: if the file cannot be read; names it.
        ConnectionError: where another try may succeed.
    """
    if not isinstance(store, LocalFileSystem):
        info = store.info(path)
        tag = str(info.get("ETag") or info.get("etag") or "")
        if tag and not tag.startswith("W/"):
            return digest_of(tag, str(info.get("size")))
    try:
        with store.open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()[:32]
    except (ConnectionError, TimeoutError):
        raise
    except OSError as e:
        raise ValueError(f"{redact(path)} cannot be read ({e}); give a readable file") from e


def is_remote(uri: str | Path) -> bool:
    """Whether it is a URL."""
    return "://" in str(uri)


class Stopped(Exception):
    """Nothing waits for the result any more."""


@redact_secrets()
def retry(action: Callable[[], T], url: str, stopped: threading.Event | None = None) -> T:
    """Call `action` until it succeeds, with growing pauses.

    Raises:
        FileNotFoundError, ValueError: at once.
        StoreError: after the last try; names the URL without secrets.
        Stopped: if `stopped` was set meanwhile.
    """
    stopped = stopped or threading.Event()
    for attempt in range(TRIES):
        try:
            return action()
        except (FileNotFoundError, ValueError, Stopped):
            raise
        except Exception as e:  # not only OSError: botocore's connection errors are none
            text = f"{type(e).__name__}: {redact_text(str(e))}"
            if attempt == TRIES - 1:
                remedy = "check the store and the free disk space"
                raise StoreError(
                    f"{redact(url)} could not be reached in {TRIES} tries ({text}); {remedy}"
                ) from e
            logger.warning("%s: %s, trying again", redact(url), text)
            if stopped.wait(FIRST_PAUSE_S * 2**attempt):
                raise Stopped from e
    raise AssertionError


def _in_store(url: str, action: Callable[[Any, str], T]) -> T:
    """Call `action` with the file system of a URL and the path in it, several times if it fails."""

    def attempt() -> T:
        # Other stores make a directory with its first file.
        options = {"auto_mkdir": True} if url.startswith("file://") else {}
        store, path = fsspec.core.url_to_fs(url, **options)
        store.invalidate_cache()
        return action(store, path)

    return retry(attempt, url)


def read_bytes(uri: str) -> bytes | None:
    """The content of a file; None if it does not exist.

    Raises:
        OSError: if it cannot be read.
    """
    try:
        if is_remote(uri):
            return _in_store(uri, lambda store, path: bytes(store.cat_file(path)))
        return Path(uri).read_bytes()
    except FileNotFoundError:
        return None


def file_size(uri: str) -> int | None:
    """Size in bytes; None if there is no such file."""
    try:
        if is_remote(uri):
            return _in_store(uri, lambda store, path: int(store.info(path)["size"]))
        return Path(uri).stat().st_size
    except FileNotFoundError:
        return None


def list_names(uri: str) -> list[str]:
    """Names of the files and directories in a directory, sorted; none if it does not exist."""
    try:
        if is_remote(uri):
            paths = _in_store(uri, lambda store, path: list(map(str, store.ls(path, detail=False))))
            return sorted({path.rstrip("/").rpartition("/")[2] for path in paths})
        return sorted(path.name for path in Path(uri).iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []


def list_files(uri: str, pattern: str) -> list[str]:
    """The files of a directory that match a glob pattern, sorted; none if the directory does not exist."""
    return [f"{uri}/{name}" for name in list_names(uri) if fnmatch(name, pattern)]


@contextmanager
def atomic_path(path: str | Path, shared: bool = False) -> Iterator[Path]:
    """Yield a path next to it, which replaces it at the end. After an error or a kill the old file is intact.

    Args:
        path: file or directory.
        shared: several processes may write it at once. Otherwise the next writer removes what a kill left.
    """
    part = Path(f"{path}.{uuid.uuid4().hex}.part" if shared else f"{path}.part")
    _remove(part)
    try:
        yield part
        part.replace(path)
    finally:
        _remove(part)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def write_bytes(uri: str | Path, data: bytes) -> None:
    """Write a file atomically.

    Raises:
        OSError: if it cannot be written; names it.
    """
    if is_remote(uri):
        _in_store(str(uri), lambda store, path: store.pipe_file(path, data))
        return
    try:
        with atomic_path(uri, shared=True) as part:
            part.write_bytes(data)
    except OSError as e:  # a full disk's error does not name the file
        raise OSError(f"{uri} could not be written ({e}); check the free disk space and run again") from e


def create_file(uri: str, data: bytes) -> None:
    """Write a file that must not exist; of several writers one succeeds (on a local disk and S3 at least).

    Raises:
        FileExistsError: if it exists with other content. The same content may be of an earlier attempt.
        StoreError: if the store does not take it.
    """
    try:
        if is_remote(uri):
            store, path = fsspec.core.url_to_fs(uri)
            store.invalidate_cache()
            store.pipe_file(path, data, mode="create")
        else:
            part = Path(f"{uri}.{uuid.uuid4().hex}.part")
            part.write_bytes(data)
            try:
                os.link(part, uri)
            finally:
                part.unlink()
    except Exception as e:  # not only OSError: botocore's connection errors are none
        found = read_bytes(uri)
        if found is None:
            raise StoreError(f"{uri} could not be written ({e!r}); check the store and run again") from e
        if found != data:
            raise FileExistsError(uri) from e


def copy_file(source: str | Path, out: str | Path) -> None:
    """Copy a file atomically. One of the two must be a local path.

    Raises:
        FileNotFoundError: if the source does not exist.
        StoreError: if a store does not answer, or has another size of the file afterwards.
    """
    if is_remote(out):
        _upload(Path(source), str(out))
        return
    with atomic_path(out, shared=True) as part:
        if is_remote(source):
            _in_store(str(source), lambda store, path: store.get_file(path, str(part)))
        else:
            shutil.copyfile(source, part)


def _upload(path: Path, url: str) -> None:
    _in_store(url, lambda store, remote_path: store.put_file(str(path), remote_path))
    found = file_size(url)
    size = path.stat().st_size
    if found != size:
        raise StoreError(
            f"{redact(url)} must have {size} bytes after its upload, the store has {found}; run again"
        )


def move_file(path: Path, uri: str) -> None:
    """Move a local file atomically; raises as `copy_file` does."""
    if not is_remote(uri):
        path.replace(uri)
        return
    _upload(path, uri)
    path.unlink()


def remove_file(uri: str) -> None:
    """Remove a file, if it exists."""
    with suppress(FileNotFoundError):
        if is_remote(uri):
            _in_store(uri, lambda store, path: store.rm_file(path))
        else:
            Path(uri).unlink()


def try_lock(path: str | Path) -> FileLock | None:
    """Hold a lock file until `release` or this process ends; None if another holds it. The file stays."""
    lock = FileLock(path, thread_local=False)
    try:
        lock.acquire(timeout=LOCK_TIMEOUT_S)
    except Timeout:
        return None
    return lock
