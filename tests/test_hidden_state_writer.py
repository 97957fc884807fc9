"""Writing a shard: killed anywhere, it goes on to the same files; full disks, failing stores and bad states are named."""

import hashlib
import itertools
import json
import os
import random
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem

from eagle3 import chunk_plan, hidden_state_writer, remote, staging
from eagle3.chunk_plan import plan_chunks, row_bytes
from eagle3.config import ExtractConfig
from eagle3.encoding import STORED_DTYPE
from eagle3.hidden_state_writer import CHUNKS_IN_MEMORY, HiddenStateWriter, finished_manifest
from eagle3.hidden_states import read_hidden_states
from eagle3.shards import TokenRow
from tests.shard_files import states_of, token_rows

NUM_AUX, HIDDEN = 3, 5
INFO = {"target": "tiny", "layer_ids": [1, 2, 3]}
# Eight rows of different lengths in four chunks of two frames.
ROWS = token_rows(["0111011", "11111", "0110000111", "011111"] * 2)
CFG = ExtractConfig(encoding="bf16", compression="zstd", chunk_bytes=410)
NUM_CHUNKS = 4


@pytest.fixture(autouse=True)
def small_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunk_plan, "FRAME_BYTES", 100)


@pytest.fixture
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    """A store that fails is tried again at once."""
    monkeypatch.setattr(remote, "FIRST_PAUSE_S", 0.0)


@pytest.fixture
def memory_url() -> Iterator[str]:
    """A URL in fsspec's memory store."""
    MemoryFileSystem.store.clear()
    yield "memory://states/shard"
    MemoryFileSystem.store.clear()


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


def open_writer(out: Path | str, rows: list[TokenRow] = ROWS, cfg: ExtractConfig = CFG, **more: Any) -> HiddenStateWriter:
    return HiddenStateWriter(out, rows, NUM_AUX, HIDDEN, cfg, **({"info": INFO} | more))


def missing_rows(writer: HiddenStateWriter) -> list[int]:
    """Rows of the chunks that are not finished, in order."""
    return [r for number, frames in enumerate(writer.plan) if number not in writer.entries for frame in frames for r in frame]


def finish(writer: HiddenStateWriter, order: Callable[[list[int]], Any] | None = None) -> dict[str, Any]:
    """Add what is missing and close."""
    missing = missing_rows(writer)
    if order is not None:
        order(missing)
    try:
        for row in missing:
            writer.add(row, states_of(writer.rows[row], NUM_AUX, HIDDEN))
        return writer.close()
    finally:
        writer.stop()


def files_of(out: Path | str) -> dict[str, str]:
    """SHA-256 of every file by its name."""
    store, root = fsspec.core.url_to_fs(str(out))
    store.invalidate_cache()
    return {path.removeprefix(f"{root}/"): hashlib.sha256(store.cat_file(path)).hexdigest() for path in store.find(root)}


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
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], dict[str, str]]:
    """Manifest and files of the shard that every interrupted one has to become."""
    out = tmp_path_factory.mktemp("uninterrupted")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunk_plan, "FRAME_BYTES", 100)
        writer = open_writer(out)
        assert [len(frames) for frames in writer.plan] == [2] * NUM_CHUNKS
        return finish(writer), files_of(out)


# Plan, digest and files


@pytest.mark.parametrize("seed", range(20))
def test_chunks_and_frames_end_with_the_row_that_fills_them(seed: int) -> None:
    generator = random.Random(seed)
    sizes = [generator.randint(1, 60) for _ in range(generator.randint(1, 40))]
    chunk_bytes = generator.randint(1, 500)
    chunks = plan_chunks(sizes, chunk_bytes)
    assert [row for frames in chunks for frame in frames for row in frame] == list(range(len(sizes)))
    for frames in chunks:
        whole = list(itertools.chain(*frames))
        assert sum(sizes[r] for r in whole[:-1]) < chunk_bytes
        assert sum(sizes[r] for r in whole) >= chunk_bytes or frames is chunks[-1]
        for frame in frames:
            assert sum(sizes[r] for r in frame[:-1]) < min(100, chunk_bytes)
            assert sum(sizes[r] for r in frame) >= min(100, chunk_bytes) or frame is frames[-1]


