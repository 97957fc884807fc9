"""The target's engine as two functions, `generate` and `capture`; the engine itself lives in a worker process that is kept warm.

A call with equal settings finds its engine ready, so the shards of one stage share one start; other settings close it first,
because two engines do not fit in memory. The worker ends when this process does, however that ends: its stdin closes.
"""

import atexit
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from tempfile import gettempdir
from typing import Any

from eagle3.config import EngineConfig, ExtractConfig
from eagle3.hidden_state_writer import finished_manifest, row_bytes
from eagle3.remote import is_remote
from eagle3.shards import read_token_shard
from eagle3.target.properties import check_max_model_len

logger = logging.getLogger(__name__)
_lock = threading.RLock()
_worker: "_Worker | None" = None


@dataclass(frozen=True)
class Answer:
    """One answer. token_ids include the end token when finish_reason is "stop"; otherwise it is "length"."""

    token_ids: list[int]
    finish_reason: str


@dataclass(frozen=True)
class Generation:
    """Answers in the order of their prompts, and what making them took.

    seconds: generation alone, no start-up. num_drafts: speculative rounds. num_accepted_tokens: accepted draft tokens.
    accepted_per_position: of these, how many at draft position 1 … k; empty without a draft.
    """

    answers: list[Answer]
    seconds: float
    generated_tokens: int
    num_drafts: int
    num_accepted_tokens: int
    accepted_per_position: list[int]


def generate(
    target_dir: str | Path,
    prompts: list[list[int]],
    engine: EngineConfig,
    *,
    temperature: float,
    top_p: float,
    max_new_tokens: int,
    seed: int,
    draft_dir: str | Path | None = None,
    num_speculative_tokens: int = 0,
    ignore_eos: bool = False,
    tensor_parallel_size: int = 1,
    server_url: str = "",
) -> Generation:
    """Answer prompts with the target, token ids in and out.

    Args:
        prompts: token ids, each at least one and fewer than `engine.max_model_len`.
        temperature: 0 is greedy.
        seed: of the engine; the same prompts in the same call give the same answers.
        draft_dir: exported draft for speculative decoding; drafts are greedy.
        num_speculative_tokens: k, with a draft only.
        tensor_parallel_size: GPUs that share the target.
        server_url: of a running vLLM server, which then answers instead of an engine of ours.

    Raises:
        ValueError: if a prompt is empty or leaves no room for an answer.
        RuntimeError: if the engine fails or is killed; carries its own message.
    """
    longest = engine.max_model_len - 1
    for i, prompt in enumerate(prompts):
        if not 0 < len(prompt) <= longest:
            raise ValueError(f"prompt {i} has {len(prompt)} tokens; 1 … {longest} fit, raise engine.max_model_len or shorten it")
    if not prompts:
        return Generation([], 0.0, 0, 0, 0, [])
    check_max_model_len(engine.max_model_len, json.loads((Path(target_dir) / "config.json").read_text()))
    settings = _settings(target_dir, engine, None, draft_dir, num_speculative_tokens, tensor_parallel_size, server_url)
    sampling = {"temperature": temperature, "top_p": top_p, "max_new_tokens": max_new_tokens, "seed": seed}
    result = _run(settings, {"op": "generate", "prompts": prompts, "sampling": {**sampling, "ignore_eos": ignore_eos}})
    return Generation(**{**result, "answers": [Answer(**a) for a in result["answers"]]})


