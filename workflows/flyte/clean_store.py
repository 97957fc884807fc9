"""Remove the local store, all outputs of local runs: `make clean-cache`.

Only a directory that has a store's own directories and nothing else is removed: EAGLE3_STORE may name another
by mistake.
"""

import shutil
import sys
from pathlib import Path

from workflows.flyte import store
from workflows.flyte.store_size import KEYED, OUTPUT

MAX_NAMED = 3


def clean(root: Path) -> str:
    """Remove the store; says what came of it.

    Raises:
        ValueError: if it has something that no run has put there; names it.
    """
    if not root.exists():
        return f"{root} is not there: nothing to remove"
    if (
        others := sorted(path.name for path in root.iterdir() if not _is_ours(path))
        if root.is_dir()
        else [root.name]
    ):
        named = ", ".join(others[:MAX_NAMED]) + (
            f" and {len(others) - MAX_NAMED} more" if len(others) > MAX_NAMED else ""
        )
        raise ValueError(
            f"a store must hold directories of stages only (train_draft-0123456789ab), {root} holds {named}; correct "
            "EAGLE3_STORE, or move that away"
        )
    shutil.rmtree(root)
    return f"{root} is removed"


def _is_ours(path: Path) -> bool:
    """Whether it is an output, the directory of a key, finished or not, or that directory's lock."""
    name = path.name.removesuffix(".lock").removesuffix(".unfinished")
    if path.is_symlink() or path.is_dir() == path.name.endswith(".lock"):
        return False
    return bool(OUTPUT.fullmatch(name) or KEYED.fullmatch(name))


if __name__ == "__main__":
    try:
        print(clean(store.root()))
    except ValueError as e:
        sys.exit(str(e))
