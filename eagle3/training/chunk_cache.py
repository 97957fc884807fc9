"""Chunk files made ready ahead of a known plan: local ones are checked in place, remote ones fetched and evicted within a budget.

The plan says which chunks every pack needs, so nothing is guessed. The missing chunk with the nearest use is fetched next, and
only when it needs room does the cached chunk with the farthest next use go: where the budget holds what is in use at one time,
every chunk is fetched once an epoch. A pack is read when all its chunks are ready, and they stay until it is read.

Remote chunk 7 is `chunk-0000007-<its sha256>.safetensors` in the cache directory. A later process that finds it there takes it
over; other files of that form are what an earlier run left behind, and go. Nothing else in the directory is touched.
"""

import heapq
import logging
import re
import threading
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from eagle3.files import Stopped
from eagle3.shards.hidden_states import ChunkReader
from eagle3.training.chunk_files import Chunk, fetch

logger = logging.getLogger(__name__)
# A core hashes about 1 GB/s; a large GPU trains through 3 to 4 GB/s.
FETCH_THREADS = 4
# Local chunks are hashed no farther ahead than this, so that the page cache still holds them when they are read. A chunk that is
# not needed for longer than this is opened anew, so that its pages leave the process's memory.
NEAR_PACKS = 64
CACHED_NAME = re.compile(r"chunk-\d{7}-[0-9a-f]{64}\.safetensors(\.part)?")


class ReadSchedule:
    """One reader's way through its packs. All of it is guarded by the cache's lock, `stopped` excepted.

    needs: the chunks of every pack. position: the first pack that is not read yet; all distances count from there.
    """

    def __init__(self, needs: list[list[int]]) -> None:
        self.needs = needs
        self.position = 0
        self.read: set[int] = set()
        self.failed: dict[int, Exception] = {}
        self.stopped = threading.Event()
        self.uses: dict[int, list[int]] = {}
        for pack, chunks in enumerate(needs):
            for chunk in chunks:
                self.uses.setdefault(chunk, []).append(pack)
        # Chunks that may be missing, by next use; a chunk that is evicted comes back.
        self.queue = [(uses[0], chunk) for chunk, uses in self.uses.items()]
        heapq.heapify(self.queue)

    def distance(self, chunk: int) -> float:
        """Packs until the chunk is used next, infinite if it never is."""
        uses = self.uses.get(chunk, [])
        at = bisect_left(uses, self.position)
        return uses[at] - self.position if at < len(uses) else float("inf")

    def nearest(self, present: set[int]) -> int | None:
        """The chunk with the nearest use among those that are not present and did not fail."""
        while self.queue:
            use, chunk = self.queue[0]
            if chunk not in present and chunk not in self.failed and use >= self.position:
                return chunk
            heapq.heappop(self.queue)
            if chunk not in present and chunk not in self.failed:
                self.requeue(chunk)
        return None

    def requeue(self, chunk: int) -> None:
        """Note that the chunk is not there, or no longer."""
        distance = self.distance(chunk)
        if distance < float("inf"):
            heapq.heappush(self.queue, (self.position + int(distance), chunk))

    def finish(self, pack: int) -> set[int]:
        """Note that the pack was read; returns the chunks of the packs that the position has passed by that."""
        self.read.add(pack)
        passed: set[int] = set()
        while self.position in self.read:
            self.read.remove(self.position)
            passed.update(self.needs[self.position])
            self.position += 1
        return passed


