"""Remove the local store, which has the outputs of local runs: `make clean-cache`.

EAGLE3_STORE may name another directory by mistake: one with anything else in it is refused.
"""

import shutil
import sys
from pathlib import Path

from workflows.flyte import store
from workflows.flyte.store_size import KEYED, OUTPUT

MAX_NAMED = 3


def clean(root: Path) -> str:
    """Remove the store and return a message.

    Raises:
        ValueError: if it has files or directories that no run made.
    """
    if not root.exists():
        return f"{root} is not there: nothing to remove"
    names = [path.name for path in root.iterdir() if not _is_ours(path)] if root.is_dir() else [root.name]
    if names:
        more = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
        raise ValueError(
            "a store must hold directories of stages only (train_draft-0123456789ab), "
            f"{root} holds {', '.join(sorted(names)[:MAX_NAMED])}{more}; "
            "correct EAGLE3_STORE, or move these away"
        )
    shutil.rmtree(root)
    return f"{root} is removed"


def _is_ours(path: Path) -> bool:
    """True for an output, the directory of a key and its lock."""
    name = path.name.removesuffix(".lock").removesuffix(".unfinished")
    if path.is_symlink() or path.is_dir() == path.name.endswith(".lock"):
        return False
    return bool(OUTPUT.fullmatch(name) or KEYED.fullmatch(name))


if __name__ == "__main__":
    try:
        print(clean(store.root()))
    except ValueError as e:
        sys.exit(str(e))
