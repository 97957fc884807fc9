"""A child process with one engine: EngineProcess is the parent's side, `_serve` runs in the child.

Importing vLLM takes 12 s, building an engine 7 s, and only the end of a process frees all its memory. So a
fork server imports vLLM once and each engine is forked from it; with a GPU each engine is spawned. Jobs,
progress and results are pickled through a Connection.
"""

import logging
import multiprocessing
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext, SpawnContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from select import select
from types import ModuleType
from typing import Any

from eagle3.engine.interface import AnsweringEngine, EngineSettings
from eagle3.engine.progress import Progress, Report
from eagle3.errors import EngineDied, is_out_of_memory
from eagle3.sockets import make_socket_dir

logger = logging.getLogger(__name__)
OnProgress = Callable[[Progress], None]
# Called with an engine and a report. It is pickled: a module-level function or a partial of one.
Job = Callable[[Any, Report], Any]
# Module that the fork server of a library imports.
PRELOADED = {
    "vllm": "eagle3.engine.vllm_import",
    "transformers": "eagle3.engine.reference",
    "httpx": "eagle3.engine.server.engine",
}
# By library. multiprocessing's own fork server may already run, without these imports and the environment.
_fork_servers: dict[str, forkserver.ForkServer] = {}


@dataclass(frozen=True)
class Failure:
    """The error that a job raised. is_permanent: a retry would raise it again."""

    text: str
    is_permanent: bool

    @classmethod
    def from_error(cls, error: Exception) -> "Failure":
        """Treat RuntimeError as transient: vLLM on several GPUs raises it for any error of a worker."""
        text = str(error) or repr(error)
        if is_out_of_memory(error):
            text += (
                "; lower engine.max_num_seqs or engine.max_num_batched_tokens, "
                "or raise fanout.tensor_parallel_size"
            )
            return cls(text, True)
        return cls(text, isinstance(error, ValueError | NotImplementedError))


class EngineProcess:
    """One engine in a child process, until `end`.

    Raises:
        ValueError: if the engine cannot be built with these settings.
        EngineDied: on any other failure.
    """

    def __init__(self, settings: EngineSettings) -> None:
        self.settings = settings
        context: ForkServerContext | SpawnContext = multiprocessing.get_context("spawn")
        if forks_engines():
            context = multiprocessing.get_context("forkserver")
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(settings, theirs), name="engine")
        with self._ended_on_failure():
            _start(self.process, settings.library)
            theirs.close()
            self._receive(None)

    def is_alive(self) -> bool:
        """Whether it accepts a job. Between two jobs the connection is readable only at EOF."""
        return self.process.exitcode is None and not self.connection.poll()

    def run(self, job: Job, on_progress: OnProgress | None = None) -> Any:
        """Run a job and return its result; a failure ends the process.

        Args:
            on_progress: called about once a second; if it raises, the job continues without it.

        Raises:
            ValueError: if the job failed and a retry would fail again.
            EngineDied: if the job failed otherwise, or the process died.
        """
        with self._ended_on_failure():
            try:
                self.connection.send(job)
            except OSError:
                raise self._death() from None
            return self._receive(on_progress)

    def end(self) -> None:
        """Kill the process and its children: a clean shutdown takes a second and frees no more."""
        if self.process.pid is not None:
            with suppress(ProcessLookupError):  # the child may not have called setsid yet
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.kill()
            self.process.join()
        self.connection.close()

    @contextmanager
    def _ended_on_failure(self) -> Iterator[None]:
        try:
            yield
        except BaseException:  # Ctrl-C too: no one would receive the result
            self.end()
            raise

    def _receive(self, on_progress: OnProgress | None) -> Any:
        """Return the job's result; pass every Progress before it to `on_progress`."""
        while True:
            # Wait for the process too: workers of a killed engine keep the connection open for a while.
            if self.connection not in wait([self.connection, self.process.sentinel]):
                raise self._death()
            try:
                reply = self.connection.recv()
            except (EOFError, OSError):
                raise self._death() from None
            if isinstance(reply, Failure):
                raise (ValueError if reply.is_permanent else EngineDied)(reply.text)
            if not isinstance(reply, Progress):
                return reply
            try:
                if on_progress:
                    on_progress(reply)
            except Exception as e:
                logger.warning("progress is no longer shown: %s", e, exc_info=True)
                on_progress = None

    def _death(self) -> EngineDied:
        self.process.join()
        status = self.process.exitcode or 0
        if status == -signal.SIGKILL:
            return EngineDied(
                "the engine process was killed (signal 9), probably out of memory; lower "
                "engine.max_num_seqs, engine.max_num_batched_tokens or engine.cpu_kv_cache_gib, "
                "or give it more memory"
            )
        how = f"was ended by signal {-status}" if status < 0 else f"ended with exit code {status}"
        return EngineDied(f"the engine process {how}; the last lines on stderr say why")


