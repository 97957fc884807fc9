"""Real pyflyte processes on one store: interrupted in every long stage, and two at once."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.flyte_runs import ROOT, write_prompts, write_recipe

pytestmark = pytest.mark.slow
PYFLYTE = [sys.executable, "-c", "from flytekit.clis.sdk_in_container.pyflyte import main; main()"]
# From the signal until nothing runs any more; a training step or a chunk on its way is a fraction of a second
# here.
STOPPED_WITHIN_S = 15.0


class Work:
    """Runs of one target and one set of prompts, each a process."""

    def __init__(self, path: Path, target: Path, num_prompts: int) -> None:
        self.path, self.target = path, target
        self.prompts = write_prompts(path / "prompts.jsonl", 1000, 1000 + num_prompts)
        self.store = path / "store"
        self.started: list[subprocess.Popen[bytes]] = []

    def start(self, workflow: str, name: str = "run", **blocks: Any) -> subprocess.Popen[bytes]:
        recipe = write_recipe(self.path / f"{name}.yaml", self.target, self.prompts, **blocks)
        command = [
            *PYFLYTE,
            "run",
            str(ROOT / "workflows/train_eagle3.py"),
            workflow,
            "--recipe",
            str(recipe),
        ]
        env = os.environ | {"HOME": str(self.path), "EAGLE3_STORE": str(self.store), "OMP_NUM_THREADS": "1"}
        with open(self.log(name), "ab") as log:
            # A session of its own: the signal is to reach pyflyte alone, as a supervisor's does.
            made = subprocess.Popen(
                command, cwd=self.path, env=env, stdout=log, stderr=log, start_new_session=True
            )
        self.started.append(made)
        return made

    def log(self, name: str = "run") -> Path:
        return self.path / f"{name}.log"


@pytest.fixture
def work(tmp_path: Path, tiny_target: Path) -> Iterator[Callable[[int], Work]]:
    made: list[Work] = []

    def make(num_prompts: int) -> Work:
        made.append(Work(tmp_path, tiny_target, num_prompts))
        return made[-1]

    yield make
    for process in (p for w in made for p in w.started):
        for pid in [*descendants(process.pid), process.pid] if process.poll() is None else []:
            os.kill(pid, signal.SIGKILL)
        process.wait()


def descendants(pid: int) -> list[int]:
    """All processes that the process started, and those that they did."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
        except OSError:  # gone meanwhile
            continue
    found, level = [], [pid]
    while level := [child for child, parent in parents.items() if parent in level]:
        found += level
    return found


def runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_for(
    found: Callable[[], Any], seconds: float, what: str, process: subprocess.Popen[bytes] | None = None
) -> Any:
    end = time.monotonic() + seconds
    while not (value := found()):
        assert process is None or process.poll() is None, f"ended before {what}"
        assert time.monotonic() < end, what
        time.sleep(0.01)
    return value


def interrupt_when(process: subprocess.Popen[bytes], found: Callable[[], Any], what: str) -> float:
    """Send SIGINT to the one process once something is there; returns the seconds until it and all it started
    were gone."""
    wait_for(found, 120, what, process)
    children = descendants(process.pid)
    assert children, f"nothing else was running at {what}"
    began = time.monotonic()
    process.send_signal(signal.SIGINT)
    assert process.wait(60) != 0
    wait_for(lambda: not any(map(runs, children)), 60, f"children outlived {what}")
    return time.monotonic() - began


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks for processes in /proc")
def test_ctrl_c_stops_everything_within_seconds_and_the_next_run_goes_on(work: Any) -> None:
    here = work(60)
    settings = {
        "engine": {"max_num_seqs": 2},
        "data": {"rows_per_shard": 30},
        "extract": {"chunk_bytes": 30_000},
        "train": {"epochs": 20, "checkpoint_every": 1, "keep": "last", "validation_rows": 0},
    }

    def run() -> subprocess.Popen[bytes]:
        process: subprocess.Popen[bytes] = here.start("until_train", **settings)
        return process

    def answers() -> list[str]:
        return [
            line
            for log in here.store.glob("regenerate_responses-*/answers-*.jsonl")
            for line in log.read_text().splitlines()
        ]

    def chunks() -> dict[str, int]:
        entries = here.store.glob("extract_hidden_states-*/chunk-*.json")
        return {
            p.name: p.stat().st_mtime_ns for e in entries for p in e.parent.glob(f"{e.stem}-*.safetensors")
        }

    def checkpoint() -> list[Path]:
        return list(here.store.glob("train_draft-*.unfinished/checkpoint.safetensors"))

    assert interrupt_when(run(), answers, "an answer") < STOPPED_WITHIN_S
    first_answers = answers()
    assert 0 < len(first_answers) < 60

    assert interrupt_when(run(), chunks, "a chunk") < STOPPED_WITHIN_S
    assert len(answers()) == 60  # none was asked for twice
    assert set(answers()) > set(first_answers)
    first_chunks = chunks()

    assert interrupt_when(run(), checkpoint, "a checkpoint") < STOPPED_WITHIN_S
    now = {
        p.name: p.stat().st_mtime_ns for p in here.store.glob("extract_hidden_states-*/chunk-*.safetensors")
    }
    assert first_chunks.items() < now.items()  # not written again

    last = run()
    assert last.wait(180) == 0, here.log().read_text()[-3000:]
    assert not checkpoint()
    (metrics,) = here.store.glob("train_draft-*/metrics.jsonl")
    steps = [json.loads(line)["step"] for line in metrics.read_text().splitlines()]
    assert steps == list(range(1, len(steps) + 1))
    resumed = [
        (int(m[1]), int(m[2])) for m in re.finditer(r"(\d+) of (\d+) steps done", here.log().read_text())
    ]
    assert len(resumed) == 2
    assert resumed[0][0] == 0 < resumed[1][0] < resumed[1][1]


def test_two_runs_at_once_do_not_disturb_each_other(work: Any) -> None:
    here, rates = work(8), {"fast": 2e-3, "slow": 1e-3}
    # One name: both write runs/tiny.
    both = {
        name: here.start("train_eagle3", name, train={"learning_rate": rate}) for name, rate in rates.items()
    }
    for name, process in both.items():
        assert process.wait(300) == 0, here.log(name).read_text()[-3000:]
    summary = json.loads((here.path / "runs/tiny/summary.json").read_text())
    for name in rates:
        text = here.log(name).read_text()
        mine = re.findall(r"^draft +(/\S+)$", text, re.MULTILINE)
        assert len(mine) == 1
        assert Path(mine[0], "model.safetensors").exists()
        assert summary["stages"]
        # Each counts what it did itself, the other's work is not in its journal.
        assert [line.split()[2:] for line in text.splitlines() if line.startswith("train_draft ")] == [
            ["made", "1"]
        ]
    assert len(list(here.store.glob("export_draft-*"))) == 2
    assert not list(here.store.glob("*.unfinished"))
    assert not list((here.path / "runs/tiny").glob("*.part"))
    # What both have done is in the cache for a third.
    for name, rate in rates.items():
        third = here.start("train_eagle3", f"again-{name}", train={"learning_rate": rate})
        assert third.wait(120) == 0
        text = here.log(f"again-{name}").read_text()
        table = re.findall(
            r"^(regenerate_responses|extract_hidden_states|train_draft|evaluate_draft) +[\d.]+ +(.*)$",
            text,
            re.MULTILINE,
        )
        assert len(table) == 4
        assert all(done.startswith("cached") for _, done in table)
