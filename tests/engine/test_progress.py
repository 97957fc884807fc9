"""What a worker tells of its jobs on their way, with the transformers engine."""

import json
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from eagle3.config.engine import EngineConfig, ExtractConfig, RegenerateConfig
from eagle3.engine import engine as target_engine
from eagle3.engine.engine import capture, close_engines, generate, play
from eagle3.engine.progress import Progress, Report, Watch
from eagle3.engine.worker import _teller
from eagle3.shards.tokens import TokenRow, write_token_shard
from tests.helpers.factories import tiny_target

ENGINE = EngineConfig(engine="transformers", dtype="float32", max_model_len=64, max_num_seqs=4)
LENGTHS = [1 + i % 30 for i in range(40)]
# The worker, telling at every opportunity instead of once a second.
EAGER = "import sys; from eagle3.engine import progress, worker; progress.REPORT_EVERY_S = 0; worker.main(sys.argv[-1])"


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("target")
    tiny_target("llama", vocab_size=13, eos_token_id=2).float().save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def eager() -> Iterator[None]:
    if sys.platform != "linux":
        pytest.skip("looks at processes in /proc")
    start = subprocess.Popen

    def start_eager(command: list[str], *args: Any, **kwargs: Any) -> Any:
        return start(
            [command[0], "-c", EAGER, *command[1:]] if "eagle3.engine.worker" in command else command,
            *args,
            **kwargs,
        )

    close_engines()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(subprocess, "Popen", start_eager)
        yield
    close_engines()


def shard(path: Path, supervised: bool) -> Path:
    rows = [
        TokenRow(f"o:{i}", "test", [(i + t) % 13 for t in range(n)], [supervised] * n)
        for i, n in enumerate(LENGTHS)
    ]
    write_token_shard(path, rows)
    return path


def answer(target: Path, on_progress: Callable[[Progress], None] | None = None) -> list[list[int]]:
    prompts = [[(i + t) % 13 for t in range(n)] for i, n in enumerate(LENGTHS)]
    watch = Watch("generate", on_progress)
    made = generate(target, prompts, ENGINE, temperature=0, top_p=1, max_new_tokens=6, seed=0, watch=watch)
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


@pytest.mark.usefixtures("eager")
def test_answers_are_counted_as_they_come(target: Path) -> None:
    looks: list[Progress] = []
    answers = answer(target, looks.append)
    check(looks, len(LENGTHS), "answers")
    assert (looks[-1].tokens, looks[-1].conversations) == (sum(map(len, answers)), len(LENGTHS))


@pytest.mark.usefixtures("eager")
def test_turns_are_counted_as_they_are_over_and_those_of_an_earlier_attempt_are_told_apart(
    tmp_path: Path, target: Path
) -> None:
    looks: list[Progress] = []

    def play_on(on_progress: Callable[[Progress], None]) -> None:
        regenerate, watch = (
            RegenerateConfig(temperature=0.0, max_new_tokens=6),
            Watch("regenerate", on_progress),
        )
        play(
            target,
            shard(tmp_path / "in", False),
            tmp_path / "out",
            str(tmp_path / "log"),
            ENGINE,
            regenerate,
            watch=watch,
        )

    def take_some(look: Progress) -> None:
        looks.append(look)
        if look.done >= 10:
            os.kill(engine_pid(), signal.SIGKILL)

    with pytest.raises(RuntimeError, match=r"killed \(signal 9\)"):
        play_on(take_some)
    kept = sum(len(f.read_text().splitlines()) for f in (tmp_path / "log").glob("*.jsonl"))
    assert 10 <= looks[-1].done <= kept < len(LENGTHS)
    looks.clear()
    play_on(looks.append)
    check(looks, len(LENGTHS), "user turns", kept)
    assert looks[-1].conversations == len(LENGTHS) - kept


