"""Training in real processes: killed, told to stop, several that equal one."""

import fcntl
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from eagle3.training.distributed import init_distributed
from eagle3.training.launch import PREEMPTED_CODE, Preempted, TrainJob, train_in_processes
from eagle3.training.loop import train
from eagle3.training.metrics import read_metrics
from tests.helpers.jobs import make_inputs, make_job

pytestmark = pytest.mark.slow

LONG = {"epochs": 20, "checkpoint_every": 5, "validate_every": 20}
# A process of this one's modules: importing torch and transformers takes a new one ten seconds.
FORK = multiprocessing.get_context("fork")


def start(job: TrainJob) -> subprocess.Popen[bytes]:
    """One training process, as launch.py starts it."""
    out = Path(job.out_dir)
    out.mkdir(parents=True, exist_ok=True)
    (out / "job.json").write_text(job.model_dump_json())
    return subprocess.Popen([sys.executable, "-m", "eagle3.training.run", str(out / "job.json")])


def has_reached(out: Path, step: int) -> bool:
    path = out / "metrics.jsonl"
    return path.exists() and any(m["step"] >= step for m in read_metrics(path))


def weights(out: Path) -> dict[str, torch.Tensor]:
    return load_file(out / "draft.safetensors")


def saved_step(out: Path) -> int:
    with safe_open(out / "checkpoint.safetensors", framework="pt") as f:
        return int(f.metadata()["step"])


def kill_trainer() -> None:
    """Kill the training process that this thread has started."""
    children = Path(f"/proc/{os.getpid()}/task/{threading.get_native_id()}/children").read_text().split()
    for pid in children:
        if b"eagle3.training.run" in Path(f"/proc/{pid}/cmdline").read_bytes():
            os.kill(int(pid), signal.SIGKILL)


def stop_once(out: Path) -> None:
    """Send this process the SIGTERM of a preempted pod, once."""
    if not (out / "told").exists():
        (out / "told").touch()
        os.kill(os.getpid(), signal.SIGTERM)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return make_inputs(tmp_path_factory.mktemp("inputs"))


def test_a_run_killed_and_then_told_to_stop_ends_with_the_same_weights_bit_for_bit(
    inputs: dict[str, Any], tmp_path: Path
) -> None:
    """Against a run in this process without a break."""
    cut, whole = tmp_path / "cut", tmp_path / "whole"
    with pytest.raises(RuntimeError, match="the trainer ended with code -9"):
        train_in_processes(
            make_job(inputs, cut, **LONG), lambda: has_reached(cut, 20) and kill_trainer(), every_s=0.02
        )
    assert not (cut / "draft.safetensors").exists()
    killed_at = saved_step(cut)
    calls = []

    def stop_later() -> None:
        calls.append(1)
        if has_reached(cut, killed_at + 20):
            stop_once(cut)

    only_when_told = make_job(inputs, cut, **LONG | {"checkpoint_every": 100_000})
    with pytest.raises(Preempted, match="run it again to resume"):
        train_in_processes(only_when_told, stop_later, every_s=0.02)
    assert len(calls) > 1
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    assert not (cut / "draft.safetensors").exists()
    assert saved_step(cut) >= killed_at + 20

    train_in_processes(make_job(inputs, cut, **LONG))
    train(make_job(inputs, whole, **LONG))
    expected, found = weights(whole), weights(cut)
    assert all(torch.equal(expected[name], found[name]) for name in expected)
    steps, losses = ([m[key] for m in read_metrics(cut / "metrics.jsonl")] for key in ("step", "loss"))
    assert steps == list(range(1, len(steps) + 1))
    assert losses == [m["loss"] for m in read_metrics(whole / "metrics.jsonl")]