@pytest.mark.parametrize("encoding", sorted(STORED_DTYPE))
def test_size_is_known_before_compression(tmp_path: Path, encoding: str) -> None:
    rows = token_rows(["0" * 40 + "1" * 60] * 7)
    cfg = ExtractConfig(encoding=encoding, compression="none", chunk_bytes=1 << 20)
    manifest = finish(open_writer(tmp_path, rows, cfg))
    bound = sum(row_bytes(row, NUM_AUX, HIDDEN, encoding) for row in rows)
    # The header and the row offsets, which the estimate leaves out.
    assert bound < manifest["bytes"] < bound + 1024


def test_equal_content_makes_equal_files_whatever_the_threads_and_the_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, uninterrupted: tuple[dict[str, Any], dict[str, str]]
) -> None:
    for threads, order in ((1, None), (4, random.Random(0).shuffle), (4, list.reverse)):
        monkeypatch.setattr(hidden_state_writer, "ENCODE_THREADS", threads)
        out = tmp_path / f"{threads}-{order}"
        assert (finish(open_writer(out), order), files_of(out)) == uninterrupted


def test_digest_depends_on_content_and_settings_not_on_how_it_is_stored(tmp_path: Path) -> None:
    def digest(rows: list[TokenRow] = ROWS, info: dict[str, Any] = INFO, **changed: Any) -> str:
        out = tmp_path / str(len(list(tmp_path.iterdir())))
        return str(finish(open_writer(out, rows, CFG.model_copy(update=changed), info=info))["digest"])

    same = [digest(), digest(), digest(compression="none"), digest(chunk_bytes=1), digest(info=dict(reversed(INFO.items())))]
    assert len(set(same)) == 1
    changed = [
        digest(ROWS[1:]),
        digest(ROWS[::-1]),
        digest(encoding="fp8"),
        digest(encoding="fp32"),
        digest(info={**INFO, "layer_ids": [1, 2, 4]}),
    ]
    assert len({same[0], *changed}) == 6


def test_a_shard_without_rows_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"out: a hidden-state shard needs at least one row, got none; check what was dropped"):
        open_writer(tmp_path / "out", [])
    assert list(tmp_path.iterdir()) == []


# Going on where a killed attempt ended


def fork_and_kill(out: str, function: str, call: int) -> None:
    """Write the shard in a process of its own, killed (signal 9) when it calls a function of the writer for that time."""
    ready, child_ready = os.pipe()
    pid = os.fork()
    if pid == 0:
        calls = iter(range(1, 100))
        original = getattr(hidden_state_writer, function)

        def pause(*args: Any) -> Any:
            if next(calls) < call:
                return original(*args)
            if function == "save_file":  # half of it is on the disk
                args[1].with_name(".tmpABC").write_bytes(b"half")
            os.write(child_ready, b"x")
            return time.sleep(100)

        try:
            setattr(hidden_state_writer, function, pause)
            finish(open_writer(out))
        finally:
            os._exit(1)
    os.close(child_ready)
    try:
        assert os.read(ready, 1) == b"x"
        with pytest.raises(OSError, match="another process is writing this shard; wait until it has ended and run again"):
            open_writer(out)
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(ready)


# function, which call of it, chunks that are finished then
KILLED = [
    ("save_file", 3, 2),
    ("file_sha256", 3, 2),
    ("move_file", 3, 2),
    ("write_bytes", 3, 2),  # the third chunk lies there, without its entry
    ("write_bytes", NUM_CHUNKS + 1, NUM_CHUNKS),  # the manifest
    ("remove_file", 2, NUM_CHUNKS - 1),  # behind the manifest
]


