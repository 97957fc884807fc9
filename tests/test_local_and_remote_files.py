"""Files by path or URL: the same behaviour, atomic writes, retries, locks."""

import threading
import traceback
from hashlib import sha256
from pathlib import Path
from typing import Any

import fsspec
import pytest

from eagle3 import files
from eagle3.errors import StoreError
from eagle3.files import (
    Stopped,
    atomic_path,
    copy_file,
    file_sha256,
    file_size,
    files_digest,
    is_remote,
    list_files,
    list_names,
    move_file,
    read_bytes,
    remove_file,
    retry,
    try_lock,
    write_bytes,
)


@pytest.fixture(params=["path", "file", "memory", "s3"])
def root_uri(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """An empty directory, or a URL."""
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


def test_files_are_written_read_measured_moved_and_removed_by_path_and_by_url(
    root_uri: str, tmp_path: Path
) -> None:
    file = f"{root_uri}/a.json"
    assert (read_bytes(file), file_size(file)) == (None, None)
    for data in (b"1234", b"56", b""):
        write_bytes(file, data)
        assert (read_bytes(file), file_size(file)) == (data, len(data))
    for data in (b"a chunk", b"another one"):
        staged = tmp_path / "staged"
        staged.write_bytes(data)
        move_file(staged, f"{root_uri}/chunk")
        assert not staged.exists()
        assert (read_bytes(f"{root_uri}/chunk"), file_size(f"{root_uri}/chunk")) == (data, len(data))
    assert list_names(root_uri) == ["a.json", "chunk"]
    assert list_files(root_uri, "*.json") == [file]
    assert list_names(f"{root_uri}/absent") == []
    copy_file(f"{root_uri}/chunk", tmp_path / "copy")
    assert file_sha256(tmp_path / "copy") == file_sha256(f"{root_uri}/chunk") == sha256(data).hexdigest()
    copy_file(tmp_path / "copy", f"{root_uri}/again")
    assert read_bytes(f"{root_uri}/again") == data
    for _ in range(2):
        remove_file(file)
        assert (read_bytes(file), file_size(file)) == (None, None)


def test_a_size_is_never_cached(root_uri: str) -> None:
    file = f"{root_uri}/a"
    write_bytes(file, b"1")
    assert file_size(file) == 1
    store, path = fsspec.core.url_to_fs(file)
    store.ls(path.rpartition("/")[0])
    if is_remote(root_uri):
        fsspec.filesystem(
            store.protocol if isinstance(store.protocol, str) else store.protocol[0], skip_instance_cache=True
        ).pipe_file(path, b"22")
    else:
        Path(file).write_bytes(b"22")
    assert file_size(file) == 2


def test_a_local_file_that_cannot_be_written_is_named_and_not_changed(
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


def test_a_write_that_fails_leaves_the_old_file_or_directory_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("old")
    for name in ("file", "directory"):
        (tmp_path / f"{name}.part").write_text("of a killed writer")
        with pytest.raises(KeyError), atomic_path(tmp_path / name) as part:  # noqa: PT012
            part.mkdir() if name == "directory" else part.write_text("half")
            raise KeyError
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    assert (tmp_path / "file").read_text() == "old"


def test_a_lock_is_held_by_one_until_it_is_released(tmp_path: Path) -> None:
    lock = try_lock(tmp_path / "lock")
    assert lock is not None
    assert try_lock(tmp_path / "lock") is None
    lock.release()
    again = try_lock(tmp_path / "lock")
    assert again is not None
    again.release()


def test_a_digest_of_files_depends_on_contents_in_order(tmp_path: Path) -> None:
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
    """The pauses, recorded instead of made."""
    asked: list[float] = []
    monkeypatch.setattr(threading.Event, "wait", lambda self, timeout: asked.append(timeout) or self.is_set())
    return asked


@pytest.mark.parametrize(
    "error", [OSError("reset"), PermissionError("expired"), RuntimeError("botocore's"), TimeoutError()]
)
@pytest.mark.parametrize("failures", [0, 1, files.TRIES - 1])
def test_an_action_that_fails_is_repeated_after_growing_pauses(
    pauses: list[float], failures: int, error: Exception
) -> None:
    action = Failing(failures, error)
    assert retry(action, "s3://x") == "done"
    assert action.calls == failures + 1
    assert pauses == [0.5, 1, 2, 4][:failures]


def test_an_action_that_keeps_failing_is_a_store_error_with_its_cause(pauses: list[float]) -> None:
    action = Failing(100, RuntimeError("no route"))
    message = r"^s3://x could not be reached in 5 tries \(RuntimeError: no route\); check the store and"
    with pytest.raises(StoreError, match=message) as e:
        retry(action, "s3://x")
    assert (action.calls, e.value.__cause__) == (files.TRIES, action.error)


SIGNED = "http://h/x?sig=s3cr3t"


@pytest.mark.parametrize("error", [RuntimeError(f"no {SIGNED}"), FileNotFoundError(SIGNED)])
def test_no_message_or_log_line_contains_the_signature_of_a_url(
    pauses: list[float], caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    with pytest.raises(OSError, match="http://h/x") as e:
        retry(Failing(100, error), SIGNED)
    assert "http://h/x" in caplog.text or isinstance(error, FileNotFoundError)
    assert "s3cr3t" not in "".join(traceback.format_exception(e.value)) + caplog.text


@pytest.mark.parametrize("error", [FileNotFoundError("x"), ValueError("damaged"), Stopped()])
def test_missing_and_wrong_files_are_not_tried_again(pauses: list[float], error: Exception) -> None:
    action = Failing(1, error)
    with pytest.raises(type(error)):
        retry(action, "s3://x")
    assert (action.calls, pauses) == (1, [])


def test_a_pause_ends_when_the_caller_stops() -> None:
    stopped = threading.Event()
    stopped.set()
    with pytest.raises(Stopped):
        retry(Failing(1, OSError()), "s3://x", stopped)


@pytest.mark.parametrize(
    ("name", "expected"),
    [("/a/b", False), ("b", False), (Path("/a"), False), ("s3://a", True), ("file:///a", True)],
)
def test_urls_are_remote_and_paths_are_not(name: Any, expected: bool) -> None:
    assert is_remote(name) == expected
