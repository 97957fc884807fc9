"""What make bench-capture says of its measurements, on figures made by hand, and the states that it writes again."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from eagle3.config.engine import ExtractConfig
from eagle3.shards.hidden_states import last_state_positions, read_hidden_states
from eagle3.shards.tokens import TokenRow, write_token_shard
from tests.benchmarks import capture, storage
from tests.benchmarks.capture import PLAIN, TRANSFORMERS, speed_table, summarise
from tests.benchmarks.meter import tree_cpu_s
from tests.benchmarks.storage import encode_again, storage_tables, summarise_bytes
from tests.helpers.shard_files import write_hidden_states


def speeds(*tokens_per_s: float) -> list[dict[str, float]]:
    return [{"tokens_per_s": speed, "tokens_per_cpu_s": speed / 2} for speed in tokens_per_s]


def measured(slow: float = 1.0) -> dict[str, Any]:
    """Three rounds, the second and the middle of the third slow; the second capture `slow` times as fast as the first."""
    return summarise(
        {
            PLAIN: speeds(100, 10, 102),
            "capture bf16 zstd": speeds(95, 9.9, 50),
            "capture fp32": speeds(95 * slow, 9.9 * slow, 50 * slow),
            TRANSFORMERS: speeds(70, 7, 72),
        }
    )


def test_captures_are_compared_within_their_round() -> None:
    summary = measured()
    assert summary["sides"][PLAIN] == {"tokens_per_s": 100, "tokens_per_cpu_s": 50}
    ratios = summary["ratios"]["capture bf16 zstd"]
    assert ratios[PLAIN]["tokens_per_s"] == pytest.approx(0.95)
    assert ratios[TRANSFORMERS]["tokens_per_cpu_s"] == pytest.approx(95 / 70)
    assert capture.missed_goals(summary) == []


def test_each_slow_capture_is_named_with_what_it_is_slow_against() -> None:
    summary = measured(slow=0.85)
    assert capture.missed_goals(summary) == [
        "capture fp32: 0.81x the tokens per second of plain prefill, the goal is 0.93x",
        "capture fp32: 1.15x the tokens per second of transformers, the goal is 1.2x",
    ]
    lines = speed_table(summary).splitlines()
    assert len(lines) == 5
    assert {len(line) for line in lines} == {len(lines[0])}


def test_bytes_count_whole_shards_against_four_plain_states() -> None:
    shards = [{"bytes": 3000, "tokens": 10}, {"bytes": 1200, "tokens": 11}]
    sizes = summarise_bytes({("bf16", "zstd"): shards, ("fp8", "zstd"): shards}, num_states=4, hidden_size=25)
    assert [line["bytes_per_token"] for line in sizes] == [200, 200, 200]
    assert [line["share"] for line in sizes] == [1, 1, 1]
    assert storage.missed_goals(sizes, []) == [
        "bf16 with zstd: 1.000x raw bytes, the goal is 0.7x",
        "fp8 with zstd: 1.000x raw bytes, the goal is 0.42x",
    ]
    assert storage.missed_goals([line | {"share": 0.42} for line in sizes], []) == []


def draft(encoding: str, seed: int, length: float) -> dict[str, Any]:
    return {"encoding": encoding, "seed": seed, "acceptance_length": length, "rounds": 10, "accepted": 4}


def test_a_draft_is_held_against_the_exact_one_and_another_seed_only_shows_what_chance_does() -> None:
    drafts = [draft("fp32", 0, 1.40), draft("fp32", 1, 1.50), draft("bf16", 0, 1.371), draft("fp8", 0, 1.44)]
    assert storage.missed_goals([], drafts) == [
        "trained from fp8: acceptance length +0.040, the goal is 0.03 at most"
    ]
    assert "+0.100" in storage_tables([], drafts).splitlines()[-3]


@pytest.mark.parametrize(("encoding", "tolerance"), [("fp32", 0.0), ("fp8", 2**-4)])
def test_states_written_again_are_the_captured_ones(tmp_path: Path, encoding: str, tolerance: float) -> None:
    masks = [[False, True, True, True, False, True], [False, False, True], [True, True]]
    rows = [TokenRow(f"row-{i}", "made", list(range(len(mask))), mask) for i, mask in enumerate(masks)]
    generator = torch.Generator().manual_seed(0)
    states = [torch.randn(len(mask), 3, 8, generator=generator) for mask in masks]
    write_token_shard(tmp_path / "rows.parquet", rows)
    write_hidden_states(tmp_path / "exact", rows, states, 1 << 20, {})
    cfg = ExtractConfig(encoding=encoding, compression="zstd")
    manifest = encode_again(tmp_path / "exact", tmp_path / "rows.parquet", cfg, tmp_path / "again")
    assert (manifest["encoding"], manifest["tokens"]) == (encoding, 11)
    for row, of_row, mask in zip(read_hidden_states(tmp_path / "again"), states, masks, strict=True):
        positions = last_state_positions(torch.tensor(mask))
        torch.testing.assert_close(row.aux.float(), of_row[:, :-1], rtol=tolerance, atol=tolerance / 50)
        torch.testing.assert_close(
            row.last.float(), of_row[positions, -1], rtol=tolerance, atol=tolerance / 50
        )


@pytest.mark.skipif(sys.platform != "linux", reason="looks at processes in /proc")
def test_cpu_seconds_of_a_worker_include_the_engine_that_it_forked() -> None:
    code = """if True:
        import os, time
        if os.fork() == 0:
            while time.process_time() < 0.3:
                pass
            print(flush=True)
            time.sleep(60)
        os.wait()"""
    worker = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    try:
        assert worker.stdout is not None
        worker.stdout.readline()
        assert 0.25 <= tree_cpu_s(worker.pid) < 1
        assert tree_cpu_s(os.getpid()) >= tree_cpu_s(worker.pid)
    finally:
        for child in Path(f"/proc/{worker.pid}/task/{worker.pid}/children").read_text().split():
            os.kill(int(child), 9)
        worker.wait()
        worker.stdout.close()
