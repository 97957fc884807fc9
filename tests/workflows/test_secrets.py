"""Keys and tokens stay where they were given, in the environment and in URLs: a whole run and a failing one
leave them in no file and in no line of output. A recipe is an input of Flyte's tasks, so what it holds stands
where Flyte itself keeps or tells inputs.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.helpers.flyte_runs import CHAT_TEMPLATE, ROOT, pyflyte_run, write_prompts, write_recipe
from tests.helpers.signed_server import SIGNATURE, signed_server

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
# Of signed URLs in a recipe: at -vv flytekit tells the inputs of each task and each look into its cache.
SIGNATURES = ("signature", "expired", "token")
FLYTEKIT_TELLS = '"name": "flytekit", "levelname": "INFO"'


def canary(name: str) -> str:
    return f"canary-{name.lower().replace('_', '-')}-7f3a"


@pytest.fixture
def signed(tmp_path: Path) -> Iterator[str]:
    """A server whose files are given to whoever has the signature canary("signature")."""
    there = tmp_path / "there"
    there.mkdir()
    write_prompts(there / "prompts.jsonl", 0, 4)
    write_prompts(there / "rows.jsonl", 4, 8)
    write_prompts(there / "excluded.jsonl", 50, 52)
    write_prompts(there / "heldout.jsonl", 100, 102)
    (there / "template.jinja").write_text(CHAT_TEMPLATE)
    with signed_server(there, [canary("signature")]) as url:
        yield url


def run(
    path: Path, target: Path, url: str, signature: str = canary("signature"), **blocks: Any
) -> subprocess.CompletedProcess[str]:
    """The chain in a process, all its files at signed URLs. What it writes, temporary files, Decks and caches
    included, lies below path, the recipe beside it."""
    (path / "tmp").mkdir(parents=True)

    def place(name: str) -> str:
        return f"{url}/{name}?{SIGNATURE}={signature}"

    data = {"sources": [{"path": place("rows.jsonl")}], "excluded": [{"path": place("excluded.jsonl")}]}
    recipe = write_recipe(
        path.with_suffix(".yaml"),
        target,
        path,
        data=data,
        target={"chat_template": place("template.jinja")},
        **blocks,
    )
    files = {name: place(f"{name}.jsonl") for name in ("prompts", "heldout")}
    recipe.write_text(yaml.safe_dump(yaml.safe_load(recipe.read_text()) | files))
    env = os.environ | {name: canary(name) for name in SECRETS}
    env |= {
        "HOME": str(path),
        "TMPDIR": str(path / "tmp"),
        "EAGLE3_STORE": str(path / "store"),
        "OMP_NUM_THREADS": "1",
    }
    env |= {
        "AWS_ENDPOINT_URL": "http://127.0.0.1:9",
        "AWS_MAX_ATTEMPTS": "1",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    env |= {"FLYTE_SDK_RICH_TRACEBACKS": "0"}  # one line a record
    command = [
        sys.executable,
        "-c",
        PYFLYTE,
        "-vv",
        "run",
        str(ROOT / "workflows/train_eagle3.py"),
        "train_eagle3",
    ]
    return subprocess.run(
        [*command, "--recipe", str(recipe)], cwd=path, env=env, capture_output=True, text=True, timeout=300
    )


def leaks(path: Path, *said: str) -> list[str]:
    """Lines of output and files that hold what they must not."""
    lines = [
        without_signatures(line) if FLYTEKIT_TELLS in line else line
        for text in said
        for line in text.splitlines()
    ]
    found = ["output"] * holds_canary("".join(lines).encode())
    files = [file for file in path.rglob("*") if file.is_file() and not file.is_symlink()]
    return found + [str(file) for file in files if holds_canary(file.read_bytes()) or "canary-" in str(file)]


def without_signatures(line: str) -> str:
    for name in SIGNATURES:
        line = line.replace(canary(name), "")
    return line


def holds_canary(data: bytes) -> bool:
    # Terminals wrap lines anywhere.
    return b"canary-" in b"".join(data.split())


@pytest.mark.slow
def test_secrets_are_in_nothing_that_a_run_leaves_or_says(
    tmp_path: Path, tiny_target: Path, signed: str
) -> None:
    path = tmp_path / "run"
    done = run(path, tiny_target, signed)
    assert done.returncode == 0, done.stderr[-3000:]
    names = {file.name for file in path.rglob("*") if file.is_file()}
    assert names >= {
        "summary.json",
        "report.html",
        "manifest.json",
        "evaluation.json",
        "metrics.jsonl",
        "deck.html",
        "cache.db",
    }
    assert "rows.jsonl" in (path / "runs/tiny/data.html").read_text()
    assert not leaks(path, done.stdout, done.stderr)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("signature", "init_from", "said"),
    [
        (canary("signature"), "s3://bucket/draft", "127.0.0.1:9"),
        (canary("signature"), f"http://127.0.0.1:9/draft?{canary('token')}", "127.0.0.1:9"),
        (canary("expired"), "", "template.jinja"),
    ],
)
def test_secrets_are_in_no_exception(
    tmp_path: Path, tiny_target: Path, signed: str, signature: str, init_from: str, said: str
) -> None:
    path = tmp_path / "run"
    done = run(path, tiny_target, signed, signature, train={"init_from": init_from})
    assert done.returncode != 0
    assert said in done.stdout + done.stderr
    assert not leaks(path, done.stdout, done.stderr)
    assert "Traceback" in done.stderr + done.stdout


PLACE = f"http://user:{canary('password')}@127.0.0.1:9/x.jsonl?{SIGNATURE}={canary('signature')}"


@pytest.mark.parametrize(
    ("inputs", "key"),
    [
        ({"target": {"name": PLACE}}, "target.name"),
        ({"target": {"chat_template": PLACE}}, "target.chat_template"),
        ({"data": {"sources": [{"path": PLACE}]}}, "data.sources.0.path"),
        ({"data": {"excluded": [{"path": PLACE}]}}, "data.excluded.0.path"),
        ({"train": {"init_from": PLACE}}, "train.init_from"),
        ({"fanout": {"server_urls": [PLACE]}}, "fanout.server_urls.0"),
        ({"promote": {"place": PLACE}}, "promote.place"),
        ({"prompts": PLACE}, "prompts"),
        ({"heldout": PLACE}, "heldout"),
        ({"shards": [PLACE]}, ""),
    ],
)
def test_a_password_in_a_url_is_refused_and_stands_nowhere(
    tmp_path: Path, workplace: Path, tiny_target: Path, inputs: dict[str, Any], key: str
) -> None:
    """A wrong recipe ends the run before it begins; wrong shards when they are first read."""
    recipe = write_recipe(
        tmp_path / "recipe.yaml", tiny_target, write_prompts(tmp_path / "prompts.jsonl", 0, 4)
    )
    given = yaml.safe_load(recipe.read_text())
    more: list[str] = []
    for name, value in inputs.items():
        if name in ("promote", "shards"):
            more = [f"--{name}", json.dumps(value)]
            continue
        given[name] = given.get(name, {}) | value if isinstance(value, dict) else value
    recipe.write_text(yaml.safe_dump(given))
    file, workflow = {
        "promote": ("retrain_eagle3.py", "retrain_eagle3"),
        "shards": ("train_eagle3.py", "train_from_shards"),
    }.get(next(iter(inputs)), ("train_eagle3.py", "train_eagle3"))
    result = pyflyte_run(recipe, file, workflow, more)
    assert result.exit_code != 0
    said = " ".join(result.output.split())
    assert f"{key}: a URL must carry no user".removeprefix(": ") in said.replace("│ ", "")
    assert "EAGLE3_SERVER_SECRET" in said
    assert ("Running Execution" in said) is not bool(key)
    assert not leaks(workplace, result.output, repr(result.exception))