@pytest.mark.usefixtures("eager")
def test_captured_tokens_are_counted_and_those_of_finished_chunks_are_kept(
    tmp_path: Path, target: Path
) -> None:
    looks: list[Progress] = []
    extract = ExtractConfig(encoding="fp32", chunk_bytes=100_000)

    def capture_on(on_progress: Callable[[Progress], None]) -> dict[str, Any]:
        path, watch = shard(tmp_path / "in", True), Watch("extract", on_progress)
        return capture(target, path, tmp_path / "out", [1], ENGINE, extract, {}, watch=watch)

    def kill_after_a_chunk(look: Progress) -> None:
        looks.append(look)
        if list((tmp_path / "out").glob("chunk-*.json")):
            os.kill(engine_pid(), signal.SIGKILL)

    with pytest.raises(RuntimeError, match=r"killed \(signal 9\)"):
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
    assert looks == []  # all of it is there


def engine_pid() -> int:
    """The process that holds the engine: the only child of the worker, or the worker."""
    assert target_engine._worker is not None
    worker = target_engine._worker.process.pid
    return int(Path(f"/proc/{worker}/task/{worker}/children").read_text().split()[0])


@pytest.mark.usefixtures("eager")
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
    assert caplog.text.count("progress is not shown any more: nobody looks") == 1


@pytest.mark.usefixtures("eager")
def test_ctrl_c_while_progress_is_shown_ends_the_worker_and_the_next_call_starts_another(
    target: Path,
) -> None:
    def interrupt(look: Progress) -> None:
        raise KeyboardInterrupt

    answer(target)
    worker = target_engine._worker
    assert worker is not None
    with pytest.raises(KeyboardInterrupt):
        answer(target, interrupt)
    assert worker.process.poll() is not None
    assert len(answer(target)) == len(LENGTHS)


def test_a_parent_that_reads_nothing_stops_no_engine_and_finds_whole_lines() -> None:
    fds = os.pipe()
    with os.fdopen(fds[0]) as reader, os.fdopen(fds[1], "w") as replies:
        tell = _teller(replies)
        for i in range(5000):  # half a megabyte into a pipe of 64 KiB
            tell(Progress(i, 5000, "user turns", 0, i, i, i))
        told = 0
        while select.select([reader], [], [], 0)[0]:
            assert json.loads(reader.readline())["progress"]["done"] == told
            told += 1
            if told == 100:
                break
        assert told == 100


def test_a_parent_that_is_gone_is_told_nothing_and_nothing_fails() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as replies:
        _teller(replies)(Progress(1, 2, "answers", 0, 1, 1, 1.0))


def test_a_report_is_sent_once_a_second_and_at_the_end_of_what_succeeds() -> None:
    sent: list[Progress] = []
    asked: list[int] = []
    now = [50.0]

    def generated() -> int:
        asked.append(1)
        return 7

    with Report(sent.append, lambda: now[0]) as report:
        report.tell()
        assert sent == []  # no job yet
        report.begin(4, "answers", lambda: report.conversations)
        for seconds in (50.5, 50.95, 51.0, 51.5, 51.95, 52.1):
            now[0] = seconds
            report.add(2, 0)
            report.tell(generated)
        assert [(look.seconds, look.tokens) for look in sent] == [(1.0, 7), (2.1, 12)]
        assert len(asked) == 2  # the engine's counters cost something
        report.add(3, 4)
    assert sent[-1] == Progress(4, 4, "answers", 0, 15, 4, 2.1)
    report.tell()
    assert len(sent) == 3


def test_a_job_that_fails_is_not_told_to_be_over() -> None:
    sent: list[Progress] = []
    report = Report(sent.append)
    with suppress(ZeroDivisionError), report:
        report.begin(1, "answers", lambda: 1)
        raise ZeroDivisionError
    assert sent == []


def test_after_the_end_another_thread_sends_nothing() -> None:
    sent: list[Progress] = []
    with Report(sent.append, lambda: 0.0) as report:
        report.begin(2, "tokens", lambda: report.tokens)
    report.clock = lambda: 100.0
    late = threading.Thread(target=report.tell)
    late.start()
    late.join()
    assert len(sent) == 1