@pytest.mark.parametrize(("function", "call", "num_finished"), KILLED)
def test_a_killed_writer_is_gone_on_from_to_the_same_shard(
    tmp_path: Path, uninterrupted: tuple[dict[str, Any], dict[str, str]], function: str, call: int, num_finished: int
) -> None:
    fork_and_kill(str(tmp_path), function, call)
    times = {path.name: path.stat().st_mtime_ns for path in tmp_path.glob("chunk-*.safetensors")}
    writer = open_writer(tmp_path)
    assert (
        sorted(writer.entries)
        == list(range(NUM_CHUNKS))[NUM_CHUNKS - num_finished if function == "remove_file" else 0 :][:num_finished]
    )
    assert [path.name for path in (tmp_path / ".chunk").iterdir()] == ["lock"]
    kept = {entry["file"] for entry in writer.entries.values()}
    assert (finish(writer), files_of(tmp_path)) == uninterrupted
    assert {name: (tmp_path / name).stat().st_mtime_ns for name in kept} == {name: times[name] for name in kept}
    assert not (tmp_path / ".chunk").exists()


@pytest.mark.parametrize(("function", "call", "num_finished"), [KILLED[0], KILLED[3]])
def test_a_killed_writer_to_s3_is_gone_on_from_to_the_same_shard(
    s3: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    uninterrupted: tuple[dict[str, Any], dict[str, str]],
    function: str,
    call: int,
    num_finished: int,
) -> None:
    monkeypatch.setattr(staging, "gettempdir", lambda: str(tmp_path))
    url = "s3://states/killed/shard"
    fork_and_kill(url, function, call)
    times = {name: s3.info(f"states/killed/shard/{name}")["LastModified"] for name in files_of(url)}
    writer = open_writer(url)
    assert sorted(writer.entries) == list(range(num_finished))
    kept = {entry["file"] for entry in writer.entries.values()}
    assert (finish(writer), files_of(url)) == uninterrupted
    s3.invalidate_cache()
    assert {name: s3.info(f"states/killed/shard/{name}")["LastModified"] for name in kept} == {name: times[name] for name in kept}
    assert list(tmp_path.iterdir()) == []


def leave_unfinished(out: Path | str, num_chunks: int = 2, **more: Any) -> None:
    """What an attempt leaves that ended after some chunks."""
    writer = open_writer(out, **more)
    for row in range(2 * num_chunks):
        writer.add(row, states_of(writer.rows[row], NUM_AUX, HIDDEN))
    writer.stop()


@pytest.mark.parametrize(
    "changed",
    [
        {"info": {**INFO, "layer_ids": [1, 2, 4]}},
        {"rows": [TokenRow("id-0", "other source", ROWS[0].token_ids, ROWS[0].loss_mask), *ROWS[1:]]},
        {"rows": ROWS[:-1]},
        {"rows": ROWS[::-1]},
        {"cfg": CFG.model_copy(update={"encoding": "fp8"})},
        {"cfg": CFG.model_copy(update={"encoding": "fp16"})},
    ],
)
def test_chunks_of_other_rows_or_settings_are_not_gone_on_from_and_go(tmp_path: Path, changed: dict[str, Any]) -> None:
    leave_unfinished(tmp_path / "a")
    assert finish(open_writer(tmp_path / "a", **changed)) == finish(open_writer(tmp_path / "b", **changed))
    assert files_of(tmp_path / "a") == files_of(tmp_path / "b")


def test_other_rows_or_settings_start_without_entries(tmp_path: Path) -> None:
    leave_unfinished(tmp_path)
    assert sorted(open_writer(tmp_path).entries) == [0, 1]
    assert not open_writer(tmp_path, info={}).entries
    assert not open_writer(tmp_path, cfg=CFG.model_copy(update={"chunk_bytes": 1})).entries


