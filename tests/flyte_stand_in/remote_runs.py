"""Runs of the chain on the stand-in cluster: starting them, reading what they did, and injecting faults."""

import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgpack
import yaml
from click.testing import CliRunner, Result
from flyteidl.core.literals_pb2 import Literal, LiteralMap
from flytekit.clis.sdk_in_container.pyflyte import main

from tests.flyte_stand_in.control_plane import ControlPlane
from tests.flyte_stand_in.pods import Pod
from tests.flyte_stand_in.propeller import Entry
from tests.helpers.flyte_runs import ROOT, write_prompts, write_recipe
from workflows.flyte.recipe import Recipe

# One row a step, so that training has enough steps to be killed between two; several chunks a shard.
SETTINGS: dict[str, dict[str, Any]] = {
    "train": {"pack_tokens": 32, "epochs": 8, "checkpoint_every": 1, "validation_rows": 0},
    "extract": {"encoding": "fp32", "chunk_bytes": 30_000},
}


@dataclass(frozen=True)
class Run:
    """One execution: pyflyte's result, its lines of the journal, the keys that were stored."""

    result: Result
    entries: list[Entry]
    puts: list[str]
    plane: ControlPlane

    def tasks(self, state: str) -> Counter[str]:
        """How many lines of this state each task has."""
        return Counter(entry.task for entry in self.entries if entry.state == state)

    def states_of(self, task: str) -> list[list[str]]:
        """The states of each node of a task, in order."""
        nodes = dict.fromkeys(entry.node for entry in self.entries if entry.task == task)
        return [[entry.state for entry in self.entries if entry.node == node] for node in nodes]

    def log(self, node: str, attempt: int) -> str:
        """The log of an attempt."""
        return self.plane.pods.logs[self.entries[0].execution, node, attempt]

    def metadata_of(self, task: str) -> str:
        """Key prefix of the metadata of a task's only node."""
        (found,) = {(entry.execution, entry.node) for entry in self.entries if entry.task == task}
        return "metadata/{}/{}/data".format(*found)

    def output(self, task: str, name: str = "o0") -> dict[str, Any]:
        """The dataclass that a task's only node returned, or of several outputs the one with this name."""
        attempt = sum(entry.task == task and entry.state.startswith("ATTEMPT") for entry in self.entries)
        outputs = self.plane.store.read_message(f"{self.metadata_of(task)}/{attempt}/outputs.pb", LiteralMap)
        assert outputs is not None
        return as_dict(outputs.literals[name])

    def result_literal(self) -> Literal:
        """The output of the workflow."""
        return self.plane.admin.data[self.entries[0].execution][1]["o0"]


def as_dict(dataclass_literal: Literal) -> dict[str, Any]:
    """The fields of a dataclass literal."""
    fields: dict[str, Any] = msgpack.loads(dataclass_literal.scalar.binary.value)
    return fields


class Cluster:
    """Starts runs on the stand-in."""

    def __init__(self, plane: ControlPlane, workplace: Path, target: Path) -> None:
        self.plane, self.workplace, self.target = plane, workplace, target

    def prompts(self, num_prompts: int = 8) -> Path:
        return write_prompts(self.workplace / f"prompts{num_prompts}.jsonl", 0, num_prompts)

    def recipe(self, num_prompts: int = 8, **blocks: dict[str, Any]) -> Path:
        merged = {name: SETTINGS.get(name, {}) | blocks.get(name, {}) for name in SETTINGS.keys() | blocks}
        return write_recipe(self.workplace / "recipe.yaml", self.target, self.prompts(num_prompts), **merged)

    def run(self, num_prompts: int = 8, **blocks: dict[str, Any]) -> Run:
        """Run the whole chain."""
        return self.run_workflow("train_eagle3", self.recipe(num_prompts, **blocks))

    def recipe_value(self) -> Recipe:
        """The recipe as the input of a workflow."""
        return Recipe.model_validate(yaml.safe_load(self.recipe().read_text()))

    def forget(self, *tasks: str) -> None:
        """Remove these tasks' outputs from the cache."""
        cache = self.plane.propeller.cache
        for key in [key for key in cache if key[0].rsplit(".", 1)[-1] in tasks]:
            del cache[key]

    def run_workflow(
        self,
        workflow: str,
        recipe: Path,
        *more: str,
        file: str = "train_eagle3.py",
        options: Sequence[str] = (),
    ) -> Run:
        """`pyflyte run --remote` a workflow on a recipe and more inputs. options: of `pyflyte run` itself."""
        return self.pyflyte_run(
            str(ROOT / "workflows" / file), workflow, "--recipe", str(recipe), *more, options=options
        )

    def pyflyte_run(self, *what: str, options: Sequence[str] = ()) -> Run:
        """`pyflyte run --remote` anything, and wait for its end."""
        before, puts = len(self.plane.journal), len(self.plane.store.puts)
        how = ["--remote", "--copy", "all", "--wait", "--poll-interval", "1", *options]
        result = CliRunner().invoke(main, ["run", *how, *what])
        return Run(result, self.plane.journal[before:], self.plane.store.puts[puts:], self.plane)


def succeeded(run: Run) -> Run:
    assert run.result.exit_code == 0, (run.result.output, run.result.exception)
    assert "has succeeded" in run.result.output, [e for e in run.entries if e.detail]
    return run


class Accidents:
    """Faults in the first attempts of extraction and training.

    One shard's pod is killed after its first chunk is stored. The other shard's engine is killed as it starts. The
    training pod is killed after it has saved a checkpoint and published its curves; its trainer is stopped until then.
    """

    def __init__(self, plane: ControlPlane) -> None:
        self.plane = plane
        self.node_to_kill = ""
        self.is_saved = False
        self.choosing = threading.Lock()

    def on_start(self, pod: Pod) -> None:
        if pod.attempt.number > 0:
            return
        if pod.task == "train_draft":
            threading.Thread(target=hold_trainer, args=(pod,)).start()
        if pod.task == "extract_shard":
            with self.choosing:
                self.node_to_kill = self.node_to_kill or pod.attempt.node
            if pod.attempt.node != self.node_to_kill:
                threading.Thread(target=kill_engine, args=(pod,)).start()

    def on_put(self, key: str) -> None:
        for pod in [pod for pod in self.plane.pods.running if pod.attempt.number == 0]:
            place, _, name = key.rpartition("/")
            if pod.attempt.node == self.node_to_kill and name == "chunk-00000.json" and place in pod.log():
                pod.kill()
            if pod.task == "train_draft":
                self.is_saved |= name == "checkpoint.safetensors"
                if self.is_saved and name == "deck.html":
                    pod.kill()


def kill_engine(pod: Pod) -> None:
    """Kill the engine's process alone: the child of a fork server that leads a process group of its own."""
    found: list[int] = []
    while pod.is_running() and not found:
        time.sleep(0.02)
        with suppress(ProcessLookupError):
            found = [pid for pid in pod.processes("multiprocessing.forkserver") if os.getpgid(pid) == pid]
    for pid in found:
        os.kill(pid, signal.SIGKILL)


def hold_trainer(pod: Pod) -> None:
    """Stop the trainer after its first checkpoint; the task that started it continues and saves the checkpoint."""
    found: list[int] = []
    while pod.is_running() and not (found := pod.processes("eagle3.training.run")):
        time.sleep(0.02)
    while pod.is_running() and not any(pod.directory.rglob("checkpoint.safetensors")):
        time.sleep(0.002)
    for pid in found:
        os.kill(pid, signal.SIGSTOP)
