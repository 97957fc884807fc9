"""Keys and tokens stay in the environment: a whole run and a failing one leave them in no file and in no line of output."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from flyte_runs import ROOT, write_prompts, write_recipe

PYFLYTE = "from flytekit.clis.sdk_in_container.pyflyte import main; main()"
SECRETS = (
    "EAGLE3_SERVER_KEY",
    "HF_TOKEN",
    "AWS_ACCESS_KEY_ID",
    "AWS_SECRET_ACCESS_KEY",
    "AWS_SESSION_TOKEN",
    "FLYTE_AWS_ACCESS_KEY_ID",
    "FLYTE_AWS_SECRET_ACCESS_KEY",
)


def canary(name: str) -> str:
    return f"canary-{name.lower().replace('_', '-')}-7f3a"


def run(path: Path, target: Path, **blocks: Any) -> subprocess.CompletedProcess[str]:
    """The chain in a process; all that it writes, temporary files, Decks and caches included, lies below path."""
    (path / "tmp").mkdir(exist_ok=True)
    recipe = write_recipe(path / "recipe.yaml", target, write_prompts(path / "prompts.jsonl", 0, 8), **blocks)
    env = os.environ | {name: canary(name) for name in SECRETS}
    env |= {"HOME": str(path), "TMPDIR": str(path / "tmp"), "EAGLE3_STORE": str(path / "store"), "OMP_NUM_THREADS": "1"}
    env |= {"AWS_ENDPOINT_URL": "http://127.0.0.1:9", "AWS_MAX_ATTEMPTS": "1", "AWS_DEFAULT_REGION": "us-east-1"}
    command = [sys.executable, "-c", PYFLYTE, "-vv", "run", str(ROOT / "workflows/train_eagle3.py"), "train_eagle3"]
    return subprocess.run(
        [*command, "--inputs-file", str(recipe)], cwd=path, env=env, capture_output=True, text=True, timeout=300
    )


def leaks(path: Path, done: subprocess.CompletedProcess[str]) -> list[str]:
    found = [stream for stream in ("stdout", "stderr") if holds_canary(getattr(done, stream).encode())]
    files = [file for file in path.rglob("*") if file.is_file() and not file.is_symlink()]
    return found + [str(file) for file in files if holds_canary(file.read_bytes()) or "canary-" in str(file)]


def holds_canary(data: bytes) -> bool:
    # Terminals wrap lines anywhere.
    return b"canary-" in b"".join(data.split())


@pytest.mark.slow
def test_secrets_are_in_nothing_that_a_run_leaves_or_says(tmp_path: Path, tiny_target: Path) -> None:
    done = run(tmp_path, tiny_target)
    assert done.returncode == 0, done.stderr[-3000:]
    names = {file.name for file in tmp_path.rglob("*") if file.is_file()}
    assert names >= {"summary.json", "report.html", "manifest.json", "evaluation.json", "metrics.jsonl", "deck.html", "cache.db"}
    assert not leaks(tmp_path, done)


@pytest.mark.slow
def test_secrets_are_in_no_exception(tmp_path: Path, tiny_target: Path) -> None:
    done = run(tmp_path, tiny_target, train={"init_from": "s3://bucket/draft"})
    assert done.returncode != 0
    assert "127.0.0.1:9" in done.stdout + done.stderr
    assert not leaks(tmp_path, done)
