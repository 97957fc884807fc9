"""A task's end as `pyflyte-execute` writes it down: whether Flyte may try again, and why not."""

import copy
import errno
import inspect
import os
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from botocore.exceptions import EndpointConnectionError
from flyteidl.core import errors_pb2, literals_pb2
from flytekit import dynamic, task
from flytekit.bin.entrypoint import _dispatch_execute, setup_execution
from flytekit.core.context_manager import FlyteContextManager
from flytekit.core.type_engine import TypeEngine
from flytekit.types.directory import FlyteDirectory
from flytekit.types.file import FlyteFile
from s3fs import S3FileSystem

from eagle3.errors import EngineDied
from tests.helpers.flyte_runs import all_tasks
from workflows.flyte.interfaces import DraftVocab
from workflows.flyte.stage import recoverable, stage

STORE_FAULTS = [
    OSError(errno.EBUSY, "Service Unavailable"),
    EndpointConnectionError(endpoint_url="http://store"),
]
FAULTS: dict[str, Exception] = {
    "lost": ConnectionError("the store hung up"),
    "engine": EngineDied("the engine died"),
    "memory": torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 GiB"),
    "kernel": NotImplementedError("no kernel for this GPU"),
    "loop": RecursionError("too deep"),
    "setting": ValueError("lower vocab.size"),
}


@task(retries=3)
@stage
def count_bytes(vocab: DraftVocab) -> int:
    return len(Path(vocab.file.download()).read_bytes())


class Sized(NamedTuple):
    vocab: DraftVocab
    size: int


def write(size: int) -> FlyteFile:
    path = Path("vocab").resolve()
    path.write_bytes(bytes(size))
    return FlyteFile(str(path))


@task(retries=3)
@stage
def write_file(size: int) -> FlyteFile:
    return write(size)


@task(retries=3)
@stage
def write_directory(size: int) -> FlyteDirectory:
    Path("directory").mkdir(exist_ok=True)
    return FlyteDirectory(str(Path(write(size).path).rename("directory/vocab").parent.resolve()))


@task(retries=3)
@stage
def write_two(size: int) -> tuple[DraftVocab, int]:
    return DraftVocab(write(size), size, 1.0, "digest"), size


@task(retries=3)
@recoverable
def write_named(size: int) -> Sized:
    return Sized(DraftVocab(write(size), size, 1.0, "digest"), size)


@task(retries=3)
@stage
def fail(how: str) -> int:
    if how in FAULTS:
        raise FAULTS[how]
    return 0


@dynamic(retries=2)
@recoverable
def choose(how: str) -> int:
    if how in FAULTS:
        raise FAULTS[how]
    return 7


@pytest.fixture
def states(s3: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The bucket, where flytekit finds it too."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FLYTE_AWS_ENDPOINT", os.environ["AWS_ENDPOINT_URL"])
    for name in ("ACCESS_KEY_ID", "SECRET_ACCESS_KEY"):
        monkeypatch.setenv(f"FLYTE_AWS_{name}", os.environ[f"AWS_{name}"])
    return s3


def let_fail(monkeypatch: pytest.MonkeyPatch, operation: str, error: Exception) -> None:
    """Let one operation of the store fail for objects."""
    call = S3FileSystem._call_s3

    async def call_or_fail(fs: S3FileSystem, method: str, *args: Any, **kwargs: Any) -> Any:
        if method == operation:
            raise error
        return await call(fs, method, *args, **kwargs)

    monkeypatch.setattr(S3FileSystem, "_call_s3", call_or_fail)


