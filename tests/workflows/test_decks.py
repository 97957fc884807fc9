"""Live Decks of the engine's tasks: published while they work, at most every 20 s, and never in the way of
the work."""

import io
import logging
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from flytekit import Deck
from flytekit.core.context_manager import FlyteContextManager
from flytekit.types.directory import FlyteDirectory
from flytekit.types.file import FlyteFile

from eagle3.config.engine import EngineConfig, EvaluateConfig, ExtractConfig, RegenerateConfig
from eagle3.engine import engine as target_engine
from eagle3.engine.progress import Progress, Watch
from eagle3.evaluation import benchmark
from eagle3.regenerate import generator as regenerate
from eagle3.shards.tokens import TokenRow, write_token_shard
from tests.helpers.flyte_runs import make_recipe, pod
from workflows.flyte import live
from workflows.flyte.interfaces import DraftExport, Target, TokenShard
from workflows.flyte.live import JobDeck
from workflows.flyte.stage import stage
from workflows.tasks.evaluate_draft import evaluate_draft
from workflows.tasks.extract_hidden_states import extract_shard
from workflows.tasks.regenerate_responses import regenerate_shard

ENGINE = EngineConfig(engine="transformers")


@pytest.fixture
def clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The Deck's clock, by hand."""
    monkeypatch.setenv("EAGLE3_STORE", str(tmp_path / "store"))
    (tmp_path / "meta").mkdir()
    now = [100.0]
    monkeypatch.setattr(live.time, "monotonic", lambda: now[0])
    return now


def look(seconds: float, done: int = 5, unit: str = "tokens") -> Progress:
    return Progress(done, 10, unit, 0, 100 * done, done, seconds)


def published(tmp_path: Path) -> str:
    """What was published since the last call."""
    path = tmp_path / "meta" / "deck.html"
    text = path.read_text() if path.exists() else ""
    path.unlink(missing_ok=True)
    return text


def at_the_end(tmp_path: Path) -> str:
    """What Flyte writes when the task has ended."""
    Deck.publish()
    return published(tmp_path)