def capture(
    target_dir: str | Path,
    token_shard_path: str | Path,
    out: str | Path,
    layer_ids: list[int],
    engine: EngineConfig,
    extract: ExtractConfig,
    info: dict[str, Any],
    tensor_parallel_size: int = 1,
    server_url: str = "",
) -> dict[str, Any]:
    """Capture the hidden states of one token shard into one hidden-state shard, going on from what an earlier attempt left.

    Args:
        out: directory or fsspec URL of the shard; one place for one shard and one set of settings.
        layer_ids: aux layers, ascending; the last hidden state is captured besides them.
        info: goes into the manifest, with the engine's version and settings: target name and revision.
        tensor_parallel_size: GPUs that share the target.
        server_url: of a running vLLM server set up for capture, which then computes instead of an engine of ours.

    Returns:
        The manifest.

    Raises:
        ValueError: on bad layer ids, a row longer than `engine.max_model_len` or too little disk space, before the engine starts.
        RuntimeError: if the engine fails, is killed, or returns states that do not reproduce its own next token, or a chunk
            cannot be written; finished chunks are kept.
        OSError: if the store at `out` does not answer.
    """
    config = json.loads((Path(target_dir) / "config.json").read_text())
    check_max_model_len(engine.max_model_len, config)
    depth = config["num_hidden_layers"]
    if not layer_ids or layer_ids != sorted(set(layer_ids)) or layer_ids[0] < 0 or layer_ids[-1] > depth:
        raise ValueError(f"layer_ids must be ascending, unique and within 0 … {depth}, the target's depth; got {layer_ids}")
    if (done := finished_manifest(out)) is not None:
        logger.info("%s was finished by an earlier attempt", out)
        return done
    _check_shard(token_shard_path, out, len(layer_ids), config["hidden_size"], engine, extract)
    request = {
        "op": "capture",
        "token_shard_path": str(Path(token_shard_path).resolve()),
        "out": str(out) if is_remote(out) else str(Path(out).resolve()),
        "layer_ids": layer_ids,
        "extract": extract.model_dump(),
        "info": info,
    }
    start = time.perf_counter()
    result = _run(_settings(target_dir, engine, layer_ids, None, 0, tensor_parallel_size, server_url), request)
    manifest: dict[str, Any] = result["manifest"]
    logger.info(
        "captured %d tokens, %.3f GB, in %.1f s, start-up included; %d came from the prefix cache",
        manifest["tokens"],
        manifest["bytes"] / 1e9,
        time.perf_counter() - start,
        result["cached_tokens"],
    )
    return manifest


def close_engines() -> None:
    """End the worker and its engine, if there is one; the next call starts another."""
    global _worker
    with _lock:
        if _worker is not None:
            _worker.end()
        _worker = None


atexit.register(close_engines)


def _check_shard(
    token_shard_path: str | Path,
    out: str | Path,
    num_aux: int,
    hidden_size: int,
    engine: EngineConfig,
    extract: ExtractConfig,
) -> None:
    rows = read_token_shard(token_shard_path)
    for row in rows:
        if not 0 < len(row.token_ids) <= engine.max_model_len:
            raise ValueError(
                f"{token_shard_path}: row {row.sample_id} has {len(row.token_ids)} tokens; "
                f"1 … {engine.max_model_len} fit, raise engine.max_model_len or lower data.max_tokens"
            )
    sizes = [row_bytes(row, num_aux, hidden_size, extract.encoding) for row in rows]
    # Chunks on their way to a store lie in the temporary directory, one at a time.
    directory = Path(gettempdir() if is_remote(out) else out)
    needed = min(sum(sizes), extract.chunk_bytes + max(sizes)) if is_remote(out) else sum(sizes)
    directory.mkdir(parents=True, exist_ok=True)
    there = sum(f.stat().st_size for f in directory.glob("chunk-*.safetensors"))
    free = shutil.disk_usage(directory).free
    text = (
        f"{out}: the states of {sum(len(r.token_ids) for r in rows)} tokens need {sum(sizes) / 1e9:.3f} GB as {extract.encoding} "
        f"before compression, {needed / 1e9:.3f} GB in {directory}; {free / 1e9:.3f} GB are free there"
    )
    logger.info(text)
    if needed - there > free:
        raise ValueError(f"{text}; free some, lower data.rows_per_shard, or set extract.encoding to fp8")


