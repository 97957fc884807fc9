"""A tiny target, a store and cache of the test's own, and a stand-in cluster on which the chain has run
once."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from flytekit.core.local_cache import LocalTaskCache

from tests.helpers import flyte_runs

if TYPE_CHECKING:
    from tests.flyte_stand_in.control_plane import ControlPlane
    from tests.flyte_stand_in.remote_runs import Cluster, Run


@pytest.fixture(scope="session")
def tiny_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return flyte_runs.write_target(tmp_path_factory.mktemp("target"))


@contextmanager
def working_in(path: Path) -> Iterator[Path]:
    """Let the directory be where runs work, and where their home, store and cache lie."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(path)
        patch.setenv("HOME", str(path / "home"))
        patch.setenv("EAGLE3_STORE", str(path / "store"))
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.setattr(LocalTaskCache, "_initialized", False)
        yield path


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """An empty directory, in which this module's runs work."""
    with working_in(tmp_path_factory.mktemp("work")) as path:
        yield path


@pytest.fixture(scope="session")
def plane() -> Iterator["ControlPlane"]:
    """One stand-in cluster for all modules, which share its cache; what is slow there is done once."""
    from tests.flyte_stand_in.control_plane import control_plane

    with control_plane() as plane:
        yield plane


@contextmanager
def talking_to(plane: "ControlPlane") -> Iterator[None]:
    """Let `pyflyte` find the stand-in cluster."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in plane.environment.items():
            patch.setenv(name, value)
        patch.setenv("DOCKER_HOST", "tcp://127.0.0.1:9")  # no image is looked for or built
        yield


@pytest.fixture(scope="session")
def first(plane: "ControlPlane", tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> "Run":
    """The whole chain on an empty cluster."""
    from tests.flyte_stand_in.remote_runs import Cluster, succeeded

    with working_in(tmp_path_factory.mktemp("first")) as path, talking_to(plane):
        return succeeded(Cluster(plane, path, tiny_target).run())


@pytest.fixture(scope="module")
def cluster(plane: "ControlPlane", workplace: Path, tiny_target: Path) -> Iterator["Cluster"]:
    """The stand-in cluster from this module's workplace."""
    from tests.flyte_stand_in.remote_runs import Cluster

    with talking_to(plane):
        yield Cluster(plane, workplace, tiny_target)


@pytest.fixture
def light(monkeypatch: pytest.MonkeyPatch) -> None:
    """Evaluation starts the engine three times, and training in a process of its own imports for ten seconds:
    where only the journal is asked for, training stays here and evaluation measures nothing."""
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
