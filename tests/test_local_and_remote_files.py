"""Files by path or URL: alike wherever they lie, whole or not at all, tried again where a store fails."""

import threading
import traceback
from pathlib import Path
from typing import Any

import fsspec
import pytest

from eagle3 import files as remote
from eagle3.files import (
    Stopped,
    file_size,
    files_digest,
    is_remote,
    move_file,
    read_bytes,
    remove_file,
    retry,
    write_bytes,
)


@pytest.fixture(params=["path", "file", "memory", "s3"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Directory or URL of a shard that does not exist yet."""
    if request.param == "s3":
        request.getfixturevalue("s3")
    (tmp_path / "there").mkdir()
    root = {
        "path": f"{tmp_path}/there",
        "file": f"file://{tmp_path}/new",
        "memory": f"memory://{tmp_path}",
        "s3": "s3://states",
    }
    return f"{root[request.param]}"


def test_a_file_is_written_read_measured_moved_and_removed_alike_everywhere(
    place: str, tmp_path: Path
) -> None:
    file = f"{place}/a.json"
    assert (read_bytes(file), file_size(file)) == (None, None)
    for data in (b"1234", b"56", b""):
        write_bytes(file, data)
        assert (read_bytes(file), file_size(file)) == (data, len(data))
    for data in (b"a chunk", b"another one"):
        staged = tmp_path / "staged"
        staged.write_bytes(data)
        move_file(staged, f"{place}/chunk")
        assert not staged.exists()
        assert (read_bytes(f"{place}/chunk"), file_size(f"{place}/chunk")) == (data, len(data))
    store, root = fsspec.core.url_to_fs(place)
    store.invalidate_cache()
    assert sorted(path.rpartition("/")[2] for path in store.find(root)) == ["a.json", "chunk"]
    for _ in range(2):
        remove_file(file)
        assert (read_bytes(file), file_size(file)) == (None, None)


def test_a_size_is_never_an_old_one(place: str) -> None:
    file = f"{place}/a"
    write_bytes(file, b"1")
    assert file_size(file) == 1
    store, path = fsspec.core.url_to_fs(file)
    store.ls(path.rpartition("/")[0])
    if is_remote(place):
        fsspec.filesystem(
            store.protocol if isinstance(store.protocol, str) else store.protocol[0], skip_instance_cache=True
        ).pipe_file(path, b"22")
    else:
        Path(file).write_bytes(b"22")
    assert file_size(file) == 2


def test_a_local_file_that_cannot_be_written_is_named_and_the_old_one_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "manifest.json"
    write_bytes(str(file), b"old")
    write = Path.write_bytes

    def half(self: Path, data: bytes) -> int:
        write(self, data[: len(data) // 2])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", half)
    with pytest.raises(
        OSError,
        match=rf"^{file} could not be written \(.*No space left on device\); check the free disk space",
    ):
        write_bytes(str(file), b"new data")
    assert [p.name for p in tmp_path.iterdir()] == ["manifest.json"]
    assert file.read_bytes() == b"old"


def test_the_digest_of_files_is_their_content_in_order(tmp_path: Path) -> None:
    a, b, c = (tmp_path / name for name in "abc")
    a.write_text("1")
    b.write_text("2")
    c.write_text("1")
    assert files_digest(a, b) == files_digest(c, b) != files_digest(b, a)


class Failing:
    """An action that fails a number of times."""

    def __init__(self, failures: int, error: Exception) -> None:
        self.failures, self.error, self.calls = failures, error, 0

    def __call__(self) -> str:
        self.calls += 1
        if self.calls <= self.failures:
            raise self.error
        return "done"


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The pauses that were asked for; none is made."""
    asked: list[float] = []
    monkeypatch.setattr(threading.Event, "wait", lambda self, timeout: asked.append(timeout) or self.is_set())
    return asked


@pytest.mark.parametrize(
    "error", [OSError("reset"), PermissionError("expired"), RuntimeError("botocore's"), TimeoutError()]
)
@pytest.mark.parametrize("failures", [0, 1, remote.TRIES - 1])
def test_what_fails_is_tried_again_after_growing_pauses(
    pauses: list[float], failures: int, error: Exception
) -> None:
    action = Failing(failures, error)
    assert retry(action, "s3://x") == "done"
    assert action.calls == failures + 1
    assert pauses == [0.5, 1, 2, 4][:failures]


def test_what_keeps_failing_is_named_with_its_cause(pauses: list[float]) -> None:
    action, error = (
        Failing(100, RuntimeError("no route")),
        "s3://x could not be reached in 5 tries (RuntimeError: no route); check the store",
    )
    with pytest.raises(
        OSError, match="s3://x could not be reached in 5 tries .RuntimeError: no route.; check the store and"
    ) as e:
        retry(action, "s3://x")
    assert str(e.value).startswith(error)
    assert (action.calls, e.value.__cause__) == (remote.TRIES, action.error)


SIGNED = "http://h/x?sig=s3cr3t"


@pytest.mark.parametrize("error", [RuntimeError(f"no {SIGNED}"), FileNotFoundError(SIGNED)])
def test_no_message_or_log_line_shows_what_a_url_is_signed_with(
    pauses: list[float], caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    with pytest.raises(OSError, match="http://h/x") as e:
        retry(Failing(100, error), SIGNED)
    assert "http://h/x" in caplog.text or isinstance(error, FileNotFoundError)
    assert "s3cr3t" not in "".join(traceback.format_exception(e.value)) + caplog.text


@pytest.mark.parametrize("error", [FileNotFoundError("x"), ValueError("damaged"), Stopped()])
def test_what_waiting_cannot_mend_is_not_tried_again(pauses: list[float], error: Exception) -> None:
    action = Failing(1, error)
    with pytest.raises(type(error)):
        retry(action, "s3://x")
    assert (action.calls, pauses) == (1, [])


def test_a_pause_ends_when_nobody_waits() -> None:
    stopped = threading.Event()
    stopped.set()
    with pytest.raises(Stopped):
        retry(Failing(1, OSError()), "s3://x", stopped)


@pytest.mark.parametrize(
    ("name", "expected"),
    [("/a/b", False), ("b", False), (Path("/a"), False), ("s3://a", True), ("file:///a", True)],
)
def test_urls_are_told_from_paths(name: Any, expected: bool) -> None:
    assert is_remote(name) == expected
