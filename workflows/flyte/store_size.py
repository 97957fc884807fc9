"""What the local store holds: `python -m workflows.flyte.store_size`, or `make store-size`."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from flyteidl.core.literals_pb2 import LiteralMap as Message
from flytekit.core.local_cache import LocalTaskCache
from flytekit.models.literals import LiteralMap

from eagle3.shards.hidden_states import MANIFEST_NAME
from workflows.flyte import store

# After the stage's name, outputs have twelve random digits, directories of a key (store.keyed_uri) a digest.
OUTPUT, KEYED = re.compile(r"(.+)-[0-9a-f]{12}"), re.compile(r"(.+)-[0-9a-f]{32}")


@dataclass(frozen=True)
class Held:
    """One directory of the store. kind: unfinished, unused (no cache entry leads there), or "" for what
    reruns take."""

    stage: str
    size_bytes: int
    kind: str


def survey(root: Path, used: set[str]) -> list[Held]:
    """Every directory of the store.

    Args:
        used: paths that cache entries lead to, files or directories.
    """
    leads = {Path(path) for path in used}
    tops = {
        root / path.relative_to(root).parts[0] for path in leads if path.is_relative_to(root) and path != root
    }
    return [
        Held(_stage(path), _size(path), _kind(path, path in tops))
        for path in sorted(root.glob("*"))
        if path.is_dir()
    ]


def _stage(path: Path) -> str:
    name = path.name.removesuffix(".unfinished")
    found = KEYED.fullmatch(name) or OUTPUT.fullmatch(name)
    return found[1] if found else name


def _kind(path: Path, is_used: bool) -> str:
    if path.name.endswith(".unfinished"):
        return "unfinished"
    if KEYED.fullmatch(path.name):
        # Hidden states stay in the directory of their key; answers are kept next to the shards made of them.
        holds_states = any(path.glob("chunk-*"))
        return "unfinished" if holds_states and not (path / MANIFEST_NAME).exists() else ""
    return "" if is_used else "unused"


def _size(path: Path) -> int:
    total = 0
    for file in path.rglob("*"):
        try:
            total += file.stat().st_size if file.is_file() and not file.is_symlink() else 0
        except OSError:  # a run finished it and took it away
            continue
    return total


def cached_paths() -> set[str]:
    """Every path that Flyte's local cache leads to."""
    LocalTaskCache.initialize()
    cache, found = LocalTaskCache._cache, set[str]()
    for key in cache:
        value = cache.get(key)
        if isinstance(value, bytes):
            outputs = LiteralMap.from_flyte_idl(Message.FromString(value))
            found.update(path for literal in outputs.literals.values() for path in store.paths_in(literal))
    return found


def render(root: Path, held: list[Held]) -> str:
    """The table for the terminal."""

    def size(keep: Callable[[Held], bool]) -> str:
        return f"{sum(h.size_bytes for h in held if keep(h)) / 1e6:>12,.1f} MB"

    lines = [f"{root}", ""]
    for stage in sorted({h.stage for h in held}):
        lines.append(f"{stage:<28}{size(lambda h, stage=stage: h.stage == stage)}")  # type: ignore[misc]
    lines += [
        "",
        f"{'total':<28}{size(lambda h: True)}   what make clean-cache frees",
        f"{'of it unfinished work':<28}{size(lambda h: h.kind == 'unfinished')}   the next run resumes it",
        f"{'of it in no cache entry':<28}{size(lambda h: h.kind == 'unused')}   "
        "of failed or newer runs: no rerun takes it",
    ]
    return "\n".join(lines)


def main() -> None:
    """Print the report."""
    root = store.root()
    held = survey(root, cached_paths()) if root.exists() else []
    print(render(root, held))


if __name__ == "__main__":
    main()
