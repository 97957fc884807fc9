"""A full or read-only disk is named, and finished chunks are kept."""

import os
import re
import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from eagle3.shards import writer as hidden_state_writer
from eagle3.shards.chunks import finished_manifest
from tests.helpers.writers import BIG, NUM_CHUNKS, files_of, finish, open_writer

OTHER_USER = 65534


class FullDisk:
    """A limit on the size of files: writes end half-way with EFBIG, as with ENOSPC on a full disk."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.before = resource.getrlimit(resource.RLIMIT_FSIZE)

    @contextmanager
    def room_for_two_chunks(self) -> Iterator[None]:
        calls = iter(range(100))
        save_file = hidden_state_writer.save_file

        def save(*args: Any) -> None:
            if next(calls) == 2:
                self.fill(100_000)
            save_file(*args)

        with pytest.MonkeyPatch.context() as patch, self.room_afterwards():
            patch.setattr(hidden_state_writer, "save_file", save)
            yield

    def fill(self, num_bytes: int = 0) -> None:
        """Let no file grow beyond this size."""
        resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, self.before[1]))

    @contextmanager
    def room_afterwards(self) -> Iterator[None]:
        """Within the test: pytest's own output may be a file, too."""
        # The signal that comes with EFBIG would end the process.
        handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, self.before)
            signal.signal(signal.SIGXFSZ, handler)


@pytest.fixture
def disk(tmp_path: Path) -> FullDisk:
    return FullDisk(tmp_path)


@pytest.fixture(scope="module")
def big(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], dict[str, str]]:
    """Manifest and files of the big shard on a disk with room."""
    out = tmp_path_factory.mktemp("big")
    return finish(open_writer(out, **BIG)), files_of(out)


def test_a_full_disk_is_named_and_finished_chunks_are_kept(
    disk: FullDisk, big: tuple[dict[str, Any], dict[str, str]]
) -> None:
    out = disk.path / "shard"
    remedy = "the 2 that are finished are kept: mend that (on a full disk, make room) and run again"
    message = rf"shard: chunk 2 of 4 could not be written \(.*File too large.*\); {re.escape(remedy)}"
    with disk.room_for_two_chunks():
        with pytest.raises(OSError, match=message):
            finish(open_writer(out, **BIG))
        names = sorted(path.name for path in out.iterdir())
    assert names == sorted(
        ["chunk-00000.json", "chunk-00001.json", *(c["file"] for c in big[0]["chunks"][:2])]
    )
    writer = open_writer(out, **BIG)
    assert sorted(writer.entries) == [0, 1]
    assert (finish(writer), files_of(out)) == big


@pytest.mark.parametrize(
    ("file", "message"),
    [
        (
            "chunk-00001.json",
            r"chunk 1 of 4 could not be written \(.*chunk-00001\.json could not be .*File too large.*; the 1 that",
        ),
        (
            "manifest.json",
            r"shard/manifest\.json could not be written \(.*File too large.*\); check the free disk space and",
        ),
    ],
)
def test_a_disk_that_has_no_room_for_an_entry_or_the_manifest_is_named(
    disk: FullDisk, big: tuple[dict[str, Any], dict[str, str]], file: str, message: str
) -> None:
    write_bytes = hidden_state_writer.write_bytes

    def write_on_full_disk(path: str, data: bytes) -> None:
        if path.endswith(file):
            disk.fill()
        write_bytes(path, data)

    out = disk.path / "shard"
    with pytest.MonkeyPatch.context() as patch, disk.room_afterwards():
        patch.setattr(hidden_state_writer, "write_bytes", write_on_full_disk)
        with pytest.raises(OSError, match=message):
            finish(open_writer(out, **BIG))
        assert finished_manifest(out) is None
        assert not list(out.glob("*.part"))
    writer = open_writer(out, **BIG)
    assert sorted(writer.entries) == list(range(1 if file.startswith("chunk") else NUM_CHUNKS))
    assert (finish(writer), files_of(out)) == big


def become_other_user() -> None:
    try:
        os.seteuid(OTHER_USER)
    except OSError as e:  # a container without CAP_SETUID, or one that has no other users
        pytest.skip(f"root may write anywhere and cannot become another user here ({e})")


@contextmanager
def without_permission(directory: Path) -> Iterator[None]:
    """Make it and its directories read-only, and root, who may write anyway, another user."""
    user = os.geteuid()
    directories = [directory, *(path for path in directory.rglob("*") if path.is_dir())]
    for path in directories:
        path.chmod(0o555)
    try:
        if user == 0:
            become_other_user()
        yield
    finally:
        os.seteuid(user)
        for path in directories:
            if path.exists():
                path.chmod(0o755)


def test_a_read_only_directory_is_named_before_anything_is_computed(tmp_path: Path) -> None:
    with without_permission(tmp_path), pytest.raises(OSError, match=f"Permission denied: '{tmp_path}/shard"):
        open_writer(tmp_path / "shard")


def test_a_directory_that_becomes_read_only_is_named(tmp_path: Path) -> None:
    writer = open_writer(tmp_path / "shard")
    message = r"shard: chunk 0 of 4 could not be written \(.*Permission denied.*; the 0 that are"
    with without_permission(tmp_path), pytest.raises(OSError, match=message):
        finish(writer)
