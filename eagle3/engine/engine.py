"""Runs the target: generate answers, regenerate a token shard, capture hidden states.

The engine runs in a child process and stays loaded, so the shards of one stage load the target once. A call
with other settings stops it first, because two engines do not fit in memory. It ends with this process.
"""

import atexit
import json
import logging
import shutil
import threading
import time
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from tempfile import gettempdir
from typing import Any, TypeVar

from eagle3.config.engine import ExtractConfig, RegenerateConfig
from eagle3.engine import jobs
from eagle3.engine.interface import EngineSettings, Generation
from eagle3.engine.process import EngineProcess
from eagle3.engine.progress import Report, Watch
from eagle3.files import is_remote
from eagle3.regenerate.answers import Sampling
from eagle3.shards.chunks import finished_manifest, row_bytes
from eagle3.shards.tokens import read_token_shard

logger = logging.getLogger(__name__)
Result = TypeVar("Result")
_lock = threading.RLock()
_running: EngineProcess | None = None


def start(settings: EngineSettings) -> EngineProcess:
    """Return the running engine if its settings are equal; otherwise stop it and start another.

    Raises:
        ValueError: if the engine's library is not installed or refuses the settings.
        EngineDied: on any other failure.
    """
    global _running
    with _lock:
        if _running is not None and _running.settings == settings and _running.is_alive():
            return _running
        stop()
        if find_spec(settings.library) is None:
            raise ValueError(
                f"{settings.library} is not installed here; "
                "set engine.engine to transformers, the slow reference"
            )
        if settings.library == "transformers":
            logger.warning("engine: transformers is the slow reference; use vllm where it runs")
        _running = EngineProcess(settings)
        return _running


def stop() -> None:
    """Stop the running engine, if any; the next call starts another."""
    global _running
    with _lock:
        if _running is not None:
            _running.end()
        _running = None


atexit.register(stop)


def run(settings: EngineSettings, job: Callable[[Any, Report], Result], watch: Watch) -> Result:
    """Run a job of eagle3.engine.jobs and return its result; raises as start and EngineProcess.run do."""
    with _lock, watch:
        result: Result = start(settings).run(job, watch)
    return result


def generate(
    settings: EngineSettings,
    prompts: list[list[int]],
    sampling: Sampling,
    seed: int = 0,
    watch: Watch | None = None,
) -> Generation:
    """Answer prompts of token ids; the same list of prompts and the same seed give the same answers.

    Args:
        settings: without `layer_ids`; with `speculation` a draft proposes tokens greedily.

    Raises:
        ValueError: if a prompt is empty or leaves no room for an answer.
        EngineDied: if the engine fails or is killed.
    """
    for i, prompt in enumerate(prompts):
        _check_length(f"prompt {i}", len(prompt), settings.engine.max_model_len - 1, "shorten it")
    if not prompts:
        return Generation([])
    job = partial(jobs.generate, prompts=prompts, sampling=sampling, seed=seed)
    return run(settings, job, watch or Watch("generate"))


def regenerate(
    settings: EngineSettings,
    token_shard_path: str | Path,
    out: str | Path,
    log_uri: str,
    cfg: RegenerateConfig,
    watch: Watch | None = None,
) -> dict[str, Any]:
    """Answer a token shard's unanswered rows turn by turn; each prompt has the target's earlier answers.

    Args:
        settings: without `layer_ids`; with `server_url` a running vLLM server answers.
        out: token shard, written atomically; not written if every row is dropped.
        log_uri: directory or fsspec URL that keeps every answer of this shard and these settings. A later
            attempt reads them instead of generating them again.

    Returns:
        rows, tokens, supervised_tokens and digest of the written shard; counts, see AnswerGenerator.result.

    Raises:
        ValueError: if a prompt leaves no room for an answer, or the chat template refuses a conversation.
        EngineDied: if the engine fails or is killed; answers are kept.
    """
    for row in read_token_shard(token_shard_path):
        if not any(row.loss_mask):
            name = f"{token_shard_path}: row {row.sample_id}"
            _check_length(name, len(row.token_ids), settings.engine.max_model_len - 1, "shorten it")
    job = partial(
        jobs.regenerate,
        token_shard_path=_resolved(token_shard_path),
        out=_resolved(out),
        log_uri=_resolved(log_uri),
        cfg=cfg,
    )
    return run(settings, job, watch or Watch("regenerate"))


