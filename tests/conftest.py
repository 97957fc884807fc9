"""Tests run tiny tensors: one thread is faster than two, here and in processes of theirs, and leaves the other core alone."""

import os

os.environ["OMP_NUM_THREADS"] = "1"

import logging
from collections.abc import Iterator
from typing import Any

import fsspec
import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """An empty bucket named states in moto's S3, inside this process, and the file system to fill it with."""
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
