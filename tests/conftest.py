"""What all tests share: one thread for their tiny tensors, the order in which pytest-xdist deals them out, an S3 store."""

import os

os.environ["OMP_NUM_THREADS"] = "1"

import logging
from collections.abc import Iterator
from typing import Any

import fsspec
import pytest
import torch

torch.set_num_threads(1)

# The longest groups start first. Their tests share what is slow to make: one cluster, one engine.
GROUPS = ("remote", "engine", "slow")


@pytest.hookimpl(tryfirst=True)  # before xdist reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keep the tests of a file, and those of a shared cluster or engine, in one process of pytest-xdist."""

    def group_of(item: pytest.Item) -> str:
        return next(
            (name for name in GROUPS[:2] if item.get_closest_marker(name)), item.nodeid.partition("::")[0]
        )

    def rank(item: pytest.Item) -> int:
        return next((i for i, name in enumerate(GROUPS) if item.get_closest_marker(name)), len(GROUPS))

    files: dict[str, int] = {}
    for item in items:
        group = group_of(item)
        files[group] = min(files.get(group, len(GROUPS)), rank(item))
        item.add_marker(pytest.mark.xdist_group(group))
    items.sort(key=lambda item: files[group_of(item)])


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
