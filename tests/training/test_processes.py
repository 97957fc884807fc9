"""Training in real processes: killed, told to stop, several that equal one."""

import fcntl
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from eagle3.training.launch import PREEMPTED_CODE, Preempted, TrainJob, train_in_processes
from eagle3.training.metrics import read_metrics
from tests.training.jobs import make_inputs, make_job

LONG = {"epochs": 40, "checkpoint_every": 5, "validate_every": 20}


def start(job: TrainJob) -> subprocess.Popen[bytes]:
    """One training process, as launch.py starts it."""
    out = Path(job.out_dir)
    out.mkdir(parents=True, exist_ok=True)
    (out / "job.json").write_text(job.model_dump_json())
    return subprocess.Popen([sys.executable, "-m", "eagle3.training.run", str(out / "job.json")])


def wait_for_step(out: Path, step: int, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and process.poll() is None:
        path = out / "metrics.jsonl"
        if path.exists() and any(m["step"] >= step for m in read_metrics(path)):
            return
        time.sleep(0.01)
    raise AssertionError(f"step {step} was not reached; exit code {process.poll()}")


def weights(out: Path) -> dict[str, torch.Tensor]:
    return load_file(out / "draft.safetensors")


def stop_once_running(out: Path) -> None:
    """Send this process the SIGTERM of a preempted pod, once, when training has begun."""
    if (out / "metrics.jsonl").exists() and not (out / "told").exists():
        (out / "told").touch()
        os.kill(os.getpid(), signal.SIGTERM)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return make_inputs(tmp_path_factory.mktemp("inputs"))


@pytest.fixture(scope="module")
def whole(inputs: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("whole")
    train_in_processes(make_job(inputs, out, **LONG))
    return out


def test_a_killed_run_goes_on_to_the_same_weights_bit_for_bit(inputs: dict[str, Any], whole: Path, tmp_path: Path) -> None:
    job = make_job(inputs, tmp_path, **LONG)
    process = start(job)
    wait_for_step(tmp_path, 30, process)
    process.kill()
    assert process.wait() == -signal.SIGKILL
    assert not (tmp_path / "draft.safetensors").exists()
    train_in_processes(job)
    expected, found = weights(whole), weights(tmp_path)
    assert all(torch.equal(expected[name], found[name]) for name in expected)
    steps, losses = ([m[key] for m in read_metrics(tmp_path / "metrics.jsonl")] for key in ("step", "loss"))
    assert steps == list(range(1, len(steps) + 1))
    assert losses == [m["loss"] for m in read_metrics(whole / "metrics.jsonl")]


def test_a_run_told_to_stop_saves_and_says_so(inputs: dict[str, Any], whole: Path, tmp_path: Path) -> None:
    job = make_job(inputs, tmp_path, **LONG | {"checkpoint_every": 100_000})
    process = start(job)
    wait_for_step(tmp_path, 10, process)
    process.terminate()
    assert process.wait(60) == PREEMPTED_CODE
    assert not (tmp_path / "draft.safetensors").exists()
    train_in_processes(make_job(inputs, tmp_path, **LONG))
    assert all(torch.equal(tensor, weights(tmp_path)[name]) for name, tensor in weights(whole).items())


def test_the_caller_passes_a_stop_on_and_hears_of_it(inputs: dict[str, Any], tmp_path: Path) -> None:
    job = make_job(inputs, tmp_path, **LONG | {"epochs": 4000})
    calls: list[float] = []

    def stop_when_running() -> None:
        calls.append(time.monotonic())
        stop_once_running(tmp_path)

    with pytest.raises(Preempted, match="run it again to go on"):
        train_in_processes(job, stop_when_running, every_s=0.2)
    assert len(calls) > 1
    assert (tmp_path / "checkpoint.safetensors").exists()
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_nobody_trains_for_a_dead_caller(inputs: dict[str, Any], tmp_path: Path) -> None:
    job = make_job(inputs, tmp_path, **LONG | {"epochs": 4000})
    code = "import sys; from eagle3.training.launch import *; train_in_processes(TrainJob.model_validate_json(sys.argv[1]))"
    caller = subprocess.Popen([sys.executable, "-c", code, job.model_dump_json()])
    wait_for_step(tmp_path, 10, caller)
    caller.kill()
    caller.wait()
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
    caught = next(line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("SigCgt"))
    return bool(int(caught.split()[1], 16) >> (signal.SIGTERM - 1) & 1)


def test_bad_data_is_the_callers_value_error(inputs: dict[str, Any], tmp_path: Path) -> None:
    job = make_job(inputs | {"shard_dirs": [str(tmp_path / "nowhere")]}, tmp_path / "run")
    with pytest.raises(ValueError, match=r"manifest.json is missing"):
        train_in_processes(job)


def test_a_dead_trainer_is_a_runtime_error(inputs: dict[str, Any], tmp_path: Path) -> None:
    job = make_job(inputs, tmp_path, **LONG | {"epochs": 4000})

    def kill_child() -> None:
        if (tmp_path / "metrics.jsonl").exists():
            children = Path(f"/proc/{os.getpid()}/task/{threading.get_native_id()}/children").read_text().split()
            for pid in children:
                if b"eagle3.training.run" in Path(f"/proc/{pid}/cmdline").read_bytes():
                    os.kill(int(pid), signal.SIGKILL)

    with pytest.raises(RuntimeError, match="the trainer ended with code -9"):
        train_in_processes(job, kill_child, every_s=0.2)


@pytest.mark.parametrize("averaging", ["token", "conversation"])
def test_two_processes_equal_one(inputs: dict[str, Any], tmp_path: Path, averaging: str) -> None:
    """Three packs a step: two for one process, one for the other, and perhaps none in an epoch's last step."""
    settings = {"packs_per_step": 3, "epochs": 3, "averaging": averaging, "learning_rate": 1e-4}
    for processes in (1, 2):
        train_in_processes(make_job(inputs, tmp_path / str(processes), processes=processes, **settings))
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


def test_two_processes_told_to_stop_save_once_and_go_on(inputs: dict[str, Any], tmp_path: Path) -> None:
    settings = LONG | {"processes": 2, "packs_per_step": 2, "epochs": 30}
    with pytest.raises(Preempted):
        train_in_processes(make_job(inputs, tmp_path, **settings), lambda: stop_once_running(tmp_path), every_s=0.2)
    train_in_processes(make_job(inputs, tmp_path, **settings))
    steps = [m["step"] for m in read_metrics(tmp_path / "metrics.jsonl")]
    assert steps == list(range(1, len(steps) + 1))
