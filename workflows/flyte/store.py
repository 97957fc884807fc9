"""Where outputs are, and when a local cache entry still counts.

Flyte's local cache keeps paths and copies no files. So local outputs go to a persistent store
(`EAGLE3_STORE`, by default ~/.cache/eagle3), in a new directory for each execution of a task. Work that
resumes after a kill has a directory named by its key: training until it is done, hidden states for good. A
cache entry without its files counts as a miss (flyteorg/flyte#4672). In a pod, outputs go to its working
directory.
"""

import hashlib
import logging
import os
import shutil
import time
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgpack
from flytekit import current_context
from flytekit.configuration import DataConfig
from flytekit.core.context_manager import FlyteContextManager
from flytekit.core.local_cache import LocalTaskCache
from flytekit.models.literals import Literal, LiteralMap
from flytekit.types.directory import FlyteDirectory
from flytekit.types.file import FlyteFile

from eagle3.files import copy_file, is_remote, try_lock
from eagle3.uris import base_name, check_uri, redact
from workflows.flyte import journal

logger = logging.getLogger("eagle3")
DEFAULT_STORE = "~/.cache/eagle3"
LOCK_PAUSE_S = 1.0


def is_local() -> bool:
    """True on a laptop, False in a pod."""
    state = FlyteContextManager.current_context().execution_state
    return state is None or state.mode is None or bool(state.is_local_execution())


def new_dir(name: str) -> Path:
    """Make a new, empty directory for one output."""
    path = root() / f"{name}-{uuid.uuid4().hex[:12]}"
    try:
        path.mkdir(parents=True)
    except OSError as e:
        raise OSError(
            f"no output can be written to {path.parent} ({e}); set EAGLE3_STORE to a directory that can be"
        ) from e
    return path


def root() -> Path:
    """The directory of all local outputs."""
    if not is_local():
        return Path(current_context().working_directory).resolve()
    path = os.environ.get("EAGLE3_STORE") or DEFAULT_STORE
    if is_remote(path):
        raise ValueError(
            f"EAGLE3_STORE must be a directory for local runs, got {path}; unset it, or run with --remote"
        )
    return Path(path).expanduser().resolve()


@contextmanager
def resumable_dir(name: str, key: str) -> Iterator[Path]:
    """Yield a directory in which work of the same key resumes after a kill.

    A second run of the key at the same time, and every pod, get a new directory instead. Call `finish` when
    the work is done; unfinished work stays for the next run.
    """
    path = root() / f"{name}-{key}.unfinished"
    if not is_local() or (lock := try_lock(f"{path}.lock")) is None:
        yield new_dir(name)
        return
    try:
        path.mkdir(exist_ok=True)
        yield path
    finally:
        if not path.exists():  # finished and renamed
            Path(lock.lock_file).unlink()
        lock.release()


def finish(path: Path, name: str) -> Path:
    """Rename a directory of `resumable_dir` to a finished output; the next run of its key starts again."""
    return path if not path.name.endswith(".unfinished") else path.rename(new_dir(name))


@contextmanager
def keyed_uri(name: str, key: str) -> Iterator[str]:
    """Yield where the output of a key belongs, for every attempt and run: a directory here, a URL in the
    cluster's storage.

    Here one process at a time has it, others wait. In a pod it is under EAGLE3_STORE if that is a URL, else
    under Flyte's raw output prefix, <configured prefix>/<two characters>/<execution, node and attempt>,
    without its last two parts.
    """
    if is_local():
        path = root() / f"{name}-{key}"
        if (lock := try_lock(f"{path}.lock")) is None:
            logger.warning("another process is writing %s: waiting for it", path)
        while lock is None:
            time.sleep(LOCK_PAUSE_S)
            lock = try_lock(f"{path}.lock")
        try:
            path.mkdir(exist_ok=True)
            yield str(path)
        finally:
            lock.release()
        return
    prefix = FlyteContextManager.current_context().file_access.raw_output_prefix
    base = check_uri(os.environ.get("EAGLE3_STORE", ""))
    if not is_remote(base):
        base = prefix.rstrip("/").rsplit("/", 2)[0]
    yield f"{base.rstrip('/')}/eagle3/{name}-{key}"


