"""Where outputs lie, and when a local cache entry still counts.

Flyte's local cache keeps the paths a task returned and copies nothing. So local outputs go to a persistent store of our own
(`EAGLE3_STORE`, by default ~/.cache/eagle3), in a new directory for each run of a task: two runs at once never share one.
A cache entry whose files are gone counts as a miss (flyteorg/flyte#4672). In a pod, outputs go to its working directory.
"""

import hashlib
import os
import uuid
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgpack
from flytekit import current_context
from flytekit.core.context_manager import FlyteContextManager
from flytekit.core.local_cache import LocalTaskCache
from flytekit.models.literals import Literal, LiteralMap

from workflows import journal

DEFAULT_STORE = "~/.cache/eagle3"


def is_local() -> bool:
    """True on a laptop, False in a pod."""
    state = FlyteContextManager.current_context().execution_state
    return state is None or state.mode is None or bool(state.is_local_execution())


def new_dir(name: str) -> Path:
    """Make a new, empty directory for one output."""
    root = Path(os.environ.get("EAGLE3_STORE") or DEFAULT_STORE) if is_local() else Path(current_context().working_directory)
    path = (root.expanduser() / f"{name}-{uuid.uuid4().hex[:12]}").resolve()
    path.mkdir(parents=True)
    return path


def file_digest(*paths: str | Path) -> str:
    """SHA-256 over the files' contents, in order, as 32 hex digits."""
    sha = hashlib.sha256()
    for path in paths:
        with open(path, "rb") as f:
            sha.update(hashlib.file_digest(f, "sha256").digest())
    return sha.hexdigest()[:32]


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
    if "://" in path:
        return True
    local = Path(path)
    return any(local.iterdir()) if local.is_dir() else local.exists()


def install_cache_guard() -> None:
    """Make Flyte's local cache forget entries whose files are gone, and tell the journal of each hit. Safe to call again."""
    look_up = LocalTaskCache.get
    if getattr(look_up, "guarded", False):
        return

    def get(task_name: str, *args: Any, **kwargs: Any) -> LiteralMap | None:
        with journal.timer() as seconds:
            outputs = look_up(task_name, *args, **kwargs)
            if outputs is None or not all(is_there(p) for literal in outputs.literals.values() for p in paths_in(literal)):
                return None
        journal.note(task_name, seconds(), cached=True)
        return outputs

    get.guarded = True  # type: ignore[attr-defined]
    LocalTaskCache.get = staticmethod(get)


install_cache_guard()
