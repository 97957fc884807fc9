"""Shards to stream."""

import pytest

from tests.helpers.streams import write_shards


@pytest.fixture(scope="session")
def shard_dirs(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return write_shards(tmp_path_factory.mktemp("states"))