def test_chunks_compressed_otherwise_are_gone_on_from(tmp_path: Path) -> None:
    leave_unfinished(tmp_path)
    writer = open_writer(tmp_path, cfg=CFG.model_copy(update={"compression": "none"}))
    assert sorted(writer.entries) == [0, 1]
    finish(writer)
    for row, back in zip(ROWS, read_hidden_states(tmp_path), strict=True):
        assert torch.equal(back.aux, states_of(row, NUM_AUX, HIDDEN, torch.bfloat16)[:, :-1])


@pytest.mark.parametrize("damage", [lambda d: d[:-1] + bytes([d[-1] ^ 1]), lambda d: d[:-1], lambda d: b"", None])
def test_a_torn_chunk_is_written_again(tmp_path: Path, damage: Any, uninterrupted: tuple[dict[str, Any], dict[str, str]]) -> None:
    leave_unfinished(tmp_path)
    path = next(tmp_path.glob("chunk-00001-*"))
    if damage is None:
        path.unlink()
    else:
        path.write_bytes(damage(path.read_bytes()))
    writer = open_writer(tmp_path)
    assert sorted(writer.entries) == [0]
    assert (finish(writer), files_of(tmp_path)) == uninterrupted


def test_chunk_files_without_an_entry_go_with_the_last_attempt(
    tmp_path: Path, uninterrupted: tuple[dict[str, Any], dict[str, str]]
) -> None:
    leave_unfinished(tmp_path)
    (tmp_path / "chunk-00002-deadbeef.safetensors").write_bytes(b"of states whose last bits differ")
    assert (finish(open_writer(tmp_path)), files_of(tmp_path)) == uninterrupted


def as_json(change: Callable[[dict[str, Any]], Any]) -> Callable[[str], str]:
    """A sidecar with something changed in it."""

    def changed(text: str) -> str:
        sidecar = json.loads(text)
        change(sidecar)
        return json.dumps(sidecar)

    return changed


@pytest.mark.parametrize(
    "change",
    [
        lambda text: "",
        lambda text: text[:-5],
        lambda text: "[]",
        lambda text: "7",
        lambda text: "null",
        lambda text: "{}",
        lambda text: '{"entry": 7}',
        lambda text: "\0" * 50,
        as_json(lambda s: s.pop("digest")),
        as_json(lambda s: s.pop("entry")),
        as_json(lambda s: s.update(digest="0" * 32)),
        *(
            as_json(lambda s, key=key: s["entry"].pop(key))
            for key in ("file", "sample_ids", "lengths", "bytes", "sha256", "checks")
        ),
        as_json(lambda s: s["entry"].update(file="../../x")),
        as_json(lambda s: s["entry"].update(file="../../chunk-00000-00000000.safetensors")),
        as_json(lambda s: s["entry"].update(sha256="0" * 64)),
        as_json(lambda s: s["entry"].update(bytes=1)),
        as_json(lambda s: s["entry"].update(checks=7)),
        as_json(lambda s: s["entry"]["sample_ids"].reverse()),
    ],
)
def test_an_entry_that_is_damaged_counts_as_none(
    tmp_path: Path, change: Callable[[str], str], uninterrupted: tuple[dict[str, Any], dict[str, str]]
) -> None:
    out = tmp_path / "a" / "b"
    leave_unfinished(out)
    (tmp_path / "x").write_text("not ours")
    (tmp_path / "chunk-00000-00000000.safetensors").write_text("not ours")
    sidecar = out / "chunk-00001.json"
    sidecar.write_text(change(sidecar.read_text()))
    writer = open_writer(out)
    assert sorted(writer.entries) == [0]
    assert (finish(writer), files_of(out)) == uninterrupted
    assert (tmp_path / "x").read_text() == "not ours"


def test_a_second_writer_of_one_shard_is_refused_and_harms_nothing(
    tmp_path: Path, uninterrupted: tuple[dict[str, Any], dict[str, str]]
) -> None:
    first = open_writer(tmp_path)
    for _ in range(2):
        with pytest.raises(OSError, match=f"{tmp_path}: another process is writing this shard"):
            open_writer(tmp_path)
    assert (finish(first), files_of(tmp_path)) == uninterrupted
    open_writer(tmp_path).stop()


