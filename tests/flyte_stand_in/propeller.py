"""Runs a compiled workflow as Flyte's Propeller does: binds inputs, looks into the cache, starts pods and retries them.

It handles what this project compiles to: nodes that run a task, and the nodes of `@dynamic` tasks. Retries follow
Propeller's rules: a recoverable error is retried as often as the task or its node asks; a killed pod is retried up
to SYSTEM_RETRIES times, counted separately; nothing new starts after a failed node. An execution that overwrites
the cache reads nothing from it and writes to it. README.md lists what differs from Flyte.
"""

import hashlib
import itertools
from collections import Counter
from concurrent import futures
from dataclasses import dataclass, field

from flyteidl.core import (
    dynamic_job_pb2,
    errors_pb2,
    execution_pb2,
    identifier_pb2,
    literals_pb2,
    tasks_pb2,
    workflow_pb2,
)

from tests.flyte_stand_in.bindings import Literals, bind_all, cache_key, upstream
from tests.flyte_stand_in.object_store import BUCKET, ObjectStore
from tests.flyte_stand_in.pods import Attempt, PodHost, task_name

SYSTEM_RETRIES = 3  # node-config.max-node-retries-system-failures
NODES_AT_ONCE = 8
Key = tuple[str, str, str, str]
SYSTEM, USER = execution_pb2.ExecutionError.SYSTEM, execution_pb2.ExecutionError.USER


class NodeFailed(Exception):
    """A node failed for good, with the message of its task."""


@dataclass(frozen=True)
class Entry:
    """One line of the journal.

    state: OK, CACHE_HIT, ATTEMPT_<n> for a failed attempt, FAILED after the last. resources: what the pod asks for.
    pod_template: name of the PodTemplate that the task names, "" for none. retries: recoverable errors that are tried again.
    detail: error code and message.
    """

    execution: str
    node: str
    task: str
    state: str
    resources: dict[str, str] = field(default_factory=dict)
    pod_template: str = ""
    retries: int = 0
    detail: str = ""


@dataclass(frozen=True)
class TaskRun:
    """One task in one node of one execution, with the overrides of the node."""

    execution: str
    node: str
    task: tasks_pb2.TaskTemplate
    inputs: Literals
    resources: dict[str, str]
    retries: int


