"""Where a hidden-state chunk lies on the local disk until it is whole, locked against a second writer of the same shard."""

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import gettempdir

from eagle3.files import digest_of, is_remote


class Staging:
    """One writer's directory for one chunk at a time.

    dir: beside the chunks of a local shard, from where files are moved without a copy; for a URL in the temporary directory.
    """

    def __init__(self, out: str) -> None:
        """Take the place over from a writer that was killed.

        Args:
            out: directory or fsspec URL of the shard.

        Raises:
            OSError: if another writer holds it, or it cannot be written.
        """
        # Dot files are no part of a directory for Flyte's uploads.
        self.dir = Path(gettempdir(), f"eagle3-{digest_of(out)}") if is_remote(out) else Path(out, ".chunk")
        while not self._take_lock(out):
            pass
        self._clear()

    def _take_lock(self, out: str) -> bool:
        """Whether the lock is the one that others see; its last owner may just have removed it."""
        path = self.dir / "lock"
        self.dir.mkdir(parents=True, exist_ok=True)
        try:
            self.lock = open(path, "w")  # noqa: SIM115  held until close
        except FileNotFoundError:
            return False
        try:
            fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as e:
            self.lock.close()
            raise OSError(
                f"{out}: another process is writing this shard; wait until it has ended and run again"
            ) from e
        if path.exists() and os.path.samestat(os.fstat(self.lock.fileno()), path.stat()):
            return True
        self.lock.close()
        return False

    @contextmanager
    def file(self) -> Iterator[Path]:
        """A path for one chunk; nothing is left there afterwards."""
        try:
            yield self.dir / "chunk"
        finally:
            self._clear()

    def close(self) -> None:
        """Remove it and let others in."""
        if not self.lock.closed:
            shutil.rmtree(self.dir, ignore_errors=True)
            self.lock.close()

    def _clear(self) -> None:
        """Remove the chunk, and what safetensors wrote it to before it gave it its name."""
        for path in self.dir.iterdir():
            if path.name != "lock":
                path.unlink()