@pytest.mark.parametrize("closes_first", [0, 1])
def test_two_machines_that_write_to_one_url_leave_a_sound_shard(
    memory_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, closes_first: int
) -> None:
    writers = []
    for machine in ("a", "b"):
        monkeypatch.setattr(staging, "gettempdir", lambda machine=machine: str(tmp_path / machine))
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


def test_a_finished_shard_is_known_by_its_files(tmp_path: Path, memory_url: str) -> None:
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


# Full disks and failing stores

BIG_ROWS = [TokenRow(f"big-{i}", "train", list(range(1000 * i, 1000 * i + 3000)), [True] * 3000) for i in range(8)]
# 160 KB a row, 320 KB a chunk: four take 1.3 of 2 MiB.
BIG = {"rows": BIG_ROWS, "cfg": ExtractConfig(encoding="bf16", compression="none", chunk_bytes=200_000)}


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


class FailingStore:
    """fsspec's memory store; `failures` says how often each of its methods fails from now on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.failures: dict[str, int] = {}
        for method in ("put_file", "pipe_file", "cat_file", "info", "rm_file"):
            monkeypatch.setattr(MemoryFileSystem, method, self.failing(method, getattr(MemoryFileSystem, method)))

    def failing(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def called(*args: Any, **more: Any) -> Any:
            if self.failures.get(name, 0) > 0:
                self.failures[name] -= 1
                raise RuntimeError("no connection")  # botocore's are no OSErrors either
            return method(*args, **more)

        return called


def test_a_store_that_fails_now_and_then_does_not_matter(
    memory_url: str, monkeypatch: pytest.MonkeyPatch, no_pause: None, uninterrupted: tuple[dict[str, Any], dict[str, str]]
) -> None:
    leave_unfinished(memory_url)
    store = FailingStore(monkeypatch)
    store.failures = dict.fromkeys(("put_file", "pipe_file", "cat_file", "info", "rm_file"), remote.TRIES - 1)
    assert finish(open_writer(memory_url)) == uninterrupted[0]
    assert not any(store.failures.values())
    assert files_of(memory_url) == uninterrupted[1]


@pytest.mark.parametrize(
    ("method", "place"), [("put_file", r"chunk-00002-\w{8}\.safetensors"), ("pipe_file", r"chunk-00002\.json")]
)
def test_a_store_that_keeps_failing_is_named_and_may_be_tried_again(
    memory_url: str,
    monkeypatch: pytest.MonkeyPatch,
    no_pause: None,
    uninterrupted: tuple[dict[str, Any], dict[str, str]],
    method: str,
    place: str,
) -> None:
    leave_unfinished(memory_url)
    store = FailingStore(monkeypatch)
    writer = open_writer(memory_url)
    store.failures = {method: 1000}
    message = (
        rf"chunk 2 of 4 could not be written \({memory_url}/{place} could not be reached in 5 tries .*; the 2 that are finished"
    )
    with pytest.raises(OSError, match=message):
        finish(writer)
    store.failures = {}
    writer = open_writer(memory_url)
    assert sorted(writer.entries) == [0, 1]
    assert (finish(writer), files_of(memory_url)) == uninterrupted


def test_a_store_that_cannot_be_read_at_the_start_is_named_and_lets_the_next_one_in(
    memory_url: str, monkeypatch: pytest.MonkeyPatch, no_pause: None
) -> None:
    store = FailingStore(monkeypatch)
    store.failures = {"cat_file": 1000}
    with pytest.raises(OSError, match=f"{memory_url}/chunk-00000.json could not be reached in 5 tries") as kept:
        open_writer(memory_url)
    store.failures = {}
    assert finish(open_writer(memory_url))["rows"] == len(ROWS)
    del kept


def test_an_upload_that_lost_bytes_is_named(memory_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MemoryFileSystem, "put_file", lambda self, path, to: self.pipe_file(to, Path(path).read_bytes()[:-1]))
    with pytest.raises(
        OSError, match=r"chunk 0 of 4 could not be written .* should have \d+ bytes after its upload, the store says"
    ):
        finish(open_writer(memory_url))


# What lies in memory and on the disk meanwhile


def test_at_most_one_chunk_lies_on_the_local_disk_on_its_way_to_a_store(
    memory_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staging, "gettempdir", lambda: str(tmp_path))
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


class Gate:
    """Holds everyone who passes through a method of the writer until it is opened; `passed` counts them afterwards."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> None:
        self.opened, self.passed, original = threading.Event(), 0, getattr(owner, name)

        def held(*args: Any) -> Any:
            assert self.opened.wait(30)
            self.passed += 1
            return original(*args)

        monkeypatch.setattr(owner, name, held)


