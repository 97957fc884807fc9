"""Medians, ratios, goals and files of the benchmarks, on figures made by hand."""

import json
from pathlib import Path

import pytest
import torch

from tests.benchmarks.meter import StepMeter
from tests.benchmarks.pack_sizes import judge
from tests.benchmarks.results import missed_goals, summarise, training_table, write_json


def figures(speed: float, rss: float, trained: int = 10, threads: int = 2) -> dict[str, float]:
    return {"tokens_per_cpu_s": speed, "peak_rss": rss, "trained": trained, "threads": threads}


def rounds(*speeds: float, rss: float = 100.0) -> list[dict[str, float]]:
    return [figures(speed, rss) for speed in speeds]


def test_a_line_holds_medians_and_their_ratios() -> None:
    line = summarise(0.5, rounds(300, 900, 310, rss=60), rounds(100, 95, 10))
    assert line["tokens_per_cpu_s_ours"] == 310
    assert line["tokens_per_cpu_s_peer"] == 95
    assert line["ratio"] == pytest.approx(310 / 95)
    assert (line["rss_ours"], line["rss_peer"], line["rss_ratio"]) == (60, 100, pytest.approx(0.6))
    assert [r["tokens_per_cpu_s"] for r in line["rounds"]["ours"]] == [300, 900, 310]


@pytest.mark.parametrize("key", ["trained", "threads"])
def test_unequal_sides_are_refused(key: str) -> None:
    with pytest.raises(ValueError, match=f"same {key}"):
        summarise(1.0, [figures(1, 1)], [figures(1, 1) | {key: 3}])


def test_each_missed_goal_is_named() -> None:
    met = summarise(1.0, rounds(140, rss=90), rounds(100))
    slow = summarise(0.5, rounds(290, rss=60), rounds(100))
    large = summarise(0.2, rounds(700, rss=80), rounds(100))
    assert missed_goals([met]) == []
    assert missed_goals([met, slow, large]) == [
        "50% supervised: 2.90x the peer's tokens per CPU-second, the goal is 3.0x",
        "20% supervised: 0.80x the peer's peak memory, the goal is 0.7x",
    ]
    table = training_table([met, slow, large]).splitlines()
    assert len(table) == 4
    assert {len(line) for line in table} == {len(table[0])}


def test_the_file_reads_back(tmp_path: Path) -> None:
    lines = [summarise(1.0, rounds(140), rounds(100))]
    write_json(tmp_path / "new" / "training.json", lines)
    assert json.loads((tmp_path / "new" / "training.json").read_text()) == lines
    assert [f.name for f in (tmp_path / "new").iterdir()] == ["training.json"]


def sizes(rss: list[float], speeds: list[float]) -> list[dict[str, float]]:
    return [
        {"pack_tokens": 2048 << i, "peak_rss": r, "tokens_per_cpu_s": s}
        for i, (r, s) in enumerate(zip(rss, speeds, strict=True))
    ]


def test_linear_memory_and_even_cost_pass() -> None:
    verdict = judge(sizes([1e9 + 3e4 * (2048 << i) for i in range(5)], [100, 110, 120, 118, 115]))
    assert verdict["missed"] == []
    assert verdict["bytes_per_token"] == pytest.approx(3e4)
    assert verdict["memory_over_line"] == pytest.approx(1)


def test_quadratic_memory_and_rising_cost_are_named() -> None:
    verdict = judge(
        sizes([1e9 + 2e4 * t + 2 * t * t for t in (2048 << i for i in range(5))], [130, 125, 120, 110, 100])
    )
    assert [sentence.split()[0] for sentence in verdict["missed"]] == ["cost", "the"]


def test_the_meter_counts_trained_parameters_and_refuses_a_short_run() -> None:
    trained, idle = torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.ones(5))
    optimizer = torch.optim.AdamW([trained, idle])
    meter = StepMeter(warmup=1, steps=2)
    for step in range(3):
        if step == 2:
            with pytest.raises(ValueError, match="3 steps expected, the trainer made 2"):
                meter.figures(1024)
        trained.grad = torch.ones(3)
        optimizer.step()
    found = meter.figures(1024)
    assert found["trained"] == 3
    assert found["tokens_per_cpu_s"] > 0
    assert found["peak_rss"] > 1 << 20
