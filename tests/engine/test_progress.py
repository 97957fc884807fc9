"""What an engine reports while it works, with the transformers engine."""

import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from eagle3.config.engine import EngineConfig, ExtractConfig, RegenerateConfig
from eagle3.engine.engine import capture, generate, regenerate, run, stop
from eagle3.engine.interface import EngineSettings
from eagle3.engine.progress import Progress, Report, Watch
from eagle3.errors import EngineDied
from eagle3.regenerate.answers import Sampling
from eagle3.shards.tokens import TokenRow, write_token_shard
from tests.helpers.engine_jobs import engine_pid, is_running, report_always, report_often
from tests.helpers.factories import tiny_target

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="looks at processes in /proc"),
]
ENGINE = EngineConfig(engine="transformers", dtype="float32", max_model_len=64, max_num_seqs=4)
LENGTHS = [1 + i % 30 for i in range(40)]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("target")
    tiny_target("llama", vocab_size=13, eos_token_id=2).float().save_pretrained(path)
    return path


@pytest.fixture(scope="module", autouse=True)
def _engines() -> Iterator[None]:
    yield
    stop()


def shard(path: Path, supervised: bool) -> Path:
    rows = [
        TokenRow(f"o:{i}", "test", [(i + t) % 13 for t in range(n)], [supervised] * n)
        for i, n in enumerate(LENGTHS)
    ]
    write_token_shard(path, rows)
    return path


def answer(target: Path, on_progress: Callable[[Progress], None] | None = None) -> list[list[int]]:
    settings = EngineSettings.from_dirs(target, ENGINE)
    report_always(settings)
    prompts = [[(i + t) % 13 for t in range(n)] for i, n in enumerate(LENGTHS)]
    made = generate(settings, prompts, Sampling(0.0, 1.0, 6), watch=Watch("generate", on_progress))
    return [a.token_ids for a in made.answers]


def check(looks: list[Progress], total: int, unit: str, kept: int = 0) -> None:
    assert len(looks) > 5
    for earlier, later in pairwise(looks):
        assert earlier.done <= later.done
        assert earlier.tokens <= later.tokens
        assert earlier.conversations <= later.conversations
        assert earlier.seconds <= later.seconds
    assert {(look.total, look.unit, look.kept) for look in looks} == {(total, unit, kept)}
    assert looks[0].done < looks[-1].done == total


def test_answers_are_counted_as_they_come(target: Path) -> None:
    looks: list[Progress] = []
    answers = answer(target, looks.append)
    check(looks, len(LENGTHS), "answers")
    assert (looks[-1].tokens, looks[-1].conversations) == (sum(map(len, answers)), len(LENGTHS))


def test_finished_turns_are_counted_and_those_of_an_earlier_attempt_apart(
    tmp_path: Path, target: Path
) -> None:
    looks: list[Progress] = []

    def regenerate_to(on_progress: Callable[[Progress], None]) -> None:
        settings = EngineSettings.from_dirs(target, ENGINE)
        report_always(settings)
        cfg, watch = RegenerateConfig(temperature=0.0, max_new_tokens=6), Watch("regenerate", on_progress)
        rows = shard(tmp_path / "in", False)
        regenerate(settings, rows, tmp_path / "out", str(tmp_path / "log"), cfg, watch)

    def take_some(look: Progress) -> None:
        looks.append(look)
        if look.done >= 10:
            os.kill(engine_pid(), signal.SIGKILL)

    with pytest.raises(EngineDied, match=r"killed \(signal 9\)"):
        regenerate_to(take_some)
    kept = sum(len(f.read_text().splitlines()) for f in (tmp_path / "log").glob("*.jsonl"))
    assert 10 <= looks[-1].done <= kept < len(LENGTHS)
    looks.clear()
    regenerate_to(looks.append)
    check(looks, len(LENGTHS), "user turns", kept)
    assert looks[-1].conversations == len(LENGTHS) - kept