class Adder(threading.Thread):
    """Adds all rows, counted by `num_added`, until one is refused for `failure`."""

    def __init__(self, writer: HiddenStateWriter) -> None:
        super().__init__(daemon=True)
        self.writer, self.num_added = writer, 0
        self.failure: Exception | None = None
        self.start()

    def run(self) -> None:
        try:
            for row in range(len(self.writer.rows)):
                self.writer.add(row, states_of(self.writer.rows[row], NUM_AUX, HIDDEN))
                self.num_added += 1
        except Exception as e:
            self.failure = e

    def wait_until_blocked(self) -> int:
        """How many rows were added before one had to wait."""
        before = -1
        while before != self.num_added:
            before = self.num_added
            time.sleep(0.3)
        return before


def test_a_slow_store_holds_up_who_adds_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = token_rows(["0111011", "11111"] * 10)
    gate = Gate(monkeypatch, HiddenStateWriter, "_save")
    writer = open_writer(tmp_path, rows)
    assert [len(frames) for frames in writer.plan] == [2] * 10
    adder = Adder(writer)
    # The row that would complete the third chunk waits.
    assert adder.wait_until_blocked() == 2 * (CHUNKS_IN_MEMORY + 1) - 1
    gate.opened.set()
    adder.join(30)
    assert not adder.is_alive()
    assert len(writer.close()["chunks"]) == gate.passed == 10


def test_who_waits_for_a_store_learns_that_it_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any) -> None:
        raise OSError("gone")

    monkeypatch.setattr(HiddenStateWriter, "_save", fail)
    gate = Gate(monkeypatch, HiddenStateWriter, "_save")
    adder = Adder(open_writer(tmp_path, token_rows(["0111011", "11111"] * 10)))
    adder.wait_until_blocked()
    gate.opened.set()
    adder.join(30)
    assert "chunk 0 of 10 could not be written (gone); the 0 that are finished are kept" in str(adder.failure)
    adder.writer.stop()


def test_slow_encoding_holds_up_who_adds_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hidden_state_writer, "ENCODE_THREADS", 2)
    gate = Gate(monkeypatch, hidden_state_writer, "encode")
    writer = open_writer(tmp_path, token_rows(["0111011", "11111"] * 10), CFG.model_copy(update={"chunk_bytes": 1 << 20}))
    adder = Adder(writer)
    assert adder.wait_until_blocked() == 2 * 2
    gate.opened.set()
    adder.join(30)
    assert not adder.is_alive()
    assert writer.close()["rows"] == 20


# Bad states


def finish_within(seconds: float, writer: HiddenStateWriter, states: Callable[[TokenRow], torch.Tensor]) -> Exception:
    """What stops it: raised by add or by close, in time."""
    stopped: list[Exception] = []

    def run() -> None:
        try:
            for row in missing_rows(writer):
                writer.add(row, states(writer.rows[row]))
            writer.close()
        except Exception as e:
            stopped.append(e)
        finally:
            writer.stop()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    assert not thread.is_alive(), "it hangs"
    return stopped[0]


