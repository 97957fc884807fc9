"""Progress of a long job: a Report counts in the engine process, a Watch shows it in the caller's.

A Report sends a Progress at most once a second. A Watch draws a bar if stderr is a terminal, otherwise it
logs a line every LOG_EVERY_S; it may also pass each Progress to a Deck.
"""

import logging
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tqdm import tqdm

logger = logging.getLogger(__name__)
REPORT_EVERY_S = 1.0
LOG_EVERY_S = 30.0
# Shorter jobs need no bar.
BAR_AFTER_S = 2.0


@dataclass(frozen=True)
class Progress:
    """State of a job at one time.

    done, total: in `unit`, a plural noun. kept: part of `done` from an earlier attempt. tokens: computed or
    generated in this attempt, in unfinished answers too if the engine knows them. conversations: rows
    finished in this attempt. seconds: since the job started, without the engine's start.
    """

    done: int
    total: int
    unit: str
    kept: int
    tokens: int
    conversations: int
    seconds: float

    @property
    def seconds_left(self) -> float | None:
        """Estimate from this attempt's mean rate; None until something is done."""
        new = self.done - self.kept
        return (self.total - self.done) * self.seconds / new if new > 0 else None

    def tokens_per_s(self, earlier: "Progress | None" = None) -> float:
        """Rate since an earlier Progress, by default since the job started."""
        tokens = self.tokens - (earlier.tokens if earlier else 0)
        seconds = self.seconds - (earlier.seconds if earlier else 0.0)
        return tokens / max(seconds, 1e-3)


def progress_text(progress: Progress, earlier: Progress | None = None) -> str:
    """Describe progress in one line, with the rate since `earlier`."""
    parts = [f"{progress.done:,} of {progress.total:,} {progress.unit}"]
    if progress.conversations != progress.done:
        parts.append(f"{progress.conversations:,} conversations")
    parts.append(f"{progress.tokens_per_s(earlier):,.0f} tokens/s")
    if progress.seconds_left is not None:
        parts.append(f"{duration_text(progress.seconds_left)} left")
    return ", ".join(parts)


def duration_text(seconds: float) -> str:
    """Format a duration as 40 s, 12 min or 3.2 h."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 90 * 60 else f"{seconds / 3600:.1f} h"


class Report:
    """Counts an engine's work; sends a Progress every REPORT_EVERY_S and when the job succeeds.

    It is a context manager around the job. One thread counts; another may exit the context, after which
    nothing is sent.
    """

    def __init__(
        self, send: Callable[[Progress], None] | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.send = send
        self.clock = clock
        self.tokens = self.counted_tokens = self.conversations = self.total = self.kept = 0
        self.unit = ""
        self.done: Callable[[], int] | None = None
        self.started_at = self.sent_at = 0.0
        self.lock = threading.Lock()

    def start(self, total: int, unit: str, done: Callable[[], int]) -> None:
        """Start the clock. `done` is called about once a second and includes work of an earlier attempt."""
        self.total = total
        self.unit = unit
        self.done = done
        self.kept = done()
        self.started_at = self.sent_at = self.clock()

    def add(self, tokens: int, conversations: int) -> None:
        """Count tokens of a finished answer or captured row, and conversations that it finished."""
        self.counted_tokens += tokens
        self.tokens = max(self.tokens, self.counted_tokens)
        self.conversations += conversations

    def send_if_due(self, tokens: Callable[[], int] | None = None) -> None:
        """Send a Progress if one is due; only then call `tokens`, which counts unfinished answers too."""
        if self.send is None or self.clock() - self.sent_at < REPORT_EVERY_S:
            return
        if tokens is not None:
            self.tokens = max(self.tokens, tokens())
        self._send()

    def _send(self) -> None:
        with self.lock:
            if self.send is None or self.done is None:
                return
            self.sent_at = self.clock()
            progress = Progress(
                done=self.done(),
                total=self.total,
                unit=self.unit,
                kept=self.kept,
                tokens=self.tokens,
                conversations=self.conversations,
                seconds=round(self.sent_at - self.started_at, 3),
            )
            self.send(progress)

    def __enter__(self) -> "Report":
        return self

    def __exit__(self, error_type: type[BaseException] | None, *error: object) -> None:
        if error_type is None:
            self._send()
        with self.lock:
            self.send = None


class Watch:
    """Shows a job's progress: a context manager, called with every Progress and passing it to `on_progress`.

    label: stage and shard, such as "extract shard 3".
    """

    def __init__(self, label: str, on_progress: Callable[[Progress], None] | None = None) -> None:
        self.label = label
        self.on_progress = on_progress
        self.bar: tqdm[Any] | None = None
        self.logged: Progress | None = None

    def __enter__(self) -> "Watch":
        return self

    def __exit__(self, *error: object) -> None:
        if self.bar is not None:
            self.bar.close()
        self.bar = None

    def __call__(self, progress: Progress) -> None:
        if sys.stderr.isatty():
            self._draw(progress)
        elif progress.seconds - (self.logged.seconds if self.logged else 0.0) >= LOG_EVERY_S:
            logger.info("%s: %s", self.label, progress_text(progress, self.logged))
            self.logged = progress
        if self.on_progress:
            self.on_progress(progress)

    def _draw(self, progress: Progress) -> None:
        if self.bar is None:
            if progress.seconds < BAR_AFTER_S:
                return
            self.bar = tqdm(
                total=progress.total,
                initial=progress.kept,
                desc=self.label,
                unit=f" {progress.unit}",
                dynamic_ncols=True,
            )
            self.bar.start_t -= progress.seconds
        if progress.unit != "tokens":
            self.bar.set_postfix_str(f"{progress.tokens_per_s():,.0f} tokens/s", refresh=False)
        self.bar.update(progress.done - self.bar.n)
