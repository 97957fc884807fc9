"""A tiny target, and a store and cache of the test's own."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from flytekit.core.local_cache import LocalTaskCache

sys.path.insert(0, str(Path(__file__).parent))

import flyte_runs


@pytest.fixture(scope="session")
def tiny_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return flyte_runs.write_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """An empty directory to work in: home, store and cache of this module's runs lie there."""
    path = tmp_path_factory.mktemp("work")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(path)
        patch.setenv("HOME", str(path / "home"))
        patch.setenv("EAGLE3_STORE", str(path / "store"))
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.setattr(LocalTaskCache, "_initialized", False)
        yield path


@pytest.fixture
def light(monkeypatch: pytest.MonkeyPatch) -> None:
    """Evaluation starts the engine three times, and training in a process of its own imports for ten seconds: where only the
    journal is asked for, training stays here and evaluation measures nothing."""
    from eagle3.evaluation import benchmark
    from eagle3.training import launch
    from eagle3.training.loop import train

    def evaluate(*inputs: Any, **how: Any) -> dict[str, Any]:
        figures: dict[str, Any] = dict.fromkeys(("acceptance_length", "trainer_acceptance_length"), 1.5)
        figures |= {"acceptance_by_position": [0.5, 0.0, 0.0], "outputs_identical": True}
        figures |= {"tokens_per_s": {"with_draft": 2.0, "without_draft": 1.0}}
        Path(inputs[-1]).write_text(json.dumps(figures))
        return figures

    monkeypatch.setattr(benchmark, "evaluate", evaluate)
    monkeypatch.setattr(launch, "train_in_processes", lambda job, report: train(job))
