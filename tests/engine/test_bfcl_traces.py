"""A real language model answers BFCL's tool tasks on the real engine, in the stage that users run, with a kill."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from flytekit.core.local_cache import LocalTaskCache

from eagle3.data.chat import load_chat_tokenizer
from eagle3.data.script import Script
from eagle3.data.sources import without_paths
from eagle3.engine.engine import stop
from eagle3.errors import EngineDied
from eagle3.regenerate.generator import outcomes_text
from eagle3.shards.tokens import TokenRow, read_token_shard
from eagle3.targets.resolve import identify_target
from tests.helpers.engine_jobs import engine_pid
from tests.helpers.flyte_runs import make_recipe
from workflows.flyte.interfaces import PreparedData, Target, TargetRef, TokenShards
from workflows.flyte.recipe import Recipe
from workflows.tasks.fetch_target import fetch_target
from workflows.tasks.prepare_data import prepare_data
from workflows.tasks.regenerate_responses import NAME, regenerate_responses

ROOT = Path(__file__).resolve().parents[2]
GGUF = ROOT / "runs" / "target" / "SmolLM2-135M-Instruct.gguf"
BFCL = ROOT / "runs" / "bfcl"
CATEGORIES = ("simple_python", "multiple", "parallel", "parallel_multiple")


def bfcl_recipe() -> Recipe:
    """Two tool tasks of each category; two answers at once, so that a shard's answers do not all come at its end."""
    files = {category: next(BFCL.glob(f"BFCL_v*_{category}.json")) for category in CATEGORIES}
    sources = [
        {"path": str(file), "preset": "bfcl", "name": name, "max_rows": 2} for name, file in files.items()
    ]
    return make_recipe(
        target={
            "name": str(GGUF),
            "public_name": "example-org/small",
            "chat_template": str(ROOT / "workflows" / "recipes" / "tools.jinja"),
        },
        prompts=None,
        heldout=str(ROOT / "workflows" / "recipes" / "heldout.jsonl"),
        engine={
            "dtype": "float32",
            "enforce_eager": True,
            "max_model_len": 1024,
            "max_num_seqs": 2,
            "max_num_batched_tokens": 1024,
        },
        data={"sources": sources, "max_prompt_tokens": 900, "workers": 1},
        regenerate={"temperature": 0.0, "max_new_tokens": 32, "tool_parser": "hermes"},
    )


pytestmark = [
    pytest.mark.engine,
    pytest.mark.slow,
    pytest.mark.skipif(
        not (GGUF.exists() and (BFCL / "fetched").exists()),
        reason="needs the small target and BFCL's files; make test fetches them",
    ),
]


@pytest.fixture(scope="module", autouse=True)
def _engines() -> Iterator[None]:
    yield
    stop()


@pytest.fixture(scope="module")
def env(tmp_path_factory: pytest.TempPathFactory) -> Iterator[pytest.MonkeyPatch]:
    path = tmp_path_factory.mktemp("work")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", str(path / "home"))
        patch.setenv("EAGLE3_STORE", str(path / "store"))
        patch.setattr(LocalTaskCache, "_initialized", False)
        yield patch


@pytest.fixture(scope="module")
def recipe(env: pytest.MonkeyPatch) -> Recipe:
    return bfcl_recipe()


@pytest.fixture(scope="module")
def target(recipe: Recipe) -> Target:
    name, revision, digest = identify_target(recipe.target)
    return fetch_target(ref=TargetRef(name, revision, digest), target_digest=digest, recipe=recipe)


@pytest.fixture(scope="module")
def data(recipe: Recipe, target: Target) -> PreparedData:
    prepared: PreparedData = prepare_data(
        prompts_digest="",
        source_versions=["1"] * 4,
        heldout_digest="h",
        target=target,
        target_digest=target.digest,
        data=without_paths(recipe.data),
        regenerate=True,
        recipe=recipe,
    )
    return prepared


def collect(data: PreparedData, target: Target) -> TokenShards:
    traces: TokenShards = regenerate_responses(data=data, target=target, recipe=bfcl_recipe())
    return traces


def rows_of(traces: TokenShards) -> list[TokenRow]:
    return [row for shard in traces.shards for row in read_token_shard(shard.file.path)]


def answers_in(store: Path) -> list[str]:
    """Lines of all logs, oldest file first: what the engine was asked."""
    logs = sorted(store.glob(f"{NAME}-*/answers-*.jsonl"), key=lambda f: f.stat().st_ctime_ns)
    return [line for log in logs for line in log.read_text().splitlines()]


def kill_the_engine_after(num_answers: int, store: Path) -> None:
    def wait() -> None:
        while len(answers_in(store)) < num_answers:
            time.sleep(0.01)
        os.kill(engine_pid(), signal.SIGKILL)

    threading.Thread(target=wait, daemon=True).start()


def test_bfcl_tasks_are_answered_and_a_killed_run_resumes_to_the_same_rows(
    data: PreparedData, target: Target, env: pytest.MonkeyPatch, tmp_path: Path, caplog: Any
) -> None:
    assert data.shards == []
    tasks = [row for shard in data.tool_tasks for row in read_token_shard(shard.file.path)]
    assert [shard.rows for shard in data.tool_tasks] == [2] * len(CATEGORIES)
    env.setenv("EAGLE3_STORE", str(tmp_path / "killed"))
    kill_the_engine_after(3, tmp_path / "killed")  # in the second shard
    with pytest.raises(EngineDied, match=r"killed \(signal 9\)"):
        collect(data, target)
    kept = answers_in(tmp_path / "killed")
    assert 3 <= len(kept) < 5
    resumed = collect(data, target)
    found = answers_in(tmp_path / "killed")
    assert (len(found), found[: len(kept)]) == (len(tasks), kept)

    env.setenv("EAGLE3_STORE", str(tmp_path / "whole"))
    env.setenv("FLYTE_LOCAL_CACHE_OVERWRITE", "true")
    whole = collect(data, target)
    assert rows_of(resumed) == rows_of(whole)
    assert resumed.digest == whole.digest
    assert resumed.accounts == whole.accounts

    counts = whole.accounts
    assert counts["requested"] == counts["conversations"] == len(tasks)
    assert counts["requested"] == sum(counts.get(name, 0) for name in ("answered", "failed", "skipped"))
    print(outcomes_text(counts))
    check_rows(tasks, rows_of(whole), target)


def check_rows(tasks: list[TokenRow], rows: list[TokenRow], target: Target) -> None:
    """The prompt is the task's, with the request and every tool in it; all that follows is supervised."""
    tokenizer = load_chat_tokenizer(target.directory.path)
    by_id = {row.sample_id: row for row in tasks}
    for row in rows:
        task = by_id[row.sample_id]
        begin = len(task.token_ids)
        assert row.token_ids[:begin] == task.token_ids
        assert row.loss_mask == [False] * begin + [True] * (len(row.token_ids) - begin)
        script, prompt = Script.from_json(task.script), tokenizer.decode(task.token_ids)
        assert script.messages[-1]["content"] in prompt
        assert all(tool["function"]["name"] in prompt for tool in script.tools or [])