@pytest.mark.parametrize("bad_row", [0, 3, 7])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), 0.0])
@pytest.mark.parametrize("encoding", ["bf16", "fp8"])
def test_a_bad_state_names_its_row_and_holds_up_nobody(tmp_path: Path, bad_row: int, value: float, encoding: str) -> None:
    # Each chunk more often than may wait, so that who adds rows would wait for ever for a chunk that never comes.
    rows = [TokenRow(f"row-{i}", row.source, row.token_ids, row.loss_mask) for i, row in enumerate(ROWS * 3)]
    cfg = CFG.model_copy(update={"encoding": encoding})

    def states(row: TokenRow) -> torch.Tensor:
        states = states_of(row, NUM_AUX, HIDDEN)
        if row is rows[bad_row]:
            states[3, 1] = value
        return states

    error = finish_within(20, open_writer(tmp_path, rows, cfg), states)
    assert isinstance(error, ValueError)
    assert f"row row-{bad_row} has a zero or non-finite hidden state in {encoding}; if the row is sound, set" in str(error)
    assert finished_manifest(tmp_path) is None
    writer = open_writer(tmp_path, rows, cfg)
    bad_chunk = writer.frame_of[bad_row][0]
    assert set(range(bad_chunk)) <= set(writer.entries)
    assert bad_chunk not in writer.entries
    assert finish(writer)["rows"] == len(rows)


def test_a_state_beyond_its_encoding_names_row_and_remedy(tmp_path: Path) -> None:
    error = finish_within(
        20,
        open_writer(tmp_path, cfg=CFG.model_copy(update={"encoding": "fp16"})),
        lambda row: torch.full((len(row.token_ids), NUM_AUX + 1, HIDDEN), 1e5),
    )
    assert "has a zero or non-finite hidden state in fp16; if the row is sound, set extract.encoding to bf16 or fp32" in str(
        error
    )


def test_a_last_state_that_no_loss_needs_is_not_looked_at(tmp_path: Path) -> None:
    def states(row: TokenRow) -> torch.Tensor:
        states = states_of(row, NUM_AUX, HIDDEN)
        states[0, -1] = float("nan")
        return states

    rows = [row for row in ROWS if not row.loss_mask[0]]
    writer = open_writer(tmp_path, rows)
    for number, row in enumerate(rows):
        writer.add(number, states(row))
    assert writer.close()["rows"] == len(rows)


def test_lost_states_name_the_row(tmp_path: Path) -> None:
    writer = open_writer(tmp_path)
    with pytest.raises(ValueError, match=re.escape("row id-0: states must be (7, 4, 5), got (6, 4, 5); the engine lost some")):
        writer.add(0, states_of(ROWS[0], NUM_AUX, HIDDEN)[1:])
    writer.stop()


def test_checks_are_asked_for_every_chunk_and_summed_over_all_attempts(tmp_path: Path) -> None:
    def check(rows: list[int]) -> dict[str, int]:
        asked.append(rows)
        return {"rows_sound": len(rows), "sum": sum(rows)}

    asked: list[list[int]] = []
    leave_unfinished(tmp_path, check=check)
    assert asked == [[0, 1], [2, 3]]
    manifest = finish(open_writer(tmp_path, check=check))
    assert asked == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert manifest["checks"] == {"rows_sound": 8, "sum": sum(range(8))}
    assert [chunk["checks"]["sum"] for chunk in manifest["chunks"]] == [1, 5, 9, 13]


def test_a_check_that_fails_stops_the_shard_without_its_chunk(tmp_path: Path) -> None:
    def check(rows: list[int]) -> dict[str, int]:
        if 4 in rows:
            raise RuntimeError("the last hidden state reproduces nothing")
        return {}

    error = finish_within(20, open_writer(tmp_path, check=check), lambda row: states_of(row, NUM_AUX, HIDDEN))
    assert str(error) == "the last hidden state reproduces nothing"
    assert {0, 1} <= set(open_writer(tmp_path).entries) <= {0, 1, 3}