def _settings(
    target_dir: str | Path,
    engine: EngineConfig,
    layer_ids: list[int] | None,
    draft_dir: str | Path | None,
    num_speculative_tokens: int,
    tensor_parallel_size: int,
    server_url: str,
) -> dict[str, Any]:
    """What an engine is built from; equal settings share one. Sizes and times of files tell when a path was written again."""
    reference = engine.engine == "transformers" and not server_url
    if tensor_parallel_size > 1 and (reference or server_url):
        logger.warning("tensor_parallel_size %d is ignored: only an engine of ours is split over GPUs", tensor_parallel_size)
    return {
        "target_dir": str(Path(target_dir).resolve()),
        "engine": engine.model_dump(),
        # The reference model serves every purpose as it is.
        "layer_ids": None if reference else layer_ids,
        "draft_dir": None if draft_dir is None else str(Path(draft_dir).resolve()),
        "num_speculative_tokens": num_speculative_tokens,
        "tensor_parallel_size": tensor_parallel_size,
        "server_url": server_url,
        "files": [_file_stamp(d) for d in (target_dir, draft_dir) if d is not None],
    }


def _file_stamp(directory: str | Path) -> list[list[Any]]:
    files = sorted([*Path(directory).glob("*.safetensors"), *Path(directory).glob("*.json")])
    return [[f.name, f.stat().st_size, f.stat().st_mtime_ns] for f in files]


def _run(settings: dict[str, Any], request: dict[str, Any]) -> Any:
    with _lock:
        library = "httpx" if settings["server_url"] else settings["engine"]["engine"]
        worker = _ready_worker(library)
        if worker.settings != settings:
            worker.stop_engine()
            worker = _ready_worker(library)
            worker.settings = settings
            worker.ask({"op": "start", "settings": settings})
        return worker.ask(request)


def _ready_worker(library: str) -> "_Worker":
    global _worker
    if _worker is not None and (_worker.library != library or _worker.process.poll() is not None):
        close_engines()
    if _worker is None:
        if find_spec(library) is None:
            raise ValueError(f"{library} is not installed here; set engine.engine to transformers, the slow reference")
        if library == "transformers":
            logger.warning("engine: transformers is the slow reference; use vllm where it runs")
        _worker = _Worker(library)
    return _worker


class _Worker:
    """The worker process. `settings` are those of the engine it holds, None while it holds none."""

    def __init__(self, library: str) -> None:
        self.library = library
        self.settings: dict[str, Any] | None = None
        self.process = subprocess.Popen(
            [sys.executable, "-m", "eagle3.target.worker", library],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=_environment(library),
        )

    def ask(self, request: dict[str, Any]) -> Any:
        """Send one request and wait for its result; an engine that failed is not used again."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        try:
            self.process.stdin.write(json.dumps(request) + "\n")
            self.process.stdin.flush()
            line = self.process.stdout.readline()
        except BrokenPipeError:
            line = ""
        except BaseException:  # Ctrl-C: the reply may still come, and nobody would take it
            self.end()
            raise
        reply = json.loads(line) if line.endswith("\n") else {"died": self.process.wait()}
        if "died" in reply:
            self.end()
            if request["op"] == "stop":
                return None
            raise RuntimeError(_death_message(reply["died"]))
        if "error" in reply:
            self.stop_engine()
            raise (ValueError if reply["is_value_error"] else RuntimeError)(reply["error"])
        return reply["result"]

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
    env |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1", "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1"}
    # vLLM warns of settings that are chosen here on purpose; its errors come back as exceptions.
    for name, value in (("VLLM_LOGGING_LEVEL", "ERROR"), ("TORCH_CPP_LOG_LEVEL", "ERROR"), ("PYTHONWARNINGS", "ignore")):
        env.setdefault(name, value)
    openmp = Path(sys.prefix) / "lib" / "libiomp5.so"
    if openmp.exists() and not has_gpu():
        env["LD_PRELOAD"] = os.pathsep.join([str(openmp), *filter(None, [os.environ.get("LD_PRELOAD")])])
        # Idle threads that spin for the default 200 ms take the cores from everything else (vllm/utils/ompmultiprocessing.py).
        env.setdefault("KMP_BLOCKTIME", "5")
        # Unset, a forked child is bound to one core ("disabled" aborts it): half the speed on two cores.
        env.setdefault("KMP_AFFINITY", "none")
    return env