def capture(
    settings: EngineSettings,
    token_shard_path: str | Path,
    out: str | Path,
    extract: ExtractConfig,
    info: dict[str, Any],
    watch: Watch | None = None,
) -> dict[str, Any]:
    """Write the hidden states of a token shard; resumes after the last finished chunk.

    Args:
        settings: with `layer_ids`, ascending; the last hidden state is captured too.
        out: directory or fsspec URL, for this shard and these settings only.
        info: target name and revision; the manifest holds them next to the engine's version and settings.

    Returns:
        The manifest.

    Raises:
        ValueError: on bad layer ids, a row longer than `engine.max_model_len` or too little disk space.
        EngineDied: if the engine fails, is killed or returns states that do not reproduce its next token, or
            a chunk cannot be written; finished chunks are kept.
        OSError: if the store at `out` does not answer.
    """
    config = json.loads((Path(settings.target_dir) / "config.json").read_text())
    _check_layer_ids(settings.layer_ids, config["num_hidden_layers"])
    if (done := finished_manifest(out)) is not None:
        logger.info("%s was finished by an earlier attempt", out)
        return done
    _check_shard(settings, token_shard_path, out, extract, config["hidden_size"])
    job = partial(
        jobs.capture,
        token_shard_path=_resolved(token_shard_path),
        out=_resolved(out),
        extract=extract,
        info=info,
    )
    start_s = time.perf_counter()
    manifest, cached_tokens = run(settings, job, watch or Watch("extract"))
    logger.info(
        "captured %d tokens, %.3f GB, in %.1f s with start-up; %d came from the prefix cache",
        manifest["tokens"],
        manifest["bytes"] / 1e9,
        time.perf_counter() - start_s,
        cached_tokens,
    )
    return manifest


def _resolved(uri: str | Path) -> str:
    """Make a path absolute: the engine process may have another working directory."""
    return str(uri) if is_remote(uri) else str(Path(uri).resolve())


def _check_layer_ids(layer_ids: tuple[int, ...] | None, depth: int) -> None:
    ids = list(layer_ids or ())
    if not ids or ids != sorted(set(ids)) or ids[0] < 0 or ids[-1] > depth:
        raise ValueError(
            f"layer_ids must be ascending, unique and within 0 … {depth}, the target's depth; got {ids}"
        )


def _check_length(name: str, num_tokens: int, longest: int, remedy: str) -> None:
    if not 0 < num_tokens <= longest:
        raise ValueError(
            f"{name} has {num_tokens} tokens; 1 … {longest} fit, raise engine.max_model_len or {remedy}"
        )


def _check_shard(
    settings: EngineSettings,
    token_shard_path: str | Path,
    out: str | Path,
    extract: ExtractConfig,
    hidden_size: int,
) -> None:
    """Refuse rows that are too long for the engine, and states that do not fit on the disk."""
    rows = read_token_shard(token_shard_path)
    for row in rows:
        name = f"{token_shard_path}: row {row.sample_id}"
        _check_length(name, len(row.token_ids), settings.engine.max_model_len, "lower data.max_tokens")
    num_aux = len(settings.layer_ids or ())
    sizes = [row_bytes(row, num_aux, hidden_size, extract.encoding) for row in rows]
    directory = Path(out)
    needed = sum(sizes)
    if is_remote(out):  # one chunk at a time is kept in the temporary directory until it is uploaded
        directory = Path(gettempdir())
        needed = min(needed, extract.chunk_bytes + max(sizes))
    directory.mkdir(parents=True, exist_ok=True)
    present = sum(f.stat().st_size for f in directory.glob("chunk-*.safetensors"))
    free = shutil.disk_usage(directory).free
    num_tokens = sum(len(row.token_ids) for row in rows)
    text = (
        f"{out}: the states of {num_tokens} tokens need {sum(sizes) / 1e9:.3f} GB as {extract.encoding} "
        f"before compression, {needed / 1e9:.3f} GB in {directory}; {free / 1e9:.3f} GB are free there"
    )
    logger.info(text)
    if needed - present > free:
        raise ValueError(f"{text}; free some, lower data.rows_per_shard, or set extract.encoding to fp8")
