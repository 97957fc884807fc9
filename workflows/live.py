"""What a training task does while its processes work: it publishes a live Deck and saves checkpoints for the next attempt.

Locally there is nobody to publish to, and the next attempt finds the directory itself (store.resumable_dir).
"""

import logging
import os
import tempfile
import time
from pathlib import Path

from flytekit import Deck, current_context
from flytekit.core.checkpointer import Checkpoint
from flytekit.exceptions.system import FlyteDownloadDataException, FlyteUploadDataException
from flytekit.exceptions.user import FlyteDataNotFoundException

from workflows import store

logger = logging.getLogger("eagle3")
PUBLISH_EVERY_S = 20.0


class LiveDeck(Deck):  # type: ignore[misc]
    """A Deck whose content is drawn from metrics.jsonl whenever it is written."""

    def __init__(self, metrics_path: Path) -> None:
        super().__init__("training")
        self.metrics_path = metrics_path
        self.published_at = -PUBLISH_EVERY_S

    @property
    def html(self) -> str:
        from eagle3.evaluation.live import render_live
        from eagle3.training.metrics import read_metrics

        if self.metrics_path.exists():  # before the first step there is none
            self._html = render_live(read_metrics(self.metrics_path))
        return str(self._html)

    def show(self) -> None:
        """Publish, at most every PUBLISH_EVERY_S seconds."""
        if store.is_local() or time.monotonic() - self.published_at < PUBLISH_EVERY_S:
            return
        self.published_at = time.monotonic()
        Deck.publish()


class AttemptCheckpoint:
    """The checkpoint file of one attempt, kept in the cluster's storage for the next one.

    Args:
        path: where the trainer writes it, whole or not at all.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.saved: tuple[int, int] | None = None
        self.store: Checkpoint | None = None if store.is_local() else _attempt_store()

    def restore(self) -> None:
        """Fetch what the previous attempt saved, and save it as this attempt's: the next one looks no further back.

        Where there is nothing to fetch, training starts afresh; another attempt would find even less.
        """
        if self.store is None or not self.store.prev_exists():
            return
        with tempfile.TemporaryDirectory(dir=self.path.parent) as directory:
            try:
                self.store.restore(directory)
                (Path(directory) / self.path.name).replace(self.path)
            except (FlyteDataNotFoundException, FlyteDownloadDataException, FileNotFoundError) as e:
                logger.warning("no checkpoint of the previous attempt (%s): training starts afresh", e)
                return
        logger.info("going on from the checkpoint of the previous attempt")
        self.save()

    def save(self) -> None:
        """Upload the file if it is another than the one uploaded last; one object, so the store replaces it as a whole."""
        if self.store is None or not self.path.exists() or state_of(self.path) == self.saved:
            return
        # The trainer may replace the file during the upload: a second name keeps this version.
        try:
            with tempfile.TemporaryDirectory(dir=self.path.parent) as directory:
                copy = Path(directory) / self.path.name
                os.link(self.path, copy)
                state = state_of(copy)
                self.store.save(copy)
        except (FlyteUploadDataException, OSError) as e:
            logger.warning("the checkpoint could not be saved (%s); the next one is tried again", e)
            return
        self.saved = state


def _attempt_store() -> Checkpoint | None:
    try:
        return current_context().checkpoint
    except NotImplementedError:  # a pod started by hand, without the argument that names it
        return None


def state_of(path: Path) -> tuple[int, int]:
    """What tells one version of a file from the next: modification time in ns, size in bytes."""
    stat = path.stat()
    return stat.st_mtime_ns, stat.st_size
