"""What a long task does while its processes work: publish a live Deck, and for training save checkpoints for
the next attempt.

Local runs do neither: a Deck has no reader there, and the next attempt finds the directory itself
(store.resumable_dir).
"""

import logging
import os
import tempfile
import time
from abc import ABC, abstractmethod
from functools import partial
from pathlib import Path

from flytekit import Deck, current_context
from flytekit.core.checkpointer import Checkpoint
from flytekit.exceptions.system import FlyteDownloadDataException, FlyteUploadDataException
from flytekit.exceptions.user import FlyteDataNotFoundException

from eagle3.engine.progress import Progress, Watch
from workflows.flyte import store

logger = logging.getLogger("eagle3")
PUBLISH_EVERY_S = 20.0
# Between two points of a job's curve.
POINT_EVERY_S = 5.0


class LiveDeck(Deck, ABC):  # type: ignore[misc]
    """A Deck whose content is drawn whenever it is written: by `show`, and by Flyte when the task has
    ended."""

    def __init__(self, name: str) -> None:
        super().__init__(name, auto_add_to_deck=not store.is_local())
        self.published_at = -PUBLISH_EVERY_S

    @property
    def html(self) -> str:
        return self.draw()

    @abstractmethod
    def draw(self) -> str:
        """The Deck now, as HTML below 1 MB."""

    def show(self) -> None:
        """Publish, at most every PUBLISH_EVERY_S seconds; an error of the store does not stop the work."""
        if (
            store.is_local()
            or time.monotonic() - self.published_at < PUBLISH_EVERY_S
            or not current_context().enable_deck
        ):
            return
        try:
            Deck.publish()
        except Exception as e:
            logger.warning("the Deck could not be published (%s); it is tried again", e)
        self.published_at = time.monotonic()


class TrainingDeck(LiveDeck):
    """Curves from metrics.jsonl."""

    def __init__(self, metrics_path: Path) -> None:
        super().__init__("training")
        self.metrics_path = metrics_path

    def draw(self) -> str:
        from eagle3.reports.live import render_live
        from eagle3.training.metrics import read_metrics

        # Before the first step there are none.
        return render_live(read_metrics(self.metrics_path)) if self.metrics_path.exists() else ""


class JobDeck(LiveDeck):
    """The progress of an engine's jobs, and their results at the end.

    Args:
        title: stage and shard.
    """

    def __init__(self, title: str) -> None:
        super().__init__("progress")
        self.title = title
        self.jobs: dict[str, list[Progress]] = {}
        self.results: dict[str, str] = {}
        self.note = ""
        self.show()

    def watch(self, label: str = "") -> Watch:
        """What shows the next job, here and on stderr; the label is the title where there is one job only."""
        points = self.jobs.setdefault(label or self.title, [])
        return Watch(label or self.title, partial(self._take, points))

    def finish(self, results: dict[str, str], note: str = "") -> None:
        """Show the results, name -> value; Flyte writes the Deck once more when the task ends."""
        self.results, self.note = results, note

    def _take(self, points: list[Progress], progress: Progress) -> None:
        # The last point is now; those before it keep their distance.
        if len(points) > 1 and progress.seconds - points[-2].seconds < POINT_EVERY_S:
            points.pop()
        points.append(progress)
        self.show()

    def draw(self) -> str:
        from eagle3.reports.live import render_jobs

        return render_jobs(self.title, self.jobs, self.results, self.note)


class AttemptCheckpoint:
    """The checkpoint file of one attempt, kept in the cluster's storage for the next one.

    Args:
        path: where the trainer writes it atomically.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.saved: tuple[int, int] | None = None
        self.store: Checkpoint | None = None if store.is_local() else _attempt_store()

    def restore(self) -> None:
        """Fetch what the previous attempt saved, and save it as this attempt's: the next one looks no
        further back.

        Where there is nothing to fetch, training starts again; another attempt would find even less.
        """
        if self.store is None or not self.store.prev_exists():
            return
        with tempfile.TemporaryDirectory(dir=self.path.parent) as directory:
            try:
                self.store.restore(directory)
                (Path(directory) / self.path.name).replace(self.path)
            except (FlyteDataNotFoundException, FlyteDownloadDataException, FileNotFoundError) as e:
                logger.warning("no checkpoint of the previous attempt (%s): training starts again", e)
                return
        logger.info("resuming from the checkpoint of the previous attempt")
        self.save()

    def save(self) -> None:
        """Upload the file if it is another than the one uploaded last; one object, so the store replaces it
        as a whole."""
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
    """Identifies a version of a file: modification time in ns, size in bytes."""
    stat = path.stat()
    return stat.st_mtime_ns, stat.st_size
