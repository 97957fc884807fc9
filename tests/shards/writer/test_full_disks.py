"""A disk that is full or read-only is named, and what was finished before is kept.

Each fault is made twice: on a disk that is mounted for the test, where that is allowed, and for this process alone by a limit on
the size of files and by permissions, which needs no rights.
"""

import os
import re
import resource
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest

from eagle3.shards import writer as hidden_state_writer
from eagle3.shards.chunks import finished_manifest
from tests.helpers.writers import BIG, NUM_CHUNKS, files_of, finish, open_writer

NOBODY = 65534


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 2 MiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(disk)], capture_output=True, check=False
    )
    if mounted.returncode != 0:
        pytest.skip("a small disk needs the right to mount one")
    yield disk
    while disk.is_mount():
        subprocess.run(["umount", "--lazy", str(disk)], check=True)


class MountedDisk:
    """A disk of 2 MiB that a ballast fills."""

    error = "No space left"

    def __init__(self, path: Path) -> None:
        self.path, self.ballast = path, path / "ballast"

    @contextmanager
    def room_for_two_chunks(self) -> Iterator[None]:
        self.ballast.write_bytes(bytes(1_250_000))
        with self.room_afterwards():
            yield

    def fill(self) -> None:
        """Take all the room that is left."""
        with open(self.ballast, "ab", buffering=0) as f:
            try:
                while True:
                    f.write(bytes(1024))
            except OSError:
                return

    @contextmanager
    def room_afterwards(self) -> Iterator[None]:
        try:
            yield
        finally:
            self.ballast.unlink()


class LimitedFiles:
    """No file of this process may grow beyond a limit: writes end half-way with EFBIG, as with ENOSPC on a full disk."""

    error = "File too large"

    def __init__(self, path: Path) -> None:
        self.path, self.before = path, resource.getrlimit(resource.RLIMIT_FSIZE)

    @contextmanager
    def room_for_two_chunks(self) -> Iterator[None]:
        saved, save_file = [], hidden_state_writer.save_file

        def save(*args: Any) -> None:
            if len(saved) == 2:
                self.fill(100_000)
            saved.append(args)
            save_file(*args)

        with pytest.MonkeyPatch.context() as patch, self.room_afterwards():
            patch.setattr(hidden_state_writer, "save_file", save)
            yield

    def fill(self, num_bytes: int = 0) -> None:
        """Let no file grow beyond this."""
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


@pytest.fixture(params=["mounted", "limited"])
def disk(request: pytest.FixtureRequest, tmp_path: Path) -> MountedDisk | LimitedFiles:
    return (
        MountedDisk(request.getfixturevalue("small_disk"))
        if request.param == "mounted"
        else LimitedFiles(tmp_path)
    )


@pytest.fixture(scope="module")
def big(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], dict[str, str]]:
    """Manifest and files of the big shard on a disk with room."""
    out = tmp_path_factory.mktemp("big")
    return finish(open_writer(out, **BIG)), files_of(out)


def test_a_full_disk_is_named_and_finished_chunks_are_kept(
    disk: MountedDisk | LimitedFiles, big: tuple[dict[str, Any], dict[str, str]]
) -> None:
    out = disk.path / "shard"
    remedy = "the 2 that are finished are kept: mend that (on a full disk, make room) and run again"
    message = rf"shard: chunk 2 of 4 could not be written \(.*{disk.error}.*\); {re.escape(remedy)}"
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
            r"chunk 1 of 4 could not be written \(.*chunk-00001\.json could not be written \(.*{error}.*; the 1 that",
        ),
        (
            "manifest.json",
            r"shard/manifest\.json could not be written \(.*{error}.*\); check the free disk space and run again",
        ),
    ],
)
def test_a_disk_that_is_full_for_the_last_few_bytes_is_named(
    disk: MountedDisk | LimitedFiles, big: tuple[dict[str, Any], dict[str, str]], file: str, message: str
) -> None:
    write_bytes = hidden_state_writer.write_bytes

    def write_on_full_disk(place: str, data: bytes) -> None:
        if place.endswith(file):
            disk.fill()
        write_bytes(place, data)

    out = disk.path / "shard"
    with pytest.MonkeyPatch.context() as patch, disk.room_afterwards():
        patch.setattr(hidden_state_writer, "write_bytes", write_on_full_disk)
        with pytest.raises(OSError, match=message.format(error=disk.error)):
            finish(open_writer(out, **BIG))
        assert finished_manifest(out) is None
        assert not list(out.glob("*.part"))
    writer = open_writer(out, **BIG)
    assert sorted(writer.entries) == list(range(1 if file.startswith("chunk") else NUM_CHUNKS))
    assert (finish(writer), files_of(out)) == big


@contextmanager
def mounted_read_only(disk: Path) -> Iterator[str]:
    """Bind it over itself without the right to write: a plain remount is refused while a file is open for writing."""
    subprocess.run(["mount", "--bind", str(disk), str(disk)], check=True)
    subprocess.run(["mount", "-o", "remount,bind,ro", str(disk)], check=True)
    yield "Read-only file system"


def become_nobody() -> None:
    try:
        os.seteuid(NOBODY)
    except OSError as e:  # a container without CAP_SETUID, or one that has no other users
        pytest.skip(f"root may write anywhere and cannot become another user here ({e})")


@contextmanager
def without_permission(directory: Path) -> Iterator[str]:
    """Take the right to write in it and below; root, whom no permission stops, is nobody meanwhile."""
    user, directories = os.geteuid(), [directory, *(path for path in directory.rglob("*") if path.is_dir())]
    for path in directories:
        path.chmod(0o555)
    try:
        if user == 0:
            become_nobody()
        yield "Permission denied"
    finally:
        os.seteuid(user)
        for path in directories:
            if path.exists():
                path.chmod(0o755)


ReadOnly = Callable[[Path], AbstractContextManager[str]]


@pytest.fixture(params=["mounted", "permissions"])
def directory(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, ReadOnly]:
    """A directory, and what makes it read-only and says what the system answers then."""
    if request.param == "mounted":
        return request.getfixturevalue("small_disk"), mounted_read_only
    return tmp_path, without_permission


def test_a_read_only_directory_is_named_before_anything_is_computed(directory: tuple[Path, ReadOnly]) -> None:
    place, read_only = directory
    with read_only(place) as error, pytest.raises(OSError, match=f"{error}: '{place}/shard"):
        open_writer(place / "shard")


def test_a_directory_that_becomes_read_only_is_named(directory: tuple[Path, ReadOnly]) -> None:
    place, read_only = directory
    writer = open_writer(place / "shard")
    message = r"shard: chunk 0 of 4 could not be written \(.*{error}.*; the 0 that are"
    with read_only(place) as error, pytest.raises(OSError, match=message.format(error=error)):
        finish(writer)
