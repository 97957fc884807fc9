"""The target's engine as three functions: generate, play, capture. The engine itself lives in a worker process, kept warm.

A call with equal settings finds its engine ready, so the shards of one stage share one start; other settings close it first,
because two engines do not fit in memory. The worker ends when this process does, however that ends: its stdin closes.

All three take `tensor_parallel_size`, GPUs that share the target, and `watch`, which shows how it goes; the first two `server_url` of
a running vLLM server, which then does the work instead of an engine of ours.
"""

import atexit
import json
import logging
import shutil
import threading
import time
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from tempfile import gettempdir
from typing import Any

from eagle3.config.engine import EngineConfig, ExtractConfig, RegenerateConfig
from eagle3.engine.process import WorkerProcess
from eagle3.engine.progress import Watch
from eagle3.files import is_remote
from eagle3.regenerate.answers import Answer
from eagle3.shards.chunks import finished_manifest, row_bytes
from eagle3.shards.tokens import read_token_shard
from eagle3.targets.properties import check_max_model_len

logger = logging.getLogger(__name__)
_lock = threading.RLock()
_worker: WorkerProcess | None = None


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
    watch: Watch | None = None,
) -> Generation:
    """Answer prompts with the target, token ids in and out.

    Args:
        prompts: token ids, each at least one and fewer than `engine.max_model_len`.
        temperature: 0 is greedy.
        seed: of the engine; the same prompts in the same call give the same answers.
        draft_dir: exported draft for speculative decoding; drafts are greedy.
        num_speculative_tokens: k, with a draft only.

    Raises:
        ValueError: if a prompt is empty or leaves no room for an answer.
        EngineDied: if the engine fails or is killed; carries its own message.
    """
    for i, prompt in enumerate(prompts):
        _check_prompt(f"prompt {i}", prompt, engine)
    if not prompts:
        return Generation([], 0.0, 0, 0, 0, [])
    _checked_config(target_dir, engine)
    settings = _settings(
        target_dir, engine, None, draft_dir, num_speculative_tokens, tensor_parallel_size, server_url
    )
    sampling = {"temperature": temperature, "top_p": top_p, "max_new_tokens": max_new_tokens, "seed": seed}
    request = {"op": "generate", "prompts": prompts, "sampling": {**sampling, "ignore_eos": ignore_eos}}
    result = _run(settings, request, watch or Watch("generate"))
    return Generation(**{**result, "answers": [Answer(**a) for a in result["answers"]]})


def play(
    target_dir: str | Path,
    token_shard_path: str | Path,
    out: str | Path,
    log_place: str,
    engine: EngineConfig,
    regenerate: RegenerateConfig,
    tensor_parallel_size: int = 1,
    server_url: str = "",
    watch: Watch | None = None,
) -> dict[str, Any]:
    """Let the target answer the waiting rows of a token shard, turn by turn on its own history.

    Args:
        out: token shard to write, whole or not at all; none if no row is left.
        log_place: directory or fsspec URL in which answers are kept as they come; one for one shard and one set of settings. What
            an earlier attempt left there is not asked again.

    Returns:
        rows, tokens, supervised_tokens and digest of the written shard; counts, as eagle3.regenerate.generator.Player.result.

    Raises:
        ValueError: if a prompt leaves no room for an answer, or the chat template cannot play the shard's conversations.
        EngineDied: if the engine fails or is killed; answers are kept.
    """
    _checked_config(target_dir, engine)
    for row in read_token_shard(token_shard_path):
        if not any(row.loss_mask):
            _check_prompt(f"{token_shard_path}: row {row.sample_id}", row.token_ids, engine)
    request = {
        "op": "play",
        "token_shard_path": _resolved(token_shard_path),
        "out": _resolved(out),
        "log_place": _resolved(log_place),
        "regenerate": regenerate.model_dump(),
        "max_model_len": engine.max_model_len,
    }
    settings = _settings(target_dir, engine, None, None, 0, tensor_parallel_size, server_url)
    return _run(settings, request, watch or Watch("regenerate"))


