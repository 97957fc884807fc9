"""The target's engine: start it, generate, regenerate a token shard, capture hidden states, stop it.

The engine runs in a process of its own and stays warm: a call with equal settings finds it ready, so the
shards of one stage share one start. Other settings stop it first, because two engines do not fit in memory.
It ends with this process, however that ends.
"""

import atexit
import json
import logging
import shutil
import threading
import time
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from tempfile import gettempdir
from typing import Any

from eagle3.config.engine import ExtractConfig, RegenerateConfig
from eagle3.engine import jobs
from eagle3.engine.interface import EngineSettings, Generation
from eagle3.engine.process import EngineProcess, Job
from eagle3.engine.progress import Watch
from eagle3.files import is_remote
from eagle3.regenerate.answers import Sampling
from eagle3.shards.chunks import finished_manifest, row_bytes
from eagle3.shards.tokens import read_token_shard

logger = logging.getLogger(__name__)
_lock = threading.RLock()
_running: EngineProcess | None = None


def start(settings: EngineSettings) -> EngineProcess:
    """The running engine if it has these settings, else a new one, after the running one has ended.

    Raises:
        ValueError: if the engine's library is not installed, or refuses the settings.
        EngineDied: if it fails otherwise.
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
    """End the engine, if one runs; the next call starts another."""
    global _running
    with _lock:
        if _running is not None:
            _running.end()
        _running = None


atexit.register(stop)


def run(settings: EngineSettings, job: Job, watch: Watch) -> Any:
    """Run a job (see eagle3.engine.jobs) in an engine with these settings and return its result.

    Raises:
        ValueError, EngineDied: as EngineProcess.run.
    """
    with _lock, watch:
        return start(settings).run(job, watch)


def generate(
    settings: EngineSettings,
    prompts: list[list[int]],
    sampling: Sampling,
    seed: int = 0,
    watch: Watch | None = None,
) -> Generation:
    """Answer prompts with the target, token ids in and out.

    Args:
        settings: without `layer_ids`; with `speculation` a draft proposes tokens, greedily.
        prompts: token ids, each at least one and fewer than `engine.max_model_len`.
        seed: of the engine; the same prompts in the same call give the same answers.
        watch: shows the progress.

    Raises:
        ValueError: if a prompt is empty or leaves no room for an answer.
        EngineDied: if the engine fails or is killed; carries its own message.
    """
    for i, prompt in enumerate(prompts):
        _check_prompt(f"prompt {i}", prompt, settings)
    if not prompts:
        return Generation([])
    job = partial(jobs.generate, prompts=prompts, sampling=sampling, seed=seed)
    generation: Generation = run(settings, job, watch or Watch("generate"))
    return generation


def regenerate(
    settings: EngineSettings,
    token_shard_path: str | Path,
    out: str | Path,
    log_uri: str,
    cfg: RegenerateConfig,
    watch: Watch | None = None,
) -> dict[str, Any]:
    """Let the target answer the waiting rows of a token shard, turn by turn on its own history.

    Args:
        settings: without `layer_ids`; `server_url` lets a running vLLM server answer.
        out: token shard to write, atomically; none if no row is left.
        log_uri: directory or fsspec URL that keeps the answers as they come, of one shard and one set of
            settings. Answers of an earlier attempt are not asked for again.
        watch: shows the progress.

    Returns:
        rows, tokens, supervised_tokens and digest of the written shard; counts, as AnswerGenerator.result.

    Raises:
        ValueError: if a prompt leaves no room for an answer, or the chat template refuses a conversation.
        EngineDied: if the engine fails or is killed; answers are kept.
    """
    for row in read_token_shard(token_shard_path):
        if not any(row.loss_mask):
            _check_prompt(f"{token_shard_path}: row {row.sample_id}", row.token_ids, settings)
    job = partial(
        jobs.regenerate,
        token_shard_path=_resolved(token_shard_path),
        out=_resolved(out),
        log_uri=_resolved(log_uri),
        cfg=cfg,
    )
    result: dict[str, Any] = run(settings, job, watch or Watch("regenerate"))
    return result


def capture(
    settings: EngineSettings,
    token_shard_path: str | Path,
    out: str | Path,
    extract: ExtractConfig,
    info: dict[str, Any],
    watch: Watch | None = None,
) -> dict[str, Any]:
    """Write one token shard's hidden states to a hidden-state shard; resumes after the last finished chunk.

    Args:
        settings: with `layer_ids`, ascending; the last hidden state is captured too.
        out: directory or fsspec URL of the shard; one for one shard and one set of settings.
        info: goes into the manifest, with the engine's version and settings: target name and revision.
        watch: shows the progress.

    Returns:
        The manifest.

    Raises:
        ValueError: on bad layer ids, a row longer than `engine.max_model_len` or too little disk space.
        EngineDied: if the engine fails, is killed, or returns states that do not reproduce its own next
            token, or a chunk cannot be written; finished chunks are kept.
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
    began = time.perf_counter()
    manifest, cached_tokens = run(settings, job, watch or Watch("extract"))
    logger.info(
        "captured %d tokens, %.3f GB, in %.1f s, start-up included; %d came from the prefix cache",
        manifest["tokens"],
        manifest["bytes"] / 1e9,
        time.perf_counter() - began,
        cached_tokens,
    )
    captured: dict[str, Any] = manifest
    return captured


def _resolved(uri: str | Path) -> str:
    """The URI for an engine process that was started in another working directory."""
    return str(uri) if is_remote(uri) else str(Path(uri).resolve())


def _check_layer_ids(layer_ids: tuple[int, ...] | None, depth: int) -> None:
    ids = list(layer_ids or ())
    if not ids or ids != sorted(set(ids)) or ids[0] < 0 or ids[-1] > depth:
        raise ValueError(
            f"layer_ids must be ascending, unique and within 0 … {depth}, the target's depth; got {ids}"
        )


def _check_prompt(name: str, prompt: list[int], settings: EngineSettings) -> None:
    longest = settings.engine.max_model_len - 1
    if not 0 < len(prompt) <= longest:
        raise ValueError(
            f"{name} has {len(prompt)} tokens; 1 … {longest} fit, raise engine.max_model_len or shorten it"
        )


def _check_shard(
    settings: EngineSettings,
    token_shard_path: str | Path,
    out: str | Path,
    extract: ExtractConfig,
    hidden_size: int,
) -> None:
    """Refuse rows that the engine does not take, and states that the disk does not hold."""
    rows = read_token_shard(token_shard_path)
    longest = settings.engine.max_model_len
    for row in rows:
        if not 0 < len(row.token_ids) <= longest:
            raise ValueError(
                f"{token_shard_path}: row {row.sample_id} has {len(row.token_ids)} tokens; "
                f"1 … {longest} fit, raise engine.max_model_len or lower data.max_tokens"
            )
    num_aux = len(settings.layer_ids or ())
    sizes = [row_bytes(row, num_aux, hidden_size, extract.encoding) for row in rows]
    directory, needed = Path(out), sum(sizes)
    if is_remote(out):  # chunks wait in the temporary directory, one at a time, until they are uploaded
        directory, needed = Path(gettempdir()), min(sum(sizes), extract.chunk_bytes + max(sizes))
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
