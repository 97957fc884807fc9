"""Shards to stream, and an S3 store: moto's, inside this process."""

import logging
from collections.abc import Iterator
from typing import Any

import fsspec
import pytest

from tests.training.streams import write_shards


@pytest.fixture(scope="session")
def shard_dirs(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return write_shards(tmp_path_factory.mktemp("states"))


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """An empty bucket named states, and the file system to fill it with."""
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "testing")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    fsspec.get_filesystem_class("s3").clear_instance_cache()
    store = fsspec.filesystem("s3")
    store.mkdir("states")
    yield store
    # Every server in this process shows the same buckets.
    store.rm("states", recursive=True)
    fsspec.get_filesystem_class("s3").clear_instance_cache()
    server.stop()
