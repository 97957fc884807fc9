"""What all tests share: one thread for their tiny tensors, the order in which pytest-xdist deals them out, an S3 store."""

import os

os.environ["OMP_NUM_THREADS"] = "1"

import logging
from collections.abc import Iterator
from typing import Any

import fsspec
import pytest
import torch
from xdist.scheduler import LoadScopeScheduling

torch.set_num_threads(1)

# The files of a group share what is slow to make, one cluster or one engine; these two take longest.
GROUPS = {"tests/workflows/test_remote_": "remote", "tests/engine/": "engine"}


def group_of(test: str) -> str:
    """The group whose tests run in one process of pytest-xdist: the file, or what several files share."""
    file = test.partition("::")[0]
    return next((group for start, group in GROUPS.items() if file.startswith(start)), file)


class GroupScheduling(LoadScopeScheduling):  # type: ignore[misc]
    """Deals out groups, in the order of collection."""

    def _split_scope(self, nodeid: str) -> str:
        return group_of(nodeid)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> GroupScheduling:
    return GroupScheduling(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest groups come first, then files with slow tests."""
    order = list(GROUPS.values())
    slow = {group_of(item.nodeid) for item in items if item.get_closest_marker("slow")}

    def rank(item: pytest.Item) -> int:
        group = group_of(item.nodeid)
        return order.index(group) if group in order else len(order) + (group not in slow)

    items.sort(key=rank)


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
