"""Small frames, the uninterrupted shard, a store in memory."""

from collections.abc import Iterator
from typing import Any

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from eagle3 import files
from eagle3.shards import chunks
from tests.helpers.writers import NUM_CHUNKS, files_of, finish, open_writer


@pytest.fixture(autouse=True)
def small_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunks, "FRAME_BYTES", 100)


@pytest.fixture
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    """Retries without pauses."""
    monkeypatch.setattr(files, "FIRST_PAUSE_S", 0.0)


@pytest.fixture
def memory_url() -> Iterator[str]:
    """A URL in fsspec's memory store."""
    MemoryFileSystem.store.clear()
    yield "memory://states/shard"
    MemoryFileSystem.store.clear()


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], dict[str, str]]:
    """Manifest and files of the shard that every interrupted one has to become."""
    out = tmp_path_factory.mktemp("uninterrupted")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunks, "FRAME_BYTES", 100)
        writer = open_writer(out)
        assert [len(frames) for frames in writer.plan] == [2] * NUM_CHUNKS
        return finish(writer), files_of(out)
