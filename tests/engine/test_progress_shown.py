"""What a terminal and a log show of a job on its way."""

import logging
import os
import pty
import select
import subprocess
import sys
import termios

import pytest

from eagle3.engine.progress import Progress, Watch, duration_text, progress_text


def look(seconds: float, done: int = 0, total: int = 1000, unit: str = "tokens", kept: int = 0) -> Progress:
    return Progress(done, total, unit, kept, done - kept, done - kept if unit == "answers" else 3, seconds)


def test_time_left_counts_what_this_attempt_did() -> None:
    assert look(10, 0).seconds_left is None
    assert look(10, 600, kept=600).seconds_left is None
    assert look(10, 250).seconds_left == 30
    assert look(10, 750, kept=500).seconds_left == 10
    assert look(10, 1000).seconds_left == 0
    assert [duration_text(s) for s in (0.4, 89, 90, 5399, 5400)] == [
        "0 s",
        "89 s",
        "2 min",
        "90 min",
        "1.5 h",
    ]


def test_a_line_names_done_total_rate_and_time_left() -> None:
    assert progress_text(look(10, 250)) == "250 of 1,000 tokens, 3 conversations, 25 tokens/s, 30 s left"
    assert (
        progress_text(look(20, 300), look(10, 250))
        == "300 of 1,000 tokens, 3 conversations, 5 tokens/s, 47 s left"
    )
    assert progress_text(look(5, 0, unit="answers")) == "0 of 1,000 answers, 0 tokens/s"


def test_without_a_terminal_a_line_is_logged_every_half_minute(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "eagle3")
    with Watch("extract shard 3") as watch:
        for seconds in range(95):
            watch(look(seconds, 10 * seconds))
    assert caplog.messages == [
        "extract shard 3: 300 of 1,000 tokens, 3 conversations, 10 tokens/s, 70 s left",
        "extract shard 3: 600 of 1,000 tokens, 3 conversations, 10 tokens/s, 40 s left",
        "extract shard 3: 900 of 1,000 tokens, 3 conversations, 10 tokens/s, 10 s left",
    ]


SHOW = """
import logging
from eagle3.engine.progress import Progress, Watch
logging.basicConfig(level=logging.INFO)
with Watch("extract shard 3") as watch:
    for seconds in range({seconds}):
        watch(Progress(10 * seconds, 1000, {unit!r}, 0, 20 * seconds, 3, seconds))
"""


def shown_on_a_terminal(seconds: int, unit: str) -> str:
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, 120))
    try:
        command = [sys.executable, "-c", SHOW.format(seconds=seconds, unit=unit)]
        subprocess.run(command, stderr=theirs, check=True, timeout=60)
        os.set_blocking(ours, False)
        return os.read(ours, 1 << 20).decode() if select.select([ours], [], [], 0)[0] else ""
    finally:
        os.close(ours)
        os.close(theirs)


def test_a_terminal_shows_one_bar_with_the_shards_number_and_no_log_lines() -> None:
    text = shown_on_a_terminal(61, "user turns")
    assert "extract shard 3:" in text
    assert "600/1000" in text
    assert "20 tokens/s" in text
    assert "user turns" in text
    assert "INFO" not in text
    assert text.count("\n") == 1  # redrawn in its place


def test_a_short_job_draws_no_bar() -> None:
    assert shown_on_a_terminal(2, "tokens") == ""
