"""A disk that is full or read-only is named, and what was finished before is kept."""

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from eagle3 import chunk_plan, hidden_state_writer
from eagle3.hidden_state_writer import finished_manifest
from tests.hidden_state_writer.writers import BIG, NUM_CHUNKS, files_of, finish, open_writer


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 2 MiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(disk)], capture_output=True, check=False)
    if mounted.returncode != 0:
        pytest.skip("a small disk needs the right to mount one")
    yield disk
    while disk.is_mount():
        subprocess.run(["umount", "--lazy", str(disk)], check=True)


def fill(disk: Path) -> Path:
    """Take all the room that is left."""
    ballast = disk / "ballast"
    with open(ballast, "ab", buffering=0) as f:
        try:
            while True:
                f.write(bytes(1024))
        except OSError:
            return ballast


@pytest.fixture(scope="module")
def big(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], dict[str, str]]:
    """Manifest and files of the big shard on a disk with room."""
    out = tmp_path_factory.mktemp("big")
    return finish(open_writer(out, **BIG)), files_of(out)


def test_a_full_disk_is_named_and_finished_chunks_are_kept(small_disk: Path, big: tuple[dict[str, Any], dict[str, str]]) -> None:
    (small_disk / "ballast").write_bytes(bytes(1_250_000))
    out = small_disk / "shard"
    remedy = "the 2 that are finished are kept: mend that (on a full disk, make room) and run again"
    with pytest.raises(OSError, match=rf"shard: chunk 2 of 4 could not be written \(.*No space left.*\); {re.escape(remedy)}"):
        finish(open_writer(out, **BIG))
    names = sorted(path.name for path in out.iterdir())
    assert names == sorted(["chunk-00000.json", "chunk-00001.json", *(c["file"] for c in big[0]["chunks"][:2])])
    (small_disk / "ballast").unlink()
    writer = open_writer(out, **BIG)
    assert sorted(writer.entries) == [0, 1]
    assert (finish(writer), files_of(out)) == big


@pytest.mark.parametrize(
    ("file", "message"),
    [
        (
            "chunk-00001.json",
            r"chunk 1 of 4 could not be written \(.*chunk-00001\.json could not be written \(.*No space left.*; the 1 that",
        ),
        (
            "manifest.json",
            r"shard/manifest\.json could not be written \(.*No space left.*\); check the free disk space and run again",
        ),
    ],
)
def test_a_disk_that_is_full_for_the_last_few_bytes_is_named(
    small_disk: Path, monkeypatch: pytest.MonkeyPatch, big: tuple[dict[str, Any], dict[str, str]], file: str, message: str
) -> None:
    write_bytes = hidden_state_writer.write_bytes

    def write_on_full_disk(place: str, data: bytes) -> None:
        if place.endswith(file):
            fill(small_disk)
        write_bytes(place, data)

    monkeypatch.setattr(hidden_state_writer, "write_bytes", write_on_full_disk)
    out = small_disk / "shard"
    with pytest.raises(OSError, match=message):
        finish(open_writer(out, **BIG))
    assert finished_manifest(out) is None
    assert not list(out.glob("*.part"))
    (small_disk / "ballast").unlink()
    monkeypatch.undo()
    monkeypatch.setattr(chunk_plan, "FRAME_BYTES", 100)
    writer = open_writer(out, **BIG)
    assert sorted(writer.entries) == list(range(1 if file.startswith("chunk") else NUM_CHUNKS))
    assert (finish(writer), files_of(out)) == big


def make_read_only(disk: Path) -> None:
    """Bind it over itself without the right to write: a plain remount is refused while a file is open for writing."""
    subprocess.run(["mount", "--bind", str(disk), str(disk)], check=True)
    subprocess.run(["mount", "-o", "remount,bind,ro", str(disk)], check=True)


def test_a_read_only_directory_is_named_before_anything_is_computed(small_disk: Path) -> None:
    make_read_only(small_disk)
    with pytest.raises(OSError, match=f"Read-only file system: '{small_disk}/shard"):
        open_writer(small_disk / "shard")


def test_a_directory_that_becomes_read_only_is_named(small_disk: Path) -> None:
    writer = open_writer(small_disk / "shard")
    make_read_only(small_disk)
    with pytest.raises(OSError, match=r"shard: chunk 0 of 4 could not be written \(.*Read-only file system.*; the 0 that are"):
        finish(writer)
