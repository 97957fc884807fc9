"""What is damaged, missing or late in a store is named, tried again, or given up in time."""

import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import pytest

from eagle3 import files
from eagle3.files import Stopped
from eagle3.training.fetch import Chunk, fetch
from eagle3.training.loader import ShardRows, read_packs
from tests.helpers.jobs import upload
from tests.helpers.streams import (
    PACK_TOKENS,
    STEPS,
    assert_same,
    chunks_of,
    file_urls,
    plan,
    read,
    threads_of_the_loader,
)


def damage(dirs: list[str], change: Callable[[bytes], bytes | None], root: Path) -> tuple[list[str], Path]:
    """Copies of the shards and the path of the second one's chunk 3, which is changed, or gone where `change`
    gives None.
    """
    copies = [str(shutil.copytree(d, root / Path(d).name)) for d in dirs]
    path = next(Path(copies[1]).glob("chunk-00003-*.safetensors"))
    data = change(path.read_bytes())
    path.unlink() if data is None else path.write_bytes(data)
    return copies, path


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (
            lambda data: data[:200] + bytes([data[200] ^ 1]) + data[201:],
            "sha256 [0-9a-f]{64} expected, [0-9a-f]{64} found",
        ),
        (lambda data: data[:-1], "[0-9]+ bytes expected, [0-9]+ bytes found"),
        (lambda data: data + b"x", "[0-9]+ bytes expected, [0-9]+ bytes found"),
        (lambda data: None, "[0-9]+ bytes expected, no file found"),
    ],
)
@pytest.mark.parametrize("is_remote", [True, False])
def test_a_damaged_chunk_is_named_when_its_pack_is_due(
    shard_dirs: list[str],
    tmp_path: Path,
    change: Callable[[bytes], bytes | None],
    found: str,
    is_remote: bool,
) -> None:
    dirs, path = damage(shard_dirs, change, tmp_path)
    name = f"file://{path}" if is_remote else str(path)
    message = f"^{name}: {found}; the shard {name.rpartition('/')[0]} is damaged: delete it and run again$"
    local = ShardRows(shard_dirs)
    packs, batches = plan(local), []

    def read_all() -> None:
        rows = ShardRows(file_urls(dirs) if is_remote else dirs, tmp_path / "cache", 10**9)
        for batch in read_packs(rows, packs, PACK_TOKENS, STEPS):
            batches.append(batch)

    with pytest.raises(ValueError, match=message):
        read_all()
    if is_remote:
        number = [chunk.path for chunk in local.files.chunks].index(f"{shard_dirs[1]}/{path.name}")
        assert len(batches) == next(
            position for position, pack in enumerate(packs) if number in chunks_of(local, [pack])
        )
        assert not list((tmp_path / "cache").glob("*.part"))
    assert not threads_of_the_loader()


def test_a_truncated_chunk_in_s3_is_named(shard_dirs: list[str], s3: Any, tmp_path: Path) -> None:
    urls = upload(s3, shard_dirs)
    name = "states/shard1/" + next(Path(shard_dirs[1]).glob("chunk-00003-*")).name
    s3.pipe(name, s3.cat(name)[:-100])
    rows = ShardRows(urls, tmp_path, 10**9)
    with pytest.raises(
        ValueError,
        match=f"^s3://{name}: .* bytes expected, .* bytes found; the shard s3://states/shard1 is damaged",
    ):
        read(rows, plan(rows))
    s3.rm(name)
    with pytest.raises(
        ValueError,
        match=f"^s3://{name}: .* bytes expected, no file found; the shard s3://states/shard1 is damaged",
    ):
        read(rows, plan(rows))


def test_an_unfinished_shard_in_s3_is_named(shard_dirs: list[str], s3: Any, tmp_path: Path) -> None:
    urls = upload(s3, shard_dirs)
    s3.rm("states/shard1/manifest.json")
    with pytest.raises(
        ValueError, match="^s3://states/shard1/manifest.json is missing: the shard was not finished"
    ):
        ShardRows(urls, tmp_path, 10**9)


class Faults:
    """Lets the first calls for one file fail."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, name: str, count: int) -> None:
        from fsspec.implementations.local import LocalFileSystem

        self.left, get_file = count, LocalFileSystem.get_file
        monkeypatch.setattr(files, "FIRST_PAUSE_S", 0.01)

        def failing(fs: Any, source: str, *args: Any, **kwargs: Any) -> Any:
            if name in source and self.left:
                self.left -= 1
                raise ConnectionResetError("the store hung up")
            return get_file(fs, source, *args, **kwargs)

        monkeypatch.setattr(LocalFileSystem, "get_file", failing)


def test_a_chunk_arrives_though_the_store_fails_twice(
    shard_dirs: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    local, faults = ShardRows(shard_dirs), Faults(monkeypatch, "shard0/chunk-00002", 2)
    rows, packs = ShardRows(file_urls(shard_dirs), tmp_path, 10**9), plan(local)
    assert_same(read(rows, packs), read(local, packs))
    assert faults.left == 0


def test_a_store_that_keeps_failing_is_named_and_may_be_tried_again(
    shard_dirs: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    local, faults = ShardRows(shard_dirs), Faults(monkeypatch, "shard0/chunk-00002", 5)
    rows, packs = ShardRows(file_urls(shard_dirs), tmp_path, 10**9), plan(local)
    with pytest.raises(
        OSError, match="^file://.*shard0/chunk-00002-.* could not be reached in 5 tries .*the store hung up"
    ):
        read(rows, packs)
    assert faults.left == 0
    assert_same(read(rows, packs), read(local, packs))


def test_a_pause_before_the_next_try_does_not_delay_the_end(
    shard_dirs: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = ShardRows(file_urls(shard_dirs), tmp_path, 10**9)
    packs = plan(rows)
    second = [pack for pack in packs if pack.group == packs[0].group + 1]
    late = chunks_of(rows, second) - chunks_of(rows, packs[:3])
    faults = Faults(monkeypatch, rows.files.chunks[min(late)].path.removeprefix("file://"), 10**6)
    monkeypatch.setattr(files, "FIRST_PAUSE_S", 600)
    batches = read_packs(rows, packs, PACK_TOKENS, STEPS)
    next(batches)
    while faults.left == 10**6:
        time.sleep(0.01)
    started = time.monotonic()
    batches.close()
    assert time.monotonic() - started < 10
    assert not threads_of_the_loader()


def test_a_fetch_ends_between_two_blocks_when_no_one_waits(tmp_path: Path) -> None:
    fsspec.filesystem("memory").pipe("/shard/chunk-00000.safetensors", bytes(100))
    chunk, stopped = Chunk("memory://shard/chunk-00000.safetensors", {"bytes": 100}), threading.Event()
    fetch(chunk, tmp_path / "whole", stopped)
    assert (tmp_path / "whole").read_bytes() == bytes(100)
    stopped.set()
    with pytest.raises(Stopped):
        fetch(chunk, tmp_path / "part", stopped)