class Propeller:
    """Runs workflows, one call an execution. journal: events in order. cache: outputs by task, version and inputs."""

    def __init__(self, store: ObjectStore, pods: PodHost) -> None:
        self.store, self.pods = store, pods
        self.journal: list[Entry] = []
        self.cache: dict[tuple[str, str, str], Literals] = {}
        self._overwriting: set[str] = set()

    def run_workflow(
        self,
        execution: str,
        workflow: workflow_pb2.WorkflowTemplate,
        tasks: dict[Key, tasks_pb2.TaskTemplate],
        inputs: Literals,
        overwrite_cache: bool,
    ) -> Literals:
        """Run to the end; returns the outputs.

        Args:
            overwrite_cache: ignore cached outputs, and write new ones.

        Raises:
            NodeFailed: with the message of the first task that failed for good.
        """
        if overwrite_cache:
            self._overwriting.add(execution)
        return self._run_graph(execution, "", list(workflow.nodes), list(workflow.outputs), tasks, inputs)

    def _run_graph(
        self,
        execution: str,
        prefix: str,
        nodes: list[workflow_pb2.Node],
        outputs: list[literals_pb2.Binding],
        tasks: dict[Key, tasks_pb2.TaskTemplate],
        inputs: Literals,
    ) -> Literals:
        made: dict[str, Literals] = {"": inputs}
        waiting = {node.id: node for node in nodes if node.id not in ("start-node", "end-node")}
        known = set(waiting)
        with futures.ThreadPoolExecutor(NODES_AT_ONCE) as pool:
            running: dict[futures.Future[Literals], str] = {}
            while waiting or running:
                for node in [n for n in waiting.values() if upstream(n) & known <= made.keys()]:
                    del waiting[node.id]
                    bound = bind_all(node.inputs, made)
                    running[pool.submit(self._run_node, execution, prefix + node.id, node, tasks, bound)] = (
                        node.id
                    )
                assert running, f"nodes wait for each other: {list(waiting)}"
                done, _ = futures.wait(running, return_when=futures.FIRST_COMPLETED)
                for future in done:
                    made[running.pop(future)] = future.result()
        return bind_all(outputs, made)

    def _run_node(
        self,
        execution: str,
        name: str,
        node: workflow_pb2.Node,
        tasks: dict[Key, tasks_pb2.TaskTemplate],
        inputs: Literals,
    ) -> Literals:
        kind = node.WhichOneof("target")
        if kind == "task_node":
            return self._run_task(task_run(execution, name, node, tasks, inputs), tasks)
        raise NotImplementedError(f"{name} is a {kind}")

    def _run_task(self, run: TaskRun, tasks: dict[Key, tasks_pb2.TaskTemplate]) -> Literals:
        key = cache_key(run.task, run.inputs)
        if key and key in self.cache and run.execution not in self._overwriting:
            self._note(run, "CACHE_HIT")
            return self.cache[key]
        try:
            outputs, futures_made = self._try_until_done(run)
            if futures_made:
                more = tasks | {key_of(task.id): task for task in futures_made.tasks}
                nodes, bindings = list(futures_made.nodes), list(futures_made.outputs)
                outputs = self._run_graph(run.execution, f"{run.node}-", nodes, bindings, more, run.inputs)
        except NodeFailed as e:
            self._note(run, "FAILED", str(e))
            raise
        self._note(run, "OK")
        if key:
            self.cache[key] = outputs
        return outputs

    def _try_until_done(self, run: TaskRun) -> tuple[Literals, dynamic_job_pb2.DynamicJobSpec | None]:
        """Start pods until one succeeds; returns its outputs, or the nodes that a dynamic task made."""
        metadata = f"metadata/{run.execution}/{run.node}/data"
        self.store.write_message(f"{metadata}/inputs.pb", literals_pb2.LiteralMap(literals=run.inputs))
        failures: Counter[int] = Counter()
        previous_checkpoint = ""
        for number in itertools.count():
            attempt = make_attempt(run, number, metadata, previous_checkpoint)
            code = self.pods.run(attempt)
            error = self._error_of(attempt, code)
            if error is None:
                outputs = self.store.read_message(f"{metadata}/{number}/outputs.pb", literals_pb2.LiteralMap)
                made = self.store.read_message(
                    f"{metadata}/{number}/futures.pb", dynamic_job_pb2.DynamicJobSpec
                )
                return (dict(outputs.literals) if outputs else {}), made
            self._note(run, f"ATTEMPT_{number}", f"{error.code}: {error.message}")
            previous_checkpoint = attempt.checkpoint
            failures[error.origin] += 1
            allowed = SYSTEM_RETRIES if error.origin == SYSTEM else run.retries
            if error.kind == errors_pb2.ContainerError.NON_RECOVERABLE or failures[error.origin] > allowed:
                raise NodeFailed(f"[{run.node}] {error.code}: {error.message}")
        raise AssertionError

    def _error_of(self, attempt: Attempt, code: int) -> errors_pb2.ContainerError | None:
        """The error of an attempt. A task's own error is in error.pb, and its pod exits with 0."""
        key = attempt.outputs.removeprefix(f"s3://{BUCKET}/")
        document = self.store.read_message(f"{key}/error.pb", errors_pb2.ErrorDocument)
        if document is not None:
            return document.error
        if code == 0:
            return None
        origin = SYSTEM if code < 0 else USER
        tail = self.pods.logs[attempt.execution, attempt.node, attempt.number][-2000:]
        return errors_pb2.ContainerError(
            code="Interrupted" if code < 0 else "UnknownError",
            message=f"the pod ended with {code}: {tail}",
            kind=errors_pb2.ContainerError.RECOVERABLE,
            origin=origin,
        )

    def _note(self, run: TaskRun, state: str, detail: str = "") -> None:
        name, template = task_name(run.task), run.task.metadata.pod_template_name
        self.journal.append(
            Entry(run.execution, run.node, name, state, run.resources, template, run.retries, detail)
        )


def key_of(identifier: identifier_pb2.Identifier) -> Key:
    """An identifier as a key of a dictionary."""
    return identifier.project, identifier.domain, identifier.name, identifier.version


def task_run(
    execution: str,
    name: str,
    node: workflow_pb2.Node,
    tasks: dict[Key, tasks_pb2.TaskTemplate],
    inputs: Literals,
) -> TaskRun:
    """A node's task, with the resources and retries that the node overrides."""
    task = tasks[key_of(node.task_node.reference_id)]
    overrides = node.task_node.overrides.resources
    resources = (overrides if overrides.requests else task.container.resources).requests
    names = tasks_pb2.Resources.ResourceName
    asked = {names.Name(entry.name).lower(): entry.value for entry in resources}
    retries = node.metadata.retries.retries or task.metadata.retries.retries
    return TaskRun(execution, name, task, inputs, asked, retries)


def make_attempt(run: TaskRun, number: int, metadata: str, previous_checkpoint: str) -> Attempt:
    """Name the URIs of an attempt as Flyte does: raw outputs under two characters that spread the load."""
    bucket, own = f"s3://{BUCKET}", f"{run.execution}-{run.node}-{number}"
    raw = f"{bucket}/data/{hashlib.sha256(own.encode()).hexdigest()[:2]}/{own}"
    return Attempt(
        run.execution,
        run.node,
        run.task,
        number,
        inputs=f"{bucket}/{metadata}/inputs.pb",
        outputs=f"{bucket}/{metadata}/{number}",
        raw_outputs=raw,
        checkpoint=f"{raw}/_flytecheckpoints",
        previous_checkpoint=previous_checkpoint,
    )