def capture(
    target_dir: str | Path,
    token_shard_path: str | Path,
    out: str | Path,
    layer_ids: list[int],
    engine: EngineConfig,
    extract: ExtractConfig,
    info: dict[str, Any],
    tensor_parallel_size: int = 1,
    watch: Watch | None = None,
) -> dict[str, Any]:
    """Capture the hidden states of one token shard into one hidden-state shard, going on from what an earlier attempt left.

    Args:
        out: directory or fsspec URL of the shard; one place for one shard and one set of settings.
        layer_ids: aux layers, ascending; the last hidden state is captured besides them.
        info: goes into the manifest, with the engine's version and settings: target name and revision.

    Returns:
        The manifest.

    Raises:
        ValueError: on bad layer ids, a row longer than `engine.max_model_len` or too little disk space, before the engine starts.
        EngineDied: if the engine fails, is killed, or returns states that do not reproduce its own next token, or a chunk
            cannot be written; finished chunks are kept.
        OSError: if the store at `out` does not answer.
    """
    config = _checked_config(target_dir, engine)
    _check_layer_ids(layer_ids, config["num_hidden_layers"])
    if (done := finished_manifest(out)) is not None:
        logger.info("%s was finished by an earlier attempt", out)
        return done
    _check_shard(token_shard_path, out, len(layer_ids), config["hidden_size"], engine, extract)
    places = {"token_shard_path": _resolved(token_shard_path), "out": _resolved(out)}
    request = {
        "op": "capture",
        **places,
        "layer_ids": layer_ids,
        "extract": extract.model_dump(),
        "info": info,
    }
    settings = _settings(target_dir, engine, layer_ids, None, 0, tensor_parallel_size, "")
    return _run_capture(settings, request, watch or Watch("extract"))


def close_engines() -> None:
    """End the worker and its engine, if there is one; the next call starts another."""
    global _worker
    with _lock:
        if _worker is not None:
            _worker.end()
        _worker = None


atexit.register(close_engines)


def _checked_config(target_dir: str | Path, engine: EngineConfig) -> dict[str, Any]:
    """The target's config.json; refuses an engine that is longer than it allows."""
    config: dict[str, Any] = json.loads((Path(target_dir) / "config.json").read_text())
    check_max_model_len(engine.max_model_len, config)
    return config


def _resolved(place: str | Path) -> str:
    """The place as a worker finds it that was started in another working directory."""
    return str(place) if is_remote(place) else str(Path(place).resolve())


def _check_layer_ids(layer_ids: list[int], depth: int) -> None:
    if not layer_ids or layer_ids != sorted(set(layer_ids)) or layer_ids[0] < 0 or layer_ids[-1] > depth:
        raise ValueError(
            f"layer_ids must be ascending, unique and within 0 … {depth}, the target's depth; got {layer_ids}"
        )


def _check_prompt(name: str, prompt: list[int], engine: EngineConfig) -> None:
    longest = engine.max_model_len - 1
    if not 0 < len(prompt) <= longest:
        raise ValueError(
            f"{name} has {len(prompt)} tokens; 1 … {longest} fit, raise engine.max_model_len or shorten it"
        )


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
        logger.warning(
            "tensor_parallel_size %d is ignored: only an engine of ours is split over GPUs",
            tensor_parallel_size,
        )
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


def _run(settings: dict[str, Any], request: dict[str, Any], watch: Watch) -> dict[str, Any]:
    with _lock, watch:
        library = "httpx" if settings["server_url"] else settings["engine"]["engine"]
        worker = _ready_worker(library)
        if worker.settings != settings:
            worker.stop_engine()
            worker = _ready_worker(library)
            worker.settings = settings
            worker.ask({"op": "start", "settings": settings})
        result: dict[str, Any] = worker.ask(request, watch)
        return result


def _run_capture(settings: dict[str, Any], request: dict[str, Any], watch: Watch) -> dict[str, Any]:
    """The manifest; what it took is logged."""
    start = time.perf_counter()
    result = _run(settings, request, watch)
    manifest: dict[str, Any] = result["manifest"]
    seconds, size_gb = time.perf_counter() - start, manifest["bytes"] / 1e9
    text = "captured %d tokens, %.3f GB, in %.1f s, start-up included; %d came from the prefix cache"
    logger.info(text, manifest["tokens"], size_gb, seconds, result["cached_tokens"])
    return manifest


def _ready_worker(library: str) -> WorkerProcess:
    global _worker
    if _worker is not None and (_worker.library != library or _worker.process.poll() is not None):
        close_engines()
    if _worker is None:
        if find_spec(library) is None:
            raise ValueError(
                f"{library} is not installed here; set engine.engine to transformers, the slow reference"
            )
        if library == "transformers":
            logger.warning("engine: transformers is the slow reference; use vllm where it runs")
        _worker = WorkerProcess(library)
    return _worker