def test_a_trainer_stops_when_its_caller_is_dead(inputs: dict[str, Any], tmp_path: Path) -> None:
    job = make_job(inputs, tmp_path, **LONG | {"epochs": 4000})
    caller = FORK.Process(target=train_in_processes, args=(job,))
    caller.start()
    deadline = time.monotonic() + 120
    while not has_reached(tmp_path, 10):
        assert caller.is_alive()
        assert time.monotonic() < deadline
        time.sleep(0.01)
    caller.kill()
    caller.join()
    deadline = time.monotonic() + 60
    while not (tmp_path / "preempted").exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert (tmp_path / "preempted").exists()
    assert (tmp_path / "checkpoint.safetensors").exists()


def test_a_trainer_that_waits_for_another_can_be_stopped(inputs: dict[str, Any], tmp_path: Path) -> None:
    with open(tmp_path / "trainer.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        process = start(make_job(inputs, tmp_path))
        deadline = time.monotonic() + 120
        while not _catches_sigterm(process.pid):
            assert time.monotonic() < deadline
            time.sleep(0.1)
        process.terminate()
        assert process.wait(60) == PREEMPTED_CODE


def _catches_sigterm(pid: int) -> bool:
    caught = next(
        line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("SigCgt")
    )
    return bool(int(caught.split()[1], 16) >> (signal.SIGTERM - 1) & 1)


def test_bad_data_is_the_callers_value_error(inputs: dict[str, Any], tmp_path: Path) -> None:
    job = make_job(inputs | {"shard_dirs": [str(tmp_path / "nowhere")]}, tmp_path / "run")
    with pytest.raises(ValueError, match=r"manifest.json is missing"):
        train_in_processes(job)


def train_as_two(job: TrainJob) -> None:
    """Two ranks in forks of this process; torchrun itself is in the next test."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]

    def train_as(rank: int) -> None:
        os.environ.update(RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        train(job, init_distributed("cpu"))

    ranks = [FORK.Process(target=train_as, args=(rank,), daemon=True) for rank in range(2)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(120)
    assert [rank.exitcode for rank in ranks] == [0, 0]


@pytest.mark.parametrize("averaging", ["token", "conversation"])
def test_two_processes_equal_one(inputs: dict[str, Any], tmp_path: Path, averaging: str) -> None:
    """Three packs a step: two for one process, one for the other, perhaps none in an epoch's last step."""
    settings = {"packs_per_step": 3, "epochs": 3, "averaging": averaging, "learning_rate": 1e-4}
    train(make_job(inputs, tmp_path / "1", **settings))
    train_as_two(make_job(inputs, tmp_path / "2", **settings))
    one, two = weights(tmp_path / "1"), weights(tmp_path / "2")
    for name, tensor in one.items():
        torch.testing.assert_close(two[name], tensor, rtol=1e-6, atol=1e-6)  # float32 sums in another order
    a, b = (read_metrics(tmp_path / n / "metrics.jsonl") for n in "12")
    assert [m["supervised"] for m in a] == [m["supervised"] for m in b]
    for x, y in zip(a, b, strict=True):
        for name in ("loss", "gradient_norm"):  # AdamW and clipping would hide a wrong scale of the gradients
            assert y[name] == pytest.approx(x[name], rel=1e-5), name
    lengths = [m["validation_acceptance_length"] for m in b if "validation_acceptance_length" in m]
    assert lengths == [m["validation_acceptance_length"] for m in a if "validation_acceptance_length" in m]


def test_two_processes_told_to_stop_save_once_and_resume(inputs: dict[str, Any], tmp_path: Path) -> None:
    settings = LONG | {"processes": 2, "packs_per_step": 2}

    def stop_once_running() -> None:
        if (tmp_path / "metrics.jsonl").exists():
            stop_once(tmp_path)

    with pytest.raises(Preempted):
        train_in_processes(make_job(inputs, tmp_path, **settings), stop_once_running, every_s=0.05)
    train_in_processes(make_job(inputs, tmp_path, **settings))
    steps = [m["step"] for m in read_metrics(tmp_path / "metrics.jsonl")]
    assert steps == list(range(1, len(steps) + 1))
