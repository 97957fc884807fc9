"""`add` waits for slow encoding and slow stores, and raises their errors."""

import threading
import time
from pathlib import Path
from typing import Any

import pytest

from eagle3.shards import writer as hidden_state_writer
from eagle3.shards.writer import CHUNKS_IN_MEMORY, HiddenStateWriter
from tests.helpers.shard_files import states_of, token_rows
from tests.helpers.writers import CFG, HIDDEN, NUM_AUX, open_writer


class Gate:
    """Makes callers of a function wait until it is opened; `passed` counts the calls after that."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> None:
        self.opened = threading.Event()
        self.passed = 0
        original = getattr(owner, name)

        def held(*args: Any) -> Any:
            assert self.opened.wait(30)
            self.passed += 1
            return original(*args)

        monkeypatch.setattr(owner, name, held)


class Adder(threading.Thread):
    """Adds all rows, counted by `num_added`, until one is refused for `failure`."""

    def __init__(self, writer: HiddenStateWriter) -> None:
        super().__init__(daemon=True)
        self.writer, self.num_added = writer, 0
        self.failure: Exception | None = None
        self.start()

    def run(self) -> None:
        try:
            for row in range(len(self.writer.rows)):
                self.writer.add(row, states_of(self.writer.rows[row], NUM_AUX, HIDDEN))
                self.num_added += 1
        except Exception as e:
            self.failure = e

    def wait_until_blocked(self) -> int:
        """How many rows were added before one had to wait."""
        before = -1
        while before != self.num_added:
            before = self.num_added
            time.sleep(0.3)
        return before


def test_a_slow_store_makes_add_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = token_rows(["0111011", "11111"] * 10)
    gate = Gate(monkeypatch, hidden_state_writer, "move_file")
    writer = open_writer(tmp_path, rows)
    assert [len(frames) for frames in writer.plan] == [2] * 10
    adder = Adder(writer)
    # The row that would complete the third chunk waits.
    assert adder.wait_until_blocked() == 2 * (CHUNKS_IN_MEMORY + 1) - 1
    gate.opened.set()
    adder.join(30)
    assert not adder.is_alive()
    assert len(writer.close()["chunks"]) == gate.passed == 10


def test_an_add_that_waits_raises_the_error_of_the_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any) -> None:
        raise OSError("gone")

    monkeypatch.setattr(hidden_state_writer, "move_file", fail)
    gate = Gate(monkeypatch, hidden_state_writer, "move_file")
    adder = Adder(open_writer(tmp_path, token_rows(["0111011", "11111"] * 10)))
    adder.wait_until_blocked()
    gate.opened.set()
    adder.join(30)
    assert "chunk 0 of 10 could not be written (gone); the 0 that are finished are kept" in str(adder.failure)
    adder.writer.stop()


def test_slow_encoding_makes_add_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hidden_state_writer, "ENCODE_THREADS", 2)
    gate = Gate(monkeypatch, hidden_state_writer, "encode")
    writer = open_writer(
        tmp_path, token_rows(["0111011", "11111"] * 10), CFG.model_copy(update={"chunk_bytes": 1 << 20})
    )
    adder = Adder(writer)
    assert adder.wait_until_blocked() == 2 * 2
    gate.opened.set()
    adder.join(30)
    assert not adder.is_alive()
    assert writer.close()["rows"] == 20