def free_bytes() -> int:
    """Room on the disk of the local outputs."""
    root().mkdir(parents=True, exist_ok=True)
    return shutil.disk_usage(root()).free


def taken(name: str, key: str) -> int:
    """Bytes in the local directory of `keyed_uri`."""
    return sum(f.stat().st_size for f in (root() / f"{name}-{key}").rglob("*") if f.is_file())


def location(output: FlyteDirectory | FlyteFile) -> str:
    """An output's URL in the cluster's storage, or its local path, without fetching it."""
    return str(output.remote_source or output.path)


def fetch(file: FlyteFile) -> str:
    """The local path of a file that a recipe names.

    flytekit names its copy after the whole URL; a signed URL is fetched here, and the copy named after its
    path alone.

    Raises:
        ValueError: if it is not there, or its URL carries credentials.
        ConnectionError: where another try may help.
    """
    uri = check_uri(location(file))
    if redact(uri) == uri:
        return str(file.download())
    out = Path(FlyteContextManager.current_context().file_access.get_random_local_directory()) / base_name(
        uri
    )
    try:
        copy_file(uri, out)
    except FileNotFoundError as e:
        raise ValueError(f"{redact(uri)} is not there, or its signature has expired; give a new URL") from e
    return str(out)


def share_credentials() -> None:
    """Give flytekit's S3 endpoint and keys to fsspec, in this process and its children."""
    s3 = DataConfig.auto().s3
    names = {
        "AWS_ENDPOINT_URL": s3.endpoint,
        "AWS_ACCESS_KEY_ID": s3.access_key_id,
        "AWS_SECRET_ACCESS_KEY": s3.secret_access_key,
    }
    for name, value in names.items():
        if value:
            os.environ.setdefault(name, value)


def digest_of_digests(digests: Iterable[str]) -> str:
    """One digest over several, in order."""
    return hashlib.sha256(" ".join(digests).encode()).hexdigest()[:32]


def paths_in(literal: Literal) -> Iterator[str]:
    """Every file and directory path inside a Flyte literal, dataclasses included."""
    if literal.collection:
        for item in literal.collection.literals:
            yield from paths_in(item)
    elif literal.map:
        for item in literal.map.literals.values():
            yield from paths_in(item)
    elif literal.scalar and literal.scalar.blob:
        yield literal.scalar.blob.uri
    elif literal.scalar and literal.scalar.union:
        yield from paths_in(literal.scalar.union.value)
    elif literal.scalar and literal.scalar.binary:
        yield from _paths_in_value(msgpack.loads(literal.scalar.binary.value, strict_map_key=False))


def _paths_in_value(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        if isinstance(value.get("path"), str) and set(value) <= {"path", "metadata"}:
            yield value["path"]
        for item in value.values():
            yield from _paths_in_value(item)
    elif isinstance(value, list):
        for item in value:
            yield from _paths_in_value(item)


def is_there(path: str) -> bool:
    """True for anything remote, an existing file, or a directory that is not empty."""
    if is_remote(path):
        return True
    local = Path(path)
    return any(local.iterdir()) if local.is_dir() else local.exists()


def install_cache_guard() -> None:
    """Make entries without files a miss in Flyte's local cache, and note each hit. Safe to call twice."""
    look_up = LocalTaskCache.get
    if getattr(look_up, "guarded", False):
        return

    def get(task_name: str, *args: Any, **kwargs: Any) -> LiteralMap | None:
        with journal.timer() as seconds:
            outputs = look_up(task_name, *args, **kwargs)
            if outputs is None or not all(
                is_there(p) for literal in outputs.literals.values() for p in paths_in(literal)
            ):
                return None
        journal.note(task_name, seconds(), cached=True)
        return outputs

    get.guarded = True  # type: ignore[attr-defined]
    LocalTaskCache.get = staticmethod(get)


install_cache_guard()