def test_it_is_published_at_once_and_then_every_twenty_seconds(tmp_path: Path, clock: list[float]) -> None:
    with pod(tmp_path):
        deck = JobDeck("extract shard 3")
        watch = deck.watch()
        assert "the engine starts" in published(tmp_path)
        times = []
        for second in range(1, 70):
            clock[0] += 1
            watch(look(second, second // 10))
            text = published(tmp_path)
            assert len(text) < 1_000_000
            if text:
                times.append(second)
                assert f"{second // 10} / 10" in text
        assert times == [20, 40, 60]


def test_looks_keep_their_distance_but_for_the_last(tmp_path: Path, clock: list[float]) -> None:
    deck = JobDeck("x")
    watch = deck.watch()
    for tenth in range(1, 305):
        watch(look(tenth / 10))
    (looks,) = deck.jobs.values()
    gaps = [b.seconds - a.seconds for a, b in pairwise(looks)]
    assert looks[-1].seconds == 30.4
    assert 5 <= len(looks) <= 8
    assert all(gap > 4.5 for gap in gaps[:-1])


@pytest.mark.parametrize("in_a_pod", [True, False])
def test_where_nobody_publishes_nothing_is_written(
    tmp_path: Path,
    clock: list[float],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    in_a_pod: bool,
) -> None:
    monkeypatch.setattr(Deck, "publish", lambda: pytest.fail("it was published"))

    def work() -> None:
        before = len(FlyteContextManager.current_context().user_space_params.decks)
        JobDeck("x").watch()(look(50.0))
        assert len(FlyteContextManager.current_context().user_space_params.decks) == before + in_a_pod

    if in_a_pod:  # of a map task, whose parts have no Deck
        with pod(tmp_path, enable_deck=False):
            work()
    else:
        work()
    assert published(tmp_path) == ""


def test_a_store_that_is_away_costs_a_warning(
    tmp_path: Path, clock: list[float], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def away() -> None:
        raise ConnectionError("no route")

    monkeypatch.setattr(Deck, "publish", away)
    with pod(tmp_path):
        watch = JobDeck("x").watch()
        watch(look(1))
        clock[0] += 21
        watch(look(22))
    assert [r.levelno for r in caplog.records if "could not be published (no route)" in r.message] == [
        logging.WARNING
    ] * 2


def token_shard(tmp_path: Path) -> TokenShard:
    write_token_shard(tmp_path / "shard.parquet", [TokenRow("o:1", "test", [1, 2], [False, False])])
    return TokenShard(7, FlyteFile(str(tmp_path / "shard.parquet")), 1, 2, 0, "shard")


def a_target(tmp_path: Path) -> Target:
    (tmp_path / "target").mkdir()
    (tmp_path / "target" / "config.json").write_text("{}")
    return Target("t", "r", "target", FlyteDirectory(str(tmp_path / "target")), 4, 9, 8)


def common(tmp_path: Path) -> dict[str, Any]:
    inputs = {
        "shard": token_shard(tmp_path),
        "shard_digest": "shard",
        "target": a_target(tmp_path),
        "target_digest": "target",
    }
    return {**inputs, "engine": ENGINE, "tensor_parallel_size": 1}


def test_an_answering_task_shows_its_shard_and_the_accounts(
    tmp_path: Path, clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = {
        "conversations": 1200,
        "requested": 3000,
        "answered": 2999,
        "failed": 1,
        "failed: no_room": 1,
        "skipped": 0,
    }

    def answer(*given: Any) -> dict[str, Any]:
        watch = given[-1]
        clock[0] += 30
        watch(look(30, unit="user turns"))
        assert watch.label == "regenerate shard 7"
        assert "5 / 10" in published(tmp_path)
        return {"rows": 1, "tokens": 4567, "supervised_tokens": 3, "digest": "d", "counts": dict(counts)}

    monkeypatch.setattr(target_engine, "regenerate", answer)
    with pod(tmp_path):
        made = regenerate_shard.task_function(
            regenerate=RegenerateConfig(), server_url="", **common(tmp_path)
        )
        page = at_the_end(tmp_path)
    assert (made.tokens, made.accounts) == (4567, counts)
    for text in (
        "<h1>regenerate shard 7</h1>",
        "4,567",
        "supervised tokens",
        f"<p>{regenerate.outcomes_text(counts)}</p>",
    ):
        assert text in page


def test_an_extracting_task_shows_its_shard_and_the_bytes(
    tmp_path: Path, clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    def capture(*given: Any) -> dict[str, Any]:
        watch = given[-1]
        clock[0] += 30
        watch(look(30))
        assert watch.label == "extract shard 7"
        assert "under way" in published(tmp_path)
        return {"rows": 2, "tokens": 1000, "supervised_tokens": 3, "bytes": 2_345_000_000, "digest": "d"}

    monkeypatch.setattr(target_engine, "capture", capture)
    monkeypatch.setenv("EAGLE3_STORE", "memory://states")
    with pod(tmp_path):
        extract_shard.task_function(extract=ExtractConfig(layer_ids=[1]), **common(tmp_path))
        page = at_the_end(tmp_path)
    for text in (
        "<h1>extract shard 7</h1>",
        ">2.345</b><span>GB of states",
        ">2,345,000</b><span>bytes a token",
    ):
        assert text in page


def test_an_evaluating_task_shows_its_passes_and_the_acceptance(
    tmp_path: Path, clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    figures = {
        "acceptance_length": 1.4471,
        "trainer_acceptance_length": 1.4469,
        "acceptance_by_position": [0.311, 0.106],
    }
    figures |= {"outputs_identical": True, "tokens_per_s": {"with_draft": 28.3, "without_draft": 35.2}}

    def evaluate(*inputs: Any, tensor_parallel_size: int, watch: Callable[[str], Watch]) -> dict[str, Any]:
        assert tensor_parallel_size == 2
        for label in ("evaluate without draft", "evaluate with draft"):
            clock[0] += 30
            watch(label)(look(30, unit="answers"))
            assert label in published(tmp_path)
        Path(inputs[-1]).touch()
        return figures

    monkeypatch.setattr(benchmark, "evaluate", evaluate)
    with pod(tmp_path):
        evaluate_draft.task_function(
            draft=DraftExport(FlyteDirectory(str(tmp_path / "target")), "draft"),
            draft_digest="draft",
            heldout=token_shard(tmp_path),
            heldout_digest="heldout",
            target=a_target(tmp_path),
            target_digest="target",
            engine=ENGINE,
            evaluate=EvaluateConfig(),
            recipe=make_recipe(fanout={"tensor_parallel_size": 2}),
        )
        page = at_the_end(tmp_path)
    assert page.count("<section>") == 2
    for text in ("1.447", "0.311, 0.106", "28.3 / 35.2", "identical"):
        assert text in page


class Stderr(io.StringIO):
    def __init__(self, is_terminal: bool) -> None:
        super().__init__()
        self.is_terminal = is_terminal

    def isatty(self) -> bool:
        return self.is_terminal


@pytest.mark.parametrize("is_terminal", [True, False])
def test_here_the_log_goes_to_stderr_where_that_is_no_terminal(
    monkeypatch: pytest.MonkeyPatch, is_terminal: bool
) -> None:
    logger = logging.getLogger("eagle3")
    monkeypatch.setattr(logger, "handlers", [])
    monkeypatch.setattr(logger, "level", logging.NOTSET)

    @stage
    def work() -> None:
        logging.getLogger("eagle3.engine.progress").info("half of it is done")

    for _ in range(2):  # the second stderr is another, as with every call of a test runner
        monkeypatch.setattr("sys.stderr", Stderr(is_terminal))
        logger.manager._clear_cache()  # type: ignore[attr-defined]
        work()
        assert sys.stderr.getvalue() == ("" if is_terminal else "half of it is done\n")  # type: ignore[attr-defined]
