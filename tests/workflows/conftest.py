"""A tiny target, and a store and cache of the test's own."""

import sys
from collections.abc import Iterator
from pathlib import Path

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