def test_captured_tokens_are_counted_and_those_of_finished_chunks_are_kept(
    tmp_path: Path, target: Path
) -> None:
    looks: list[Progress] = []
    extract = ExtractConfig(encoding="fp32", chunk_bytes=100_000)

    def capture_on(on_progress: Callable[[Progress], None]) -> dict[str, Any]:
        settings = EngineSettings.from_dirs(target, ENGINE, layer_ids=[1])
        report_always(settings)
        rows, watch = shard(tmp_path / "in", True), Watch("extract", on_progress)
        return capture(settings, rows, tmp_path / "out", extract, {}, watch)

    def kill_after_a_chunk(look: Progress) -> None:
        looks.append(look)
        if list((tmp_path / "out").glob("chunk-*.json")):
            os.kill(engine_pid(), signal.SIGKILL)

    with pytest.raises(EngineDied, match=r"killed \(signal 9\)"):
        capture_on(kill_after_a_chunk)
    finished = [json.loads(f.read_text())["entry"] for f in (tmp_path / "out").glob("chunk-*.json")]
    kept = sum(n for entry in finished for n in entry["lengths"])
    assert 0 < kept < sum(LENGTHS)
    looks.clear()
    assert capture_on(looks.append)["tokens"] == sum(LENGTHS)
    check(looks, sum(LENGTHS), "tokens", kept)
    assert looks[-1].tokens == sum(LENGTHS) - kept
    looks.clear()
    capture_on(looks.append)
    assert looks == []  # an earlier attempt did all


def test_a_callback_that_fails_is_dropped_and_the_job_goes_on(
    target: Path, caplog: pytest.LogCaptureFixture
) -> None:
    looks: list[Progress] = []

    def fail(look: Progress) -> None:
        looks.append(look)
        raise BrokenPipeError("nobody looks")

    expected = answer(target)
    assert answer(target, fail) == expected
    assert len(looks) == 1
    assert caplog.text.count("progress is no longer shown: nobody looks") == 1


def test_ctrl_c_while_progress_is_shown_ends_the_engine_and_the_next_call_starts_another(
    target: Path,
) -> None:
    def interrupt(look: Progress) -> None:
        raise KeyboardInterrupt

    answer(target)
    pid = engine_pid()
    with pytest.raises(KeyboardInterrupt):
        answer(target, interrupt)
    assert not is_running(pid)
    assert len(answer(target)) == len(LENGTHS)


def test_a_parent_that_reads_nothing_stops_no_engine(target: Path) -> None:
    """20,000 reports come while the first is shown: the connection takes some of them, the others are dropped."""
    looks: list[Progress] = []
    waiting = threading.Event()

    def wait_long(look: Progress) -> None:
        looks.append(look)
        waiting.wait(0 if len(looks) > 1 else 5)

    settings = EngineSettings.from_dirs(target, ENGINE)
    run(settings, partial(report_often, count=20_000), Watch("report", wait_long))
    assert 1 < len(looks) < 20_000
    assert all(earlier.done < later.done for earlier, later in pairwise(looks))


def test_a_report_is_sent_once_a_second_and_at_the_end_of_what_succeeds() -> None:
    sent: list[Progress] = []
    asked: list[int] = []
    now = [50.0]

    def generated() -> int:
        asked.append(1)
        return 7

    with Report(sent.append, lambda: now[0]) as report:
        report.send_if_due()
        assert sent == []  # no job yet
        report.start(4, "answers", lambda: report.conversations)
        for seconds in (50.5, 50.95, 51.0, 51.5, 51.95, 52.1):
            now[0] = seconds
            report.add(2, 0)
            report.send_if_due(generated)
        assert [(look.seconds, look.tokens) for look in sent] == [(1.0, 7), (2.1, 12)]
        assert len(asked) == 2  # the engine's counters cost something
        report.add(3, 4)
    assert sent[-1] == Progress(4, 4, "answers", 0, 15, 4, 2.1)
    report.send_if_due()
    assert len(sent) == 3


def test_a_job_that_fails_is_not_told_to_be_over() -> None:
    sent: list[Progress] = []
    report = Report(sent.append)
    with suppress(ZeroDivisionError), report:
        report.start(1, "answers", lambda: 1)
        raise ZeroDivisionError
    assert sent == []


def test_after_the_end_another_thread_sends_nothing() -> None:
    sent: list[Progress] = []
    with Report(sent.append, lambda: 0.0) as report:
        report.start(2, "tokens", lambda: report.tokens)
    report.clock = lambda: 100.0
    late = threading.Thread(target=report.send_if_due)
    late.start()
    late.join()
    assert len(sent) == 1
