"""Bad states and failed checks name their row, block no caller and leave no chunk."""

import re
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from eagle3.shards.chunks import finished_manifest
from eagle3.shards.tokens import TokenRow
from eagle3.shards.writer import HiddenStateWriter
from tests.helpers.shard_files import states_of
from tests.helpers.writers import (
    CFG,
    HIDDEN,
    NUM_AUX,
    ROWS,
    finish,
    leave_unfinished,
    missing_rows,
    open_writer,
)


def finish_within(
    seconds: float, writer: HiddenStateWriter, states: Callable[[TokenRow], torch.Tensor]
) -> Exception:
    """The error of add or close, which must come in time."""
    stopped: list[Exception] = []

    def run() -> None:
        try:
            for row in missing_rows(writer):
                writer.add(row, states(writer.rows[row]))
            writer.close()
        except Exception as e:
            stopped.append(e)
        finally:
            writer.stop()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    assert not thread.is_alive(), "it hangs"
    return stopped[0]


@pytest.mark.parametrize("bad_row", [0, 3, 7])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), 0.0])
@pytest.mark.parametrize("encoding", ["bf16", "fp8"])
def test_a_bad_state_names_its_row_and_blocks_no_caller(
    tmp_path: Path, bad_row: int, value: float, encoding: str
) -> None:
    # More chunks than may wait: `add` must not wait forever for a chunk that never comes.
    rows = [TokenRow(f"row-{i}", row.source, row.token_ids, row.loss_mask) for i, row in enumerate(ROWS * 3)]
    cfg = CFG.model_copy(update={"encoding": encoding})

    def states(row: TokenRow) -> torch.Tensor:
        states = states_of(row, NUM_AUX, HIDDEN)
        if row is rows[bad_row]:
            states[3, 1] = value
        return states

    error = finish_within(20, open_writer(tmp_path, rows, cfg), states)
    assert isinstance(error, ValueError)
    assert (
        f"row row-{bad_row} has a zero or non-finite hidden state in {encoding}; if the row is sound, set"
        in str(error)
    )
    assert finished_manifest(tmp_path) is None
    writer = open_writer(tmp_path, rows, cfg)
    bad_chunk = writer.frame_of[bad_row][0]
    assert set(range(bad_chunk)) <= set(writer.entries)
    assert bad_chunk not in writer.entries
    assert finish(writer)["rows"] == len(rows)


def test_a_state_beyond_its_encoding_names_row_and_remedy(tmp_path: Path) -> None:
    error = finish_within(
        20,
        open_writer(tmp_path, cfg=CFG.model_copy(update={"encoding": "fp16"})),
        lambda row: torch.full((len(row.token_ids), NUM_AUX + 1, HIDDEN), 1e5),
    )
    assert (
        "has a zero or non-finite hidden state in fp16; if the row is sound, set extract.encoding to bf16 "
        "or fp32" in str(error)
    )


def test_a_last_state_that_no_loss_needs_is_not_checked(tmp_path: Path) -> None:
    def states(row: TokenRow) -> torch.Tensor:
        states = states_of(row, NUM_AUX, HIDDEN)
        states[0, -1] = float("nan")
        return states

    rows = [row for row in ROWS if not row.loss_mask[0]]
    writer = open_writer(tmp_path, rows)
    for number, row in enumerate(rows):
        writer.add(number, states(row))
    assert writer.close()["rows"] == len(rows)


def test_lost_states_name_the_row(tmp_path: Path) -> None:
    writer = open_writer(tmp_path)
    with pytest.raises(
        ValueError, match=re.escape("row id-0: states must be (7, 4, 5), got (6, 4, 5); the engine lost some")
    ):
        writer.add(0, states_of(ROWS[0], NUM_AUX, HIDDEN)[1:])
    writer.stop()


def test_every_chunk_is_checked_once_and_counts_are_summed_over_all_attempts(tmp_path: Path) -> None:
    def check(rows: list[int]) -> dict[str, int]:
        asked.append(rows)
        return {"rows_sound": len(rows), "sum": sum(rows)}

    asked: list[list[int]] = []
    leave_unfinished(tmp_path, check=check)
    assert asked == [[0, 1], [2, 3]]
    manifest = finish(open_writer(tmp_path, check=check))
    assert asked == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert manifest["checks"] == {"rows_sound": 8, "sum": sum(range(8))}
    assert [chunk["checks"]["sum"] for chunk in manifest["chunks"]] == [1, 5, 9, 13]


def test_a_check_that_fails_stops_the_shard_without_its_chunk(tmp_path: Path) -> None:
    def check(rows: list[int]) -> dict[str, int]:
        if 4 in rows:
            raise RuntimeError("the last hidden state reproduces nothing")
        return {}

    error = finish_within(20, open_writer(tmp_path, check=check), lambda row: states_of(row, NUM_AUX, HIDDEN))
    assert str(error) == "the last hidden state reproduces nothing"
    assert {0, 1} <= set(open_writer(tmp_path).entries) <= {0, 1, 3}
