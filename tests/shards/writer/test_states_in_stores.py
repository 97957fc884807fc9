"""Shards at a URL: failing stores, lost bytes, two machines, and use of the local disk."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem

from eagle3 import files
from eagle3.shards import chunks
from eagle3.shards.chunks import finished_manifest
from eagle3.shards.hidden_states import read_hidden_states
from tests.helpers.shard_files import states_of
from tests.helpers.writers import BIG, HIDDEN, NUM_AUX, ROWS, files_of, finish, leave_unfinished, open_writer


@pytest.mark.parametrize("closes_first", [0, 1])
def test_two_machines_that_write_to_one_url_leave_a_sound_shard(
    memory_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, closes_first: int
) -> None:
    writers = []
    for machine in ("a", "b"):
        monkeypatch.setattr(chunks, "gettempdir", lambda machine=machine: str(tmp_path / machine))
        writers.append(open_writer(memory_url))
    written: dict[int, list[torch.Tensor]] = {row: [] for row in range(len(ROWS))}
    for row in range(len(ROWS)):
        for number, writer in enumerate(writers):  # each with other last bits
            states = states_of(ROWS[row], NUM_AUX, HIDDEN, torch.bfloat16) * (1 + number * 2**-6)
            written[row].append(states)
            writer.add(row, states)
    first, last = writers[closes_first], writers[1 - closes_first]
    first.close()
    manifest = last.close()
    assert finished_manifest(memory_url) == manifest
    fsspec.filesystem("memory").get(f"{memory_url}/", str(tmp_path / "copy"), recursive=True)
    for row, back in enumerate(read_hidden_states(tmp_path / "copy")):
        assert any(torch.equal(back.aux, states[:, :-1]) for states in written[row])


def test_a_shard_is_finished_if_all_its_files_are(tmp_path: Path, memory_url: str) -> None:
    for out in (str(tmp_path / "shard"), memory_url):
        assert finished_manifest(out) is None
        leave_unfinished(out)
        assert finished_manifest(out) is None
        manifest = finish(open_writer(out))
        assert finished_manifest(out) == finished_manifest(f"{out}/") == manifest
        store, root = fsspec.core.url_to_fs(out)
        chunk = f"{root}/{manifest['chunks'][-1]['file']}"
        data = store.cat_file(chunk)
        store.pipe_file(chunk, data[:-1])
        assert finished_manifest(out) is None
        store.rm_file(chunk)
        assert finished_manifest(out) is None
        store.pipe_file(chunk, data)
        assert finished_manifest(out) == manifest
        store.pipe_file(f"{root}/manifest.json", json.dumps({**manifest, "format_version": 2}).encode())
        assert finished_manifest(out) is None


class FailingStore:
    """fsspec's memory store; `failures`: how often each of its methods fails from now on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.failures: dict[str, int] = {}
        for method in ("put_file", "pipe_file", "cat_file", "info", "rm_file"):
            monkeypatch.setattr(
                MemoryFileSystem, method, self.failing(method, getattr(MemoryFileSystem, method))
            )

    def failing(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def called(*args: Any, **more: Any) -> Any:
            if self.failures.get(name, 0) > 0:
                self.failures[name] -= 1
                raise RuntimeError("no connection")  # like botocore's, no OSError
            return method(*args, **more)

        return called


def test_a_store_that_fails_sometimes_changes_nothing(
    memory_url: str,
    monkeypatch: pytest.MonkeyPatch,
    no_pause: None,
    uninterrupted: tuple[dict[str, Any], dict[str, str]],
) -> None:
    leave_unfinished(memory_url)
    store = FailingStore(monkeypatch)
    store.failures = dict.fromkeys(("put_file", "pipe_file", "cat_file", "info", "rm_file"), files.TRIES - 1)
    assert finish(open_writer(memory_url)) == uninterrupted[0]
    assert not any(store.failures.values())
    assert files_of(memory_url) == uninterrupted[1]


@pytest.mark.parametrize(
    ("method", "name"), [("put_file", r"chunk-00002-\w{8}\.safetensors"), ("pipe_file", r"chunk-00002\.json")]
)
def test_a_store_that_keeps_failing_is_named_and_may_be_tried_again(
    memory_url: str,
    monkeypatch: pytest.MonkeyPatch,
    no_pause: None,
    uninterrupted: tuple[dict[str, Any], dict[str, str]],
    method: str,
    name: str,
) -> None:
    leave_unfinished(memory_url)
    store = FailingStore(monkeypatch)
    writer = open_writer(memory_url)
    store.failures = {method: 1000}
    cause = f"{memory_url}/{name} could not be reached in 5 tries .*"
    message = rf"chunk 2 of 4 could not be written \({cause}; the 2 that are finished"
    with pytest.raises(OSError, match=message):
        finish(writer)
    store.failures = {}
    writer = open_writer(memory_url)
    assert sorted(writer.entries) == [0, 1]
    assert (finish(writer), files_of(memory_url)) == uninterrupted


def test_a_store_that_cannot_be_read_at_the_start_is_named_and_the_lock_is_released(
    memory_url: str, monkeypatch: pytest.MonkeyPatch, no_pause: None
) -> None:
    store = FailingStore(monkeypatch)
    store.failures = {"cat_file": 1000}
    with pytest.raises(
        OSError, match=f"{memory_url}/chunk-00000.json could not be reached in 5 tries"
    ) as kept:
        open_writer(memory_url)
    store.failures = {}
    assert finish(open_writer(memory_url))["rows"] == len(ROWS)
    del kept


def test_an_upload_that_lost_bytes_is_named(memory_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        MemoryFileSystem, "put_file", lambda self, path, to: self.pipe_file(to, Path(path).read_bytes()[:-1])
    )
    with pytest.raises(
        OSError,
        match=r"chunk 0 of 4 could not be written .* must have \d+ bytes after its upload, the store has",
    ):
        finish(open_writer(memory_url))


def test_at_most_one_chunk_is_on_the_local_disk_before_its_upload(
    memory_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunks, "gettempdir", lambda: str(tmp_path))
    sizes, put_file = [], MemoryFileSystem.put_file

    def slow(self: Any, path: str, to: str) -> None:
        for _ in range(5):
            sizes.append(sum(p.stat().st_size for p in tmp_path.rglob("*") if p.is_file()))
            time.sleep(0.01)
        put_file(self, path, to)

    monkeypatch.setattr(MemoryFileSystem, "put_file", slow)
    manifest = finish(open_writer(memory_url, **BIG))
    assert max(sizes) == max(chunk["bytes"] for chunk in manifest["chunks"])
    assert list(tmp_path.iterdir()) == []
