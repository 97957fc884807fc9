"""What the stand-in for Propeller itself decides, with pods that only count: cache, journal, successes of a
map node."""

from typing import Any

import pytest
from flyteidl.core.identifier_pb2 import Identifier
from flyteidl.core.literals_pb2 import Binding, Literal, LiteralMap
from flyteidl.core.tasks_pb2 import TaskTemplate
from flyteidl.core.workflow_pb2 import WorkflowTemplate

from tests.flyte_stand_in.control_plane import ControlPlane
from tests.flyte_stand_in.object_store import BUCKET, ObjectStore
from tests.flyte_stand_in.pods import Attempt
from tests.flyte_stand_in.propeller import Propeller, key_of

pytestmark = pytest.mark.remote
ID = Identifier(project="p", domain="d", name="workflows.tasks.count", version="v")


class CountingPods:
    """Every pod's output is how many there were before it."""

    def __init__(self, store: ObjectStore) -> None:
        self.store, self.started = store, 0

    def run(self, attempt: Attempt) -> int:
        made = Literal()
        made.scalar.primitive.integer = self.started
        self.started += 1
        self.store.write_message(
            f"{attempt.outputs.removeprefix(f's3://{BUCKET}/')}/outputs.pb", LiteralMap(literals={"o0": made})
        )
        return 0


def run_counting(propeller: Propeller, execution: str, overwrite_cache: bool = False) -> int:
    """Run a workflow of one cached task; returns its output."""
    task = TaskTemplate(id=ID)
    task.metadata.discoverable, task.metadata.discovery_version, task.metadata.pod_template_name = (
        True,
        "1",
        "pool",
    )
    workflow = WorkflowTemplate()
    workflow.nodes.add(id="n0").task_node.reference_id.CopyFrom(ID)
    output = Binding(var="o0")
    output.binding.promise.node_id, output.binding.promise.var = "n0", "o0"
    workflow.outputs.append(output)
    made = propeller.run_workflow(execution, workflow, {key_of(ID): task}, {}, overwrite_cache)
    return int(made["o0"].scalar.primitive.integer)


def test_an_execution_that_overwrites_the_cache_reads_nothing_there_and_writes_what_it_made(
    plane: ControlPlane,
) -> None:
    pods: Any = CountingPods(plane.store)
    propeller = Propeller(plane.store, pods)
    made = [run_counting(propeller, f"count{i}", overwrite_cache=i == 2) for i in range(4)]
    assert made == [0, 0, 1, 1]
    assert [entry.state for entry in propeller.journal] == ["OK", "CACHE_HIT", "OK", "CACHE_HIT"]
    assert {entry.pod_template for entry in propeller.journal} == {"pool"}


def test_a_pod_unpacks_its_code_in_its_own_directory_and_not_in_this_machines() -> None:
    """`pyflyte register` names the directory of the image."""
    task = TaskTemplate(id=ID)
    task.container.args.extend(
        ["pyflyte-fast-execute", "--dest-dir", "/root", "--", "pyflyte-execute", "{{.input}}"]
    )
    attempt = Attempt("e", "n0", task, 0, "s3://in", "s3://out", "s3://raw", "s3://now", "")
    assert attempt.command() == [
        "pyflyte-fast-execute",
        "--dest-dir",
        ".",
        "--",
        "pyflyte-execute",
        "s3://in",
    ]