class ChunkCache:
    """Opened chunks of several shards, by number; safe for use from several threads."""

    def __init__(self, chunks: list[Chunk], cache_dir: Path | None = None, cache_bytes: int = 0) -> None:
        """Take over what an earlier process left in cache_dir.

        Args:
            chunks: the chunk files; their place in the list is their number.
            cache_dir: where remote chunks go; no other process may use it.
            cache_bytes: the most that they may take there together, those being fetched included.
        """
        self.chunks, self.cache_dir, self.cache_bytes = chunks, cache_dir, cache_bytes
        self.ready: dict[int, ChunkReader] = {}
        self.coming: set[int] = set()
        self.stored: set[int] = set()
        self.checked: set[int] = set()
        self.pins: Counter[int] = Counter()
        self.courses: list[ReadSchedule] = []
        self.changed = threading.Condition()
        if any(chunk.is_remote for chunk in chunks):
            if cache_dir is None:
                raise ValueError(
                    "remote shards need a directory for the chunks in use, got none; pass cache_dir and cache_bytes"
                )
            cache_dir.mkdir(parents=True, exist_ok=True)
            self._take_over(cache_dir)

    def _take_over(self, cache_dir: Path) -> None:
        for number, chunk in enumerate(self.chunks):
            path = self._path(number)
            fits = self.disk_bytes(self.stored) + chunk.disk_bytes <= self.cache_bytes
            if chunk.is_remote and fits and path.exists() and path.stat().st_size == chunk.disk_bytes:
                self.stored.add(number)
        kept = {self._path(number) for number in self.stored}
        for path in cache_dir.iterdir():
            if CACHED_NAME.fullmatch(path.name) and path not in kept:
                path.unlink()

    def _path(self, number: int) -> Path:
        chunk = self.chunks[number]
        if not chunk.is_remote or self.cache_dir is None:
            return Path(chunk.path)
        return self.cache_dir / f"chunk-{number:07d}-{chunk.entry['sha256']}.safetensors"

    def disk_bytes(self, numbers: Iterable[int]) -> int:
        """What these chunks take in the cache directory together, bytes."""
        return sum(self.chunks[number].disk_bytes for number in numbers)

    @contextmanager
    def follow(self, needs: list[list[int]]) -> Iterator[ReadSchedule]:
        """Make chunks ready in the background, in the order in which a reader needs them, until the context ends.

        Args:
            needs: numbers of the chunks of every pack, in reading order.

        Raises:
            ValueError: if the budget does not hold the chunks of one pack of every reader.
        """
        course = ReadSchedule(needs)
        with self.changed:
            self._check_packs_fit([*self.courses, course])
            self.courses.append(course)
        # Daemons: an exception that leaves the reader unfinished must not keep the process alive.
        threads = [
            threading.Thread(target=self._work, args=(course,), name="fetch-chunks", daemon=True)
            for _ in range(FETCH_THREADS)
        ]
        try:
            for thread in threads:
                thread.start()
            yield course
        finally:
            with self.changed:
                course.stopped.set()
                self.courses.remove(course)
                self.changed.notify_all()
            for thread in threads:
                thread.join()

    def _check_packs_fit(self, courses: list[ReadSchedule]) -> None:
        # Else two packs could each hold what the other waits for.
        largest = sum(max((self.disk_bytes(pack) for pack in course.needs), default=0) for course in courses)
        if largest > self.cache_bytes:
            raise ValueError(
                f"the chunks of one pack take {largest} bytes, the disk budget is {self.cache_bytes}; "
                "raise train.disk_budget_bytes or extract smaller chunks"
            )

    @contextmanager
    def hold(self, course: ReadSchedule, pack: int) -> Iterator[dict[int, ChunkReader]]:
        """Wait for the chunks of a pack and keep them for the context; afterwards the pack counts as read.

        Raises:
            ValueError: on a damaged chunk.
            OSError: on a chunk that could not be fetched.
            Stopped: if the course ended.
        """
        needs = course.needs[pack]
        with self.changed:
            self.changed.wait_for(
                lambda: (
                    course.stopped.is_set()
                    or all(c in self.ready for c in needs)
                    or any(c in course.failed for c in needs)
                )
            )
            if course.stopped.is_set():
                raise Stopped
            for chunk in needs:
                if chunk in course.failed:
                    raise course.failed[chunk]
            held = {chunk: self.ready[chunk] for chunk in needs}
            self.pins.update(needs)
        try:
            yield held
        finally:
            # A file that is still mapped would keep its disk space after its eviction.
            held.clear()
            with self.changed:
                self.pins.subtract(needs)
                for chunk in course.finish(pack):
                    if not self.pins[chunk] and self._distance(chunk) > NEAR_PACKS:
                        self._close(chunk)
                self.changed.notify_all()

    def _work(self, course: ReadSchedule) -> None:
        """Make ready what the course needs next, until it ends."""
        while (number := self._claim(course)) is not None:
            self._bring(number, course)

    def _bring(self, number: int, course: ReadSchedule) -> None:
        failure, readers = None, []
        try:
            readers.append(self._make_ready(number, course.stopped))
        except Exception as e:
            failure = e
        with self.changed:
            self.coming.remove(number)
            if failure is None:
                # Popped: a reader that this thread held on to would keep the file mapped after its eviction.
                self.ready[number] = readers.pop()
                self.checked.add(number)
            else:
                course.failed[number] = failure
                self._remove(number)
            self.changed.notify_all()

    def _claim(self, course: ReadSchedule) -> int | None:
        """Wait until the nearest missing chunk has room, and reserve it; None when the course has ended."""
        with self.changed:
            while not course.stopped.is_set():
                number = course.nearest(self.ready.keys() | self.coming)
                if number is not None and self._make_room(number, course.distance(number)):
                    self.coming.add(number)
                    if self.chunks[number].is_remote:
                        self.stored.add(number)
                    return number
                self.changed.wait()
            return None

    def _make_room(self, number: int, distance: float) -> bool:
        """Evict chunks that are used later than at `distance`, farthest first, if that makes room for chunk `number`."""
        chunk = self.chunks[number]
        if not chunk.is_remote:
            return distance <= NEAR_PACKS
        missing = (
            0 if number in self.stored else chunk.disk_bytes + self.disk_bytes(self.stored) - self.cache_bytes
        )
        victims = []
        later = ((self._distance(c), c) for c in self.stored - self.coming if not self.pins[c])
        for until_use, victim in sorted(later, reverse=True):
            if missing <= 0 or until_use <= distance:
                break
            victims.append(victim)
            missing -= self.chunks[victim].disk_bytes
        if missing > 0:
            return False
        for victim in victims:
            self._remove(victim)
        return True

    def _distance(self, number: int) -> float:
        return min((course.distance(number) for course in self.courses), default=float("inf"))

    def _close(self, number: int) -> None:
        self.ready.pop(number, None)
        for course in self.courses:
            course.requeue(number)

    def _remove(self, number: int) -> None:
        self._close(number)
        if number in self.stored:
            self._path(number).unlink(missing_ok=True)
            self.stored.remove(number)
            self.checked.discard(number)

    def _make_ready(self, number: int, stopped: threading.Event) -> ChunkReader:
        """Fetch a chunk if it is not there, check it and open it."""
        chunk, path = self.chunks[number], self._path(number)
        if not chunk.is_remote:
            return ChunkReader(path, chunk.entry, is_checked=number in self.checked)
        if path.exists():
            try:
                return ChunkReader(path, chunk.entry, is_checked=number in self.checked)
            except ValueError:
                logger.warning("%s no longer holds %s, fetching it again", path, chunk.path)
                path.unlink()
        part = path.with_suffix(".safetensors.part")
        try:
            fetch(chunk, part, stopped)
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)
        return ChunkReader(path, chunk.entry, name=chunk.path)