def forks_engines() -> bool:
    """Fork engines only on Linux without a GPU.

    System libraries of macOS start threads, and an initialized CUDA driver does not survive a fork.
    """
    return sys.platform == "linux" and not has_gpu()


def has_gpu() -> bool:
    """Whether an NVIDIA GPU is present; does not initialize CUDA."""
    return any(Path("/dev").glob("nvidia[0-9]*"))


def _start(process: BaseProcess, library: str) -> None:
    """Start a process with its own environment and without importing the parent's main module.

    multiprocessing has no arguments for these. The import takes seconds with flytekit, and would run a
    script without a `__main__` guard a second time.
    """
    make_socket_dir()
    no_main = {"__main__": ModuleType("__main__")}
    if not forks_engines():
        with _changed(os.environ, _environment(library)), _changed(sys.modules, no_main):
            process.start()
        return
    if library not in _fork_servers:
        _fork_servers[library] = forkserver.ForkServer()
        _fork_servers[library].set_forkserver_preload([PRELOADED[library]])
    server = _fork_servers[library]
    with _changed(os.environ, _environment(library)):
        server.ensure_running()
    own_server = {"connect_to_new_process": server.connect_to_new_process}
    with _changed(vars(forkserver), own_server), _changed(sys.modules, no_main):
        try:
            process.start()
        except EOFError:
            raise EngineDied(
                f"the fork server of {library} ended; the last lines on stderr say why"
            ) from None


@contextmanager
def _changed(entries: MutableMapping[str, Any], changes: dict[str, Any]) -> Iterator[None]:
    before = {name: entries[name] for name in changes if name in entries}
    entries.update(changes)
    try:
        yield
    finally:
        for name in changes:
            del entries[name]
        entries.update(before)


def _environment(library: str) -> dict[str, str]:
    """Environment variables that must be set before a library is imported."""
    env = {
        "PYTHONPATH": _before_others(Path(__file__).resolve().parents[2], "PYTHONPATH"),
        "HF_HUB_OFFLINE": "1",  # targets are local directories
        "TOKENIZERS_PARALLELISM": "false",
    }
    if library != "vllm":
        return env
    # vLLM warns about settings that we choose on purpose; its errors are raised as exceptions.
    defaults = {"VLLM_LOGGING_LEVEL": "ERROR", "TORCH_CPP_LOG_LEVEL": "ERROR", "PYTHONWARNINGS": "ignore"}
    openmp = Path(sys.prefix) / "lib" / "libiomp5.so"
    if openmp.exists() and not has_gpu():
        env["LD_PRELOAD"] = _before_others(openmp, "LD_PRELOAD")
        # By default idle threads spin for 200 ms and keep the cores busy (vllm/utils/ompmultiprocessing.py).
        defaults["KMP_BLOCKTIME"] = "5"
        # If unset, a forked child is bound to one core, half the speed on two; "disabled" aborts it.
        defaults["KMP_AFFINITY"] = "none"
    env |= {name: os.environ.get(name, value) for name, value in defaults.items()}
    return env | {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1",
    }


def _before_others(path: Path, variable: str) -> str:
    return os.pathsep.join([str(path), *filter(None, [os.environ.get(variable)])])


def _serve(settings: EngineSettings, connection: Connection) -> None:
    """Build an engine and run jobs until one fails or the parent closes the connection."""
    os.setsid()  # a process group with the engine's workers: Ctrl-C does not reach it, the parent kills it
    os.dup2(2, 1)  # libraries print to stdout; keep it out of the parent's output
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        engine = _build(settings)
        connection.send(None)
        for job in _jobs(connection):
            with Report(partial(_send_progress, connection)) as report:
                result = job(engine, report)
            connection.send(result)
    except Exception as e:
        traceback.print_exc()
        connection.send(Failure.from_error(e))


def _build(settings: EngineSettings) -> AnsweringEngine:
    if settings.library == "httpx":
        from eagle3.engine.server.engine import ServerEngine

        return ServerEngine(settings)
    if settings.library == "transformers":
        from eagle3.engine.reference import ReferenceEngine

        return ReferenceEngine(settings)
    from eagle3.engine.vllm_import import VllmEngine

    return VllmEngine(settings)


def _jobs(connection: Connection) -> Iterator[Job]:
    with suppress(EOFError):
        while True:
            yield connection.recv()


def _send_progress(connection: Connection, progress: Progress) -> None:
    """Send progress unless the connection is full: a parent that uploads a Deck must not block the engine."""
    if select([], [connection], [], 0)[1]:
        connection.send(progress)


def _end_with_parent() -> None:
    """Kill this process and its workers when the parent ends, even during a job."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os.killpg(0, signal.SIGKILL)
