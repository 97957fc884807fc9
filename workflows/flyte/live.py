"""Publish a live Deck while a long task runs, and save training checkpoints for the next attempt.

Local runs do neither: no one reads a Deck there, and the next run finds the directory (store.resumable_dir).
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
# Distance of the points of a job's curve.
POINT_EVERY_S = 5.0


class LiveDeck(Deck, ABC):  # type: ignore[misc]
    """A Deck that renders its content on each write: by `show`, and by Flyte at the end of the task."""

    def __init__(self, name: str) -> None:
        super().__init__(name, auto_add_to_deck=not store.is_local())
        self.published_at = -PUBLISH_EVERY_S

    @property
    def html(self) -> str:
        return self.draw()

    @abstractmethod
    def draw(self) -> str:
        """Render the Deck as HTML below 1 MB."""

    def show(self) -> None:
        """Publish, at most every PUBLISH_EVERY_S seconds. An error is only logged."""
        is_due = time.monotonic() - self.published_at >= PUBLISH_EVERY_S
        if store.is_local() or not is_due or not current_context().enable_deck:
            return
        try:
            Deck.publish()
        except Exception as e:
            logger.warning("the Deck could not be published (%s); trying again later", e)
        self.published_at = time.monotonic()


class TrainingDeck(LiveDeck):
    """Training curves from metrics.jsonl."""

    def __init__(self, metrics_path: Path) -> None:
        super().__init__("training")
        self.metrics_path = metrics_path

    def draw(self) -> str:
        from eagle3.reports.live import render_live
        from eagle3.training.metrics import read_metrics

        # The file does not exist before the first step.
        return render_live(read_metrics(self.metrics_path)) if self.metrics_path.exists() else ""


class JobDeck(LiveDeck):
    """The progress of an engine's jobs, and their results at the end. title: stage and shard."""

    def __init__(self, title: str) -> None:
        super().__init__("progress")
        self.title = title
        self.jobs: dict[str, list[Progress]] = {}
        self.results: dict[str, str] = {}
        self.note = ""
        self.show()

    def watch(self, label: str = "") -> Watch:
        """A callback that shows the next job's progress, here and on stderr. A single job needs no label."""
        points = self.jobs.setdefault(label or self.title, [])
        return Watch(label or self.title, partial(self._take, points))

    def finish(self, results: dict[str, str], note: str = "") -> None:
        """Set the results (name -> value); Flyte writes the Deck at the end of the task."""
        self.results, self.note = results, note

    def _take(self, points: list[Progress], progress: Progress) -> None:
        # The last point is always the newest; the points before it keep their distance.
        if len(points) > 1 and progress.seconds - points[-2].seconds < POINT_EVERY_S:
            points.pop()
        points.append(progress)
        self.show()

    def draw(self) -> str:
        from eagle3.reports.live import render_jobs

        return render_jobs(self.title, self.jobs, self.results, self.note)


class AttemptCheckpoint:
    """Copies a trainer's checkpoint file to the cluster's storage, for the next attempt of the task. The
    trainer must write `path` atomically."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.saved: tuple[int, int] | None = None
        self.store: Checkpoint | None = None if store.is_local() else _attempt_store()

    def restore(self) -> None:
        """Fetch the previous attempt's checkpoint, and save it again: the next attempt reads only this
        attempt's.

        Without a checkpoint training starts again, since another attempt would find none either.
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
        """Upload the file if it changed since the last upload. It is one object: stores replace it
        atomically."""
        if self.store is None or not self.path.exists() or state_of(self.path) == self.saved:
            return
        # The trainer may replace the file during the upload: a hard link keeps this version.
        try:
            with tempfile.TemporaryDirectory(dir=self.path.parent) as directory:
                copy = Path(directory) / self.path.name
                os.link(self.path, copy)
                state = state_of(copy)
                self.store.save(copy)
        except (FlyteUploadDataException, OSError) as e:
            logger.warning("the checkpoint could not be saved (%s); trying again with the next one", e)
            return
        self.saved = state


def _attempt_store() -> Checkpoint | None:
    try:
        return current_context().checkpoint
    except NotImplementedError:  # a pod started by hand has no checkpoint argument
        return None


def state_of(path: Path) -> tuple[int, int]:
    """Modification time in ns and size in bytes, which change with the content."""
    stat = path.stat()
    return stat.st_mtime_ns, stat.st_size
