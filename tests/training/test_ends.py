"""How a trainer's end reaches its caller: a permanent error as ValueError, a transient one as RankDied."""

import logging
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from eagle3.errors import RankDied
from eagle3.training import launch, run
from eagle3.training.distributed import DistContext
from eagle3.training.launch import PREEMPTED_CODE, REFUSED_CODE, Preempted
from tests.helpers.jobs import make_job

INPUTS: dict[str, Any] = {
    "shard_dirs": ["states"],
    "vocab_path": "vocab",
    "target_dir": "target",
    "layer_ids": [1, 2, 3],
}
OUT_OF_MEMORY = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 GiB")


@pytest.fixture(autouse=True)
def _handlers() -> Iterator[None]:
    """A trainer takes over the signals of its process, here this one."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def end(monkeypatch: pytest.MonkeyPatch, out: Path, error: BaseException | None, rank: int = 0) -> int:
    """The exit code of a rank whose training ends with this error."""

    def train(*_: Any) -> None:
        if error:
            raise error

    out.mkdir(exist_ok=True)
    (out / "job.json").write_text(make_job(INPUTS, out).model_dump_json())
    with monkeypatch.context() as patch:
        patch.setattr(run, "train", train)
        patch.setenv("RANK", str(rank))
        return run.main(str(out / "job.json"))


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ValueError("raise train.disk_budget_bytes"), "raise train.disk_budget_bytes"),
        (FloatingPointError("the loss is not finite"), "the loss is not finite"),
        (
            OUT_OF_MEMORY,
            "OutOfMemoryError: CUDA out of memory. .*; lower train.pack_tokens, or ask for more memory",
        ),
        (RuntimeError("shapes cannot be multiplied"), "RuntimeError: shapes cannot be multiplied"),
        (NotImplementedError("no kernel"), "NotImplementedError: no kernel"),
        (RecursionError("too deep"), "RecursionError: too deep"),
        (KeyError("fc.weight"), "KeyError: 'fc.weight'"),
    ],
    ids=repr,
)
def test_a_permanent_error_is_the_callers_value_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, error: Exception, said: str
) -> None:
    code = end(monkeypatch, tmp_path, error)
    assert code == REFUSED_CODE
    with pytest.raises(ValueError, match=f"^{said}"):
        launch.raise_failure(code, set(), tmp_path)


@pytest.mark.parametrize(
    "error",
    [
        OSError(28, "No space left on device"),
        ConnectionError("the store hung up"),
        dist.DistBackendError("NCCL error: remote process exited"),
        torch.AcceleratorError("CUDA error: uncorrectable ECC error encountered"),
    ],
    ids=repr,
)
def test_a_transient_error_reaches_the_caller_as_a_dead_rank_with_its_message(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, error: Exception
) -> None:
    code = end(monkeypatch, tmp_path, error)
    assert code == 1
    with pytest.raises(RankDied, match=rf"the trainer ended with code 1: .*{error.args[-1]}; run again"):
        launch.raise_failure(code, set(), tmp_path)


def test_a_killed_trainer_may_run_again(tmp_path: Path) -> None:
    with pytest.raises(
        RankDied, match="the trainer ended with code -9: see its own message above; run again"
    ):
        launch.raise_failure(-9, set(), tmp_path)


def test_the_rank_that_is_out_of_memory_is_reported_and_not_those_that_lost_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """torchrun stops the others, one of them in the middle of a collective."""
    assert end(monkeypatch, tmp_path, Preempted("told to stop")) == PREEMPTED_CODE
    assert end(monkeypatch, tmp_path, OUT_OF_MEMORY, rank=1) == REFUSED_CODE
    assert end(monkeypatch, tmp_path, RankDied("connection closed by peer"), rank=2) == 1
    with pytest.raises(ValueError, match="^OutOfMemoryError: CUDA out of memory"):
        launch.raise_failure(1, set(), tmp_path)
    with pytest.raises(Preempted):
        launch.raise_failure(1, {signal.SIGTERM}, tmp_path)


def test_a_lost_rank_ends_an_exchange_with_rank_died(monkeypatch: pytest.MonkeyPatch) -> None:
    def all_reduce(_: torch.Tensor) -> None:
        raise RuntimeError("Connection closed by peer")

    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    with pytest.raises(
        RankDied, match="another process of this training was lost .Connection closed by peer"
    ):
        DistContext(0, 2, torch.device("cpu")).any_rank(True)


def test_a_refusal_counts_though_its_message_could_not_be_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write = Path.write_text

    def full(path: Path, text: str) -> int:
        if path.name.startswith("refused"):
            raise OSError(28, "No space left on device")
        return write(path, text)

    with caplog.at_level(logging.ERROR), monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", full)
        code = end(patch, tmp_path, ValueError("wrong"))
    assert "ValueError: wrong" in caplog.text
    with pytest.raises(ValueError, match="the trainer's own message above"):
        launch.raise_failure(code, set(), tmp_path)


def test_a_finished_training_is_no_failure(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    code = end(monkeypatch, tmp_path, None)
    assert code == 0
    launch.raise_failure(code, set(), tmp_path)
