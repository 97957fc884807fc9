"""A killed writer is resumed to the same files, without torn chunks and chunks of other rows."""

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from eagle3.shards import chunks
from eagle3.shards import writer as hidden_state_writer
from eagle3.shards.hidden_states import read_hidden_states
from eagle3.shards.tokens import TokenRow
from tests.helpers.shard_files import states_of
from tests.helpers.writers import (
    CFG,
    HIDDEN,
    INFO,
    NUM_AUX,
    NUM_CHUNKS,
    ROWS,
    files_of,
    finish,
    leave_unfinished,
    open_writer,
)


def fork_and_kill(out: str, function: str, call: int) -> None:
    """Write the shard in a child process, killed (signal 9) at the given call of a function of the writer."""
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
        with pytest.raises(
            OSError, match="another process is writing this shard; wait until it has ended and run again"
        ):
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
    ("write_bytes", 3, 2),  # the third chunk is written, its entry is not
    ("write_bytes", NUM_CHUNKS + 1, NUM_CHUNKS),  # the manifest
    ("remove_file", 2, NUM_CHUNKS - 1),  # after the manifest
]


@pytest.mark.parametrize(("function", "call", "num_finished"), KILLED)
def test_a_killed_writer_is_resumed_to_the_same_shard(
    tmp_path: Path,
    uninterrupted: tuple[dict[str, Any], dict[str, str]],
    function: str,
    call: int,
    num_finished: int,
) -> None:
    fork_and_kill(str(tmp_path), function, call)
    times = {path.name: path.stat().st_mtime_ns for path in tmp_path.glob("chunk-*.safetensors")}
    writer = open_writer(tmp_path)
    assert (
        sorted(writer.entries)
        == list(range(NUM_CHUNKS))[NUM_CHUNKS - num_finished if function == "remove_file" else 0 :][
            :num_finished
        ]
    )
    assert [path.name for path in (tmp_path / ".chunk").iterdir()] == ["lock"]
    kept = {entry["file"] for entry in writer.entries.values()}
    assert (finish(writer), files_of(tmp_path)) == uninterrupted
    assert {name: (tmp_path / name).stat().st_mtime_ns for name in kept} == {
        name: times[name] for name in kept
    }
    assert not (tmp_path / ".chunk").exists()


@pytest.mark.parametrize(("function", "call", "num_finished"), [KILLED[0], KILLED[3]])
def test_a_killed_writer_to_s3_is_resumed_to_the_same_shard(
    s3: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    uninterrupted: tuple[dict[str, Any], dict[str, str]],
    function: str,
    call: int,
    num_finished: int,
) -> None:
    monkeypatch.setattr(chunks, "gettempdir", lambda: str(tmp_path))
    url = "s3://states/killed/shard"
    fork_and_kill(url, function, call)
    times = {name: s3.info(f"states/killed/shard/{name}")["LastModified"] for name in files_of(url)}
    writer = open_writer(url)
    assert sorted(writer.entries) == list(range(num_finished))
    kept = {entry["file"] for entry in writer.entries.values()}
    assert (finish(writer), files_of(url)) == uninterrupted
    s3.invalidate_cache()
    assert {name: s3.info(f"states/killed/shard/{name}")["LastModified"] for name in kept} == {
        name: times[name] for name in kept
    }
    assert list(tmp_path.iterdir()) == []


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
def test_chunks_of_other_rows_or_settings_are_not_used_and_are_removed(
    tmp_path: Path, changed: dict[str, Any]
) -> None:
    leave_unfinished(tmp_path / "a")
    assert finish(open_writer(tmp_path / "a", **changed)) == finish(open_writer(tmp_path / "b", **changed))
    assert files_of(tmp_path / "a") == files_of(tmp_path / "b")


def test_other_rows_or_settings_start_without_entries(tmp_path: Path) -> None:
    leave_unfinished(tmp_path)
    assert sorted(open_writer(tmp_path).entries) == [0, 1]
    assert not open_writer(tmp_path, info={}).entries
    assert not open_writer(tmp_path, cfg=CFG.model_copy(update={"chunk_bytes": 1})).entries


def test_chunks_with_another_compression_are_used(tmp_path: Path) -> None:
    leave_unfinished(tmp_path)
    writer = open_writer(tmp_path, cfg=CFG.model_copy(update={"compression": "none"}))
    assert sorted(writer.entries) == [0, 1]
    finish(writer)
    for row, back in zip(ROWS, read_hidden_states(tmp_path), strict=True):
        assert torch.equal(back.aux, states_of(row, NUM_AUX, HIDDEN, torch.bfloat16)[:, :-1])


@pytest.mark.parametrize(
    "damage", [lambda d: d[:-1] + bytes([d[-1] ^ 1]), lambda d: d[:-1], lambda d: b"", None]
)
def test_a_torn_chunk_is_written_again(
    tmp_path: Path, damage: Any, uninterrupted: tuple[dict[str, Any], dict[str, str]]
) -> None:
    leave_unfinished(tmp_path)
    path = next(tmp_path.glob("chunk-00001-*"))
    if damage is None:
        path.unlink()
    else:
        path.write_bytes(damage(path.read_bytes()))
    writer = open_writer(tmp_path)
    assert sorted(writer.entries) == [0]
    assert (finish(writer), files_of(tmp_path)) == uninterrupted


def test_chunk_files_without_an_entry_are_removed_at_the_end(
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
def test_a_damaged_entry_is_not_used(
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
