"""The engine's worker process as its parent sees it: started with the right environment, asked, told to stop, outlived."""

import json
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from eagle3.engine.progress import Progress
from eagle3.errors import EngineDied, is_out_of_memory

logger = logging.getLogger(__name__)
OnProgress = Callable[[Progress], None]


class WorkerProcess:
    """The worker process. `settings` are those of the engine it holds, None while it holds none."""

    def __init__(self, library: str) -> None:
        self.library = library
        self.settings: dict[str, Any] | None = None
        self.process = subprocess.Popen(
            [sys.executable, "-m", "eagle3.engine.worker", library],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=_environment(library),
        )

    def ask(self, request: dict[str, Any], on_progress: OnProgress | None = None) -> Any:
        """Send one request and wait for its result; an engine that failed is not used again.

        Args:
            on_progress: hears about once a second how far the job is; if it fails, it is not called again and the job goes on.
        """
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(request) + "\n")
            self.process.stdin.flush()
            reply = self._next_reply(on_progress)
        except BrokenPipeError:
            reply = {"died": self.process.wait()}
        except BaseException:  # Ctrl-C: the reply may still come, and nobody would take it
            self.end()
            raise
        if "died" in reply:
            self.end()
            if request["op"] == "stop":
                return None
            raise EngineDied(_death_message(reply["died"]))
        if "error" in reply:
            self.stop_engine()
            raise (ValueError if reply["is_value_error"] else EngineDied)(reply["error"])
        return reply["result"]

    def _next_reply(self, on_progress: OnProgress | None) -> dict[str, Any]:
        """The reply behind any number of lines that tell of progress."""
        assert self.process.stdout is not None
        while (line := self.process.stdout.readline()).endswith("\n"):
            reply: dict[str, Any] = json.loads(line)
            if "progress" not in reply:
                return reply
            try:
                if on_progress:
                    on_progress(Progress(**reply["progress"]))
            except Exception as e:
                logger.warning("progress is not shown any more: %s", e, exc_info=True)
                on_progress = None
        return {"died": self.process.wait()}

    def stop_engine(self) -> None:
        """Give the engine's memory back; where the process cannot fork, it ends with its engine."""
        if self.settings is None:
            return
        self.settings = None
        if forks_engines():
            self.ask({"op": "stop"})
        else:
            self.end()

    def end(self) -> None:
        """Close the pipe, which ends the process, and wait for it."""
        self.settings = None
        assert self.process.stdin is not None
        try:
            self.process.stdin.close()
            self.process.wait(timeout=10)
        except (OSError, subprocess.TimeoutExpired):
            self.process.kill()
            self.process.wait()


def error_reply(error: Exception) -> dict[str, Any]:
    """The reply that carries an error, which passes in another try or not. Where several GPUs share a target, the engine raises
    RuntimeError whatever went wrong on one of them: that may pass."""
    text, is_short = str(error) or repr(error), is_out_of_memory(error)
    if is_short:
        text += "; lower engine.max_num_seqs or engine.max_num_batched_tokens, or raise fanout.tensor_parallel_size"
    return {"error": text, "is_value_error": is_short or isinstance(error, ValueError | NotImplementedError)}


def _death_message(status: int) -> str:
    if status == -signal.SIGKILL:
        return (
            "the engine process was killed (signal 9), most likely for lack of memory; "
            "lower engine.max_num_seqs, engine.max_num_batched_tokens or engine.cpu_kv_cache_gib, or give it more memory"
        )
    how = f"was ended by signal {-status}" if status < 0 else f"ended with exit code {status}"
    return f"the engine process {how}; its last lines on stderr say why"


def forks_engines() -> bool:
    """Whether one worker serves several engines, each in a fork of it.

    Only on Linux, where no system library keeps threads of its own, and not beside a GPU: a CUDA driver that anything touched
    during the import does not survive a fork, and there the import costs little against the engine's own start.
    """
    return sys.platform == "linux" and not has_gpu()


def has_gpu() -> bool:
    """Whether an NVIDIA GPU is there; asks no driver."""
    return any(Path("/dev").glob("nvidia[0-9]*"))


def _environment(library: str) -> dict[str, str]:
    root = str(Path(__file__).resolve().parents[2])
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])}
    # Targets are directories by now: nothing has to be asked of a hub.
    env |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    if library != "vllm":
        return env
    env |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1",
    }
    # vLLM warns of settings that are chosen here on purpose; its errors come back as exceptions.
    for name, value in (
        ("VLLM_LOGGING_LEVEL", "ERROR"),
        ("TORCH_CPP_LOG_LEVEL", "ERROR"),
        ("PYTHONWARNINGS", "ignore"),
    ):
        env.setdefault(name, value)
    openmp = Path(sys.prefix) / "lib" / "libiomp5.so"
    if openmp.exists() and not has_gpu():
        env["LD_PRELOAD"] = os.pathsep.join([str(openmp), *filter(None, [os.environ.get("LD_PRELOAD")])])
        # Idle threads that spin for the default 200 ms take the cores from everything else (vllm/utils/ompmultiprocessing.py).
        env.setdefault("KMP_BLOCKTIME", "5")
        # Unset, a forked child is bound to one core ("disabled" aborts it): half the speed on two cores.
        env.setdefault("KMP_AFFINITY", "none")
    return env
