"""The GPU script runs from end to end on a CPU with tiny shapes, and counts FLOPs as a table by hand does."""

import json
import sys
from pathlib import Path

import pytest
import torch

from tests.benchmarks.gpu_train import main, row_flops
from tests.benchmarks.states import Sizes


def test_the_script_checks_itself_on_a_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu_train", "--device", "cpu", "--small", "--out", str(tmp_path)])
    assert main() == 0
    content = json.loads((tmp_path / "gpu.json").read_text())
    assert [line["supervised"] for line in content["training"]] == [1.0, 0.5]
    assert all(line["tokens_per_s"] > 0 and line["peak_bytes"] > 0 for line in content["training"])
    assert all(
        line["ms"] > 0 and line["distance"] < 1e-6 and line["gradient_distance"] < 1e-5
        for line in content["attention"]
    )


def test_flops_of_a_short_row_by_hand() -> None:
    sizes = Sizes(
        "llama", hidden=2, inner=3, heads=2, groups=1, head_dim=5, vocab=11, draft_vocab=7, layers=8
    )
    # mask 0 1 1 1: slots 0 and 1 at step 0, slot 0 at step 1, none at step 2; states of positions 1 and 2 are targets.
    pairs, seen = 3, 1 + 2 + 1
    layer = pairs * (4 * 10 + 10 * 2 + 3 * 2 * 3)  # q, o, MLP
    key_values = (4 + 1) * 4 * 10  # every position at step 0, one slot later
    heads, target_head = pairs * 2 * 7, 2 * 2 * 7
    attention = seen * 2 * 10  # scores and values
    fc = 4 * 6 * 2
    expected = 2 * (3 * (layer + key_values + heads + attention) + 2 * fc + target_head)
    assert row_flops(torch.tensor([False, True, True, True]), sizes) == pytest.approx(expected)
