"""Runs the container command of a task as a pod does: its own process group, an empty directory, the storage's address."""

import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
from flyteidl.core import tasks_pb2

from tests.flyte_stand_in import pod_host

# Images start in this directory and keep the code there; here it is the pod's own directory.
IMAGE_DIRECTORY = "/root"


@dataclass(frozen=True)
class Attempt:
    """One attempt of a task, with the values for its container command.

    node: unique in the execution. number: from 0. The rest are URIs in the storage; previous_checkpoint is "" in a
    first attempt.
    """

    execution: str
    node: str
    task: tasks_pb2.TaskTemplate
    number: int
    inputs: str
    outputs: str
    raw_outputs: str
    checkpoint: str
    previous_checkpoint: str

    def command(self) -> list[str]:
        """The container's command line with Flyte's templates filled in."""
        values = {
            "input": self.inputs,
            "outputPrefix": self.outputs,
            "rawOutputDataPrefix": self.raw_outputs,
            "checkpointOutputPrefix": self.checkpoint,
            "prevCheckpointPrefix": self.previous_checkpoint or '""',
        }
        template = [*self.task.container.command, *self.task.container.args]
        words = [re.sub(r"\{\{\s*\.(\w+)\s*\}\}", lambda match: values[match[1]], word) for word in template]
        return ["." if word == IMAGE_DIRECTORY else word for word in words]

    def environment(self) -> dict[str, str]:
        """The container's environment, as Flyte and the task set it."""
        identity = {"PROJECT": self.task.id.project, "DOMAIN": self.task.id.domain}
        found = {pair.key: pair.value for pair in self.task.container.env}
        found |= {f"FLYTE_INTERNAL_EXECUTION_{name}": value for name, value in identity.items()}
        found |= {"FLYTE_INTERNAL_EXECUTION_ID": self.execution, "FLYTE_ATTEMPT_NUMBER": str(self.number)}
        identity |= {"NAME": self.task.id.name, "VERSION": self.task.id.version}
        found |= {f"FLYTE_INTERNAL_TASK_{name}": value for name, value in identity.items()}
        return found


class Pod:
    """A running attempt.

    task: name of the task's function. directory: its working directory, empty when it started.
    """

    def __init__(self, attempt: Attempt, directory: Path, environment: dict[str, str]) -> None:
        self.attempt, self.directory = attempt, directory
        self.task = task_name(attempt.task)
        self.log_path = directory.with_suffix(".log")
        environment = environment | {"HOME": str(directory), "TMPDIR": str(directory)} | attempt.environment()
        with open(self.log_path, "wb") as log:
            self.process = subprocess.Popen(
                attempt.command(), cwd=directory, env=environment, stdout=log, stderr=log, process_group=0
            )

    def is_running(self) -> bool:
        return self.process.poll() is None

    def processes(self, text: str) -> list[int]:
        """Those of its processes whose command line contains `text`."""
        return [p.pid for p in psutil.process_iter() if text in _command_line(p) and self._is_mine(p)]

    def _is_mine(self, process: psutil.Process) -> bool:
        """Whether it or one of its parents is in the pod's process group: an engine leads a group of its own."""
        with suppress(psutil.NoSuchProcess, ProcessLookupError):
            family = [process, *process.parents()]
            return any(os.getpgid(member.pid) == self.process.pid for member in family)
        return False

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Send a signal to all its processes, those that lead groups of their own included."""
        for pid in self.processes(""):
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def wait(self) -> int:
        """Exit code, negative after a signal. All processes that the command started are killed."""
        code = self.process.wait()
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        return code

    def log(self) -> str:
        return self.log_path.read_text(errors="replace")


class PodHost:
    """Runs at most `at_once` pods at the same time.

    running: the pods that run. logs: the output of each attempt, by execution, node and attempt number. on_start:
    called with each pod after its start.
    """

    def __init__(self, work: Path, environment: dict[str, str], at_once: int = 2) -> None:
        self.work, self.running = work, list[Pod]()
        self.on_start: Callable[[Pod], None] = lambda pod: None
        self.logs: dict[tuple[str, str, int], str] = {}
        self._slots = threading.Semaphore(at_once)
        address = str(work / "host.sock")
        pod_host.write_commands(work / "bin", address)
        inherited = {name: os.environ[name] for name in ("LANG", "LD_LIBRARY_PATH") if name in os.environ}
        path = os.pathsep.join([str(work / "bin"), str(Path(sys.executable).parent), os.environ["PATH"]])
        self.environment = (
            inherited
            | {"PATH": path, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
            | environment
        )
        command = [sys.executable, "-I", pod_host.__file__, address]
        self._host = subprocess.Popen(
            command,
            cwd=work,
            env=self.environment | {"HOME": str(work)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self._host.stdout is not None
        assert self._host.stdout.readline() == b"ready\n"

    def run(self, attempt: Attempt) -> int:
        """Run an attempt to its end; returns the exit code, negative after a signal."""
        with (
            self._slots,
            tempfile.TemporaryDirectory(
                prefix="pod-", dir=self.work, ignore_cleanup_errors=True
            ) as directory,
        ):
            pod = Pod(attempt, Path(directory), self.environment)
            self.running.append(pod)
            try:
                self.on_start(pod)
                return pod.wait()
            finally:
                self.running.remove(pod)
                self.logs[attempt.execution, attempt.node, attempt.number] = pod.log()

    def close(self) -> None:
        for pod in list(self.running):
            pod.kill()
        self._host.communicate()


def _command_line(process: psutil.Process) -> str:
    with suppress(psutil.Error):
        return " ".join(process.cmdline())
    return ""


def task_name(template: tasks_pb2.TaskTemplate) -> str:
    """The name of the task's function."""
    return str(template.id.name.rsplit(".", 1)[-1])
