"""A process pool that encodes the rows of long sources.

Outcomes keep the order of the rows, so the number of processes does not change the result. Imports take
seconds: the pool starts after MAX_INLINE_ROWS rows, and a fork server imports once for all processes.
"""

import multiprocessing
import os
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from itertools import chain, islice

from eagle3.data.encode import Outcome, RowEncoder, Task, in_batches
from eagle3.data.files import Record
from eagle3.errors import WorkerDied
from eagle3.sockets import make_socket_dir

MAX_INLINE_ROWS = 4096  # that this process encodes before it starts others
MAX_WORKERS = 8


class EncoderPool:
    """Encodes rows like RowEncoder, long sources in processes. Leaving its context ends the processes."""

    def __init__(self, encoder: RowEncoder) -> None:
        self.encoder = encoder
        self.workers = encoder.cfg.workers or min(len(os.sched_getaffinity(0)), MAX_WORKERS)
        self.inline_rows = MAX_INLINE_ROWS
        self.processes: ProcessPoolExecutor | None = None

    def __enter__(self) -> "EncoderPool":
        return self

    def __exit__(self, *error: object) -> None:
        if self.processes:
            self.processes.shutdown(cancel_futures=True)

    def encode(self, records: Iterable[Record], task: Task) -> Iterator[Outcome]:
        """Yield one outcome for each record, in order; the processes work some batches ahead."""
        batches = in_batches(records)
        for batch in batches:
            if self.workers > 1 and self.inline_rows <= 0:
                yield from self._encode_in_processes(chain([batch], batches), task)
                return
            self.inline_rows -= len(batch)
            yield from self.encoder.encode(batch, task)

    def _encode_in_processes(self, batches: Iterator[list[Record]], task: Task) -> Iterator[Outcome]:
        processes = self.processes = self.processes or self._start()
        running: deque[Future[list[Outcome]]] = deque()
        try:
            for batch in islice(batches, 2 * self.workers):
                running.append(processes.submit(_encode, batch, task))
            while running:
                outcomes = running.popleft().result()
                running.extend(processes.submit(_encode, batch, task) for batch in islice(batches, 1))
                yield from outcomes
        except BrokenProcessPool as e:
            rule = "a process that encodes rows was killed from outside, probably by the OOM killer"
            raise WorkerDied(f"{rule}; lower data.workers") from e
        finally:
            for future in running:
                future.cancel()

    def _start(self) -> ProcessPoolExecutor:
        make_socket_dir()
        context = multiprocessing.get_context("forkserver")
        # The imports of every process. Unpickling a tokenizer needs half the imports of loading one.
        context.set_forkserver_preload([type(self.encoder.tokenizer).__module__, __name__])
        return ProcessPoolExecutor(self.workers, context, initializer=_start_worker, initargs=(self.encoder,))


_worker: RowEncoder


def _start_worker(encoder: RowEncoder) -> None:
    global _worker
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    _worker = encoder


def _encode(records: list[Record], task: Task) -> list[Outcome]:
    return _worker.encode(records, task)