def execute(
    entity: Any, work: Path, inputs: dict[str, Any]
) -> errors_pb2.ContainerError | literals_pb2.LiteralMap:
    """Run a task as its pod does: inputs and outputs in a directory, files in the store. Returns its error or
    its outputs."""
    context, interface = FlyteContextManager.current_context(), entity.interface.inputs
    literals = {
        name: TypeEngine.to_literal(
            context, value, entity.python_interface.inputs[name], interface[name].type
        ).to_flyte_idl()
        for name, value in inputs.items()
    }
    work.mkdir()
    (work / "inputs.pb").write_bytes(literals_pb2.LiteralMap(literals=literals).SerializeToString())
    out = work / "out"
    with setup_execution("s3://states/ab/attempt", str(out)) as ctx:
        # A @dynamic keeps what it was compiled to, for its process's only run.
        _dispatch_execute(ctx, lambda: copy.copy(entity), str(work / "inputs.pb"), str(out))
    if (out / "error.pb").exists():
        return errors_pb2.ErrorDocument.FromString((out / "error.pb").read_bytes()).error
    return literals_pb2.LiteralMap.FromString((out / "outputs.pb").read_bytes())


def value_of(outputs: Any, name: str = "o0") -> int:
    return int(outputs.literals[name].scalar.primitive.integer)


def failure(entity: Any, work: Path, inputs: dict[str, Any]) -> tuple[bool, str]:
    """Whether the task's error may be tried again, and its words."""
    error = execute(entity, work, inputs)
    assert isinstance(error, errors_pb2.ContainerError)
    return error.kind == errors_pb2.ContainerError.RECOVERABLE, error.message


def vocab_at(url: str) -> dict[str, Any]:
    return {"vocab": DraftVocab(FlyteFile(url), 3, 1.0, "digest")}


@pytest.mark.parametrize("error", STORE_FAULTS, ids=repr)
def test_a_store_that_fails_while_an_input_is_fetched_may_be_asked_again(
    states: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    states.pipe("states/vocab", b"abc")
    with monkeypatch.context() as patch:
        let_fail(patch, "get_object", error)
        is_recoverable, message = failure(count_bytes, tmp_path / "0", vocab_at("s3://states/vocab"))
    assert is_recoverable
    assert "count_bytes: SYSTEM:DownloadDataError" in message
    assert value_of(execute(count_bytes, tmp_path / "1", vocab_at("s3://states/vocab"))) == 3


def test_a_missing_input_fails_at_once(states: Any, tmp_path: Path) -> None:
    is_recoverable, message = failure(count_bytes, tmp_path / "0", vocab_at("s3://states/absent"))
    assert not is_recoverable
    assert "s3://states/absent. File not found" in message


@pytest.mark.parametrize("entity", [write_file, write_directory, write_two, write_named])
@pytest.mark.parametrize("error", STORE_FAULTS, ids=repr)
def test_a_store_that_fails_while_an_output_is_stored_may_be_asked_again(
    states: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, entity: Any
) -> None:
    with monkeypatch.context() as patch:
        let_fail(patch, "put_object", error)
        assert failure(entity, tmp_path / "0", {"size": 5})[0]
    outputs = execute(entity, tmp_path / "1", {"size": 5})
    (path,) = states.find("states/ab/attempt")  # stored once
    assert states.cat(path) == bytes(5)
    place = path if entity is not write_directory else path.removesuffix("/vocab")
    assert f"s3://{place}".encode() in outputs.SerializeToString()


@pytest.mark.parametrize("entity", [fail, choose])
@pytest.mark.parametrize("how", FAULTS)
def test_faults_that_pass_may_be_tried_again_and_others_fail_in_their_own_words(
    states: Any, tmp_path: Path, entity: Any, how: str
) -> None:
    is_recoverable, message = failure(entity, tmp_path / "0", {"how": how})
    assert is_recoverable == (how in ("lost", "engine"))
    assert str(FAULTS[how]) in message
    assert ("lower train.pack_tokens for training" in message) == (how == "memory")


def test_a_dynamic_task_hands_its_result_on(states: Any, tmp_path: Path) -> None:
    assert value_of(execute(choose, tmp_path / "0", {"how": ""})) == 7


def test_memory_that_does_not_suffice_is_named_with_its_remedy_here_too() -> None:
    with pytest.raises(MemoryError, match="fail: CUDA out of memory.*; lower train.pack_tokens"):
        fail.task_function(how="memory")


def test_every_task_marks_the_faults_that_pass() -> None:
    for entity in all_tasks():
        assert inspect.unwrap(entity.task_function) is not entity.task_function, entity.name
