"""Admin and the data proxy of a Flyte cluster, over gRPC, for the real `pyflyte`. README.md describes the whole stand-in.

As Admin does, it never replaces what is registered: it refuses another task, workflow or launch plan under the
same id. It does not compare the inputs of an execution with those of its launch plan.
"""

import base64
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator
from concurrent import futures
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import grpc
from flyteidl.admin import (
    common_pb2,
    execution_pb2,
    launch_plan_pb2,
    node_execution_pb2,
    task_pb2,
    version_pb2,
    workflow_pb2,
)
from flyteidl.core import compiler_pb2, identifier_pb2, literals_pb2, tasks_pb2
from flyteidl.core.execution_pb2 import ExecutionError, WorkflowExecution
from flyteidl.service import admin_pb2_grpc, dataproxy_pb2, dataproxy_pb2_grpc
from google.protobuf.timestamp_pb2 import Timestamp

from tests.flyte_stand_in.object_store import BUCKET, ObjectStore
from tests.flyte_stand_in.pods import Pod, PodHost
from tests.flyte_stand_in.propeller import Entry, Key, Literals, NodeFailed, Propeller, key_of

Id = identifier_pb2.Identifier
Context = grpc.ServicerContext


def now() -> Timestamp:
    stamp = Timestamp()
    stamp.GetCurrentTime()
    return stamp


class Admin(admin_pb2_grpc.AdminServiceServicer):  # type: ignore[misc]
    """Registered entities and executions. Calls that pyflyte does not make answer UNIMPLEMENTED."""

    def __init__(self, propeller: Propeller) -> None:
        self.propeller = propeller
        self.tasks: dict[Key, tasks_pb2.TaskTemplate] = {}
        self.workflows: dict[Key, Any] = {}
        self.launch_plans: dict[Key, launch_plan_pb2.LaunchPlan] = {}
        self.executions: dict[str, execution_pb2.Execution] = {}
        self.data: dict[str, tuple[Literals, Literals]] = {}

    def GetVersion(self, request: Any, context: Context) -> Any:
        return version_pb2.GetVersionResponse(control_plane_version=version_pb2.Version(Version="v1.16.0"))

    def CreateTask(self, request: Any, context: Context) -> Any:
        template = tasks_pb2.TaskTemplate()
        template.CopyFrom(request.spec.template)
        template.id.CopyFrom(request.id)
        store_new(self.tasks, request.id, template, "task", context)
        return task_pb2.TaskCreateResponse()

    def GetTask(self, request: Any, context: Context) -> Any:
        template = find(self.tasks, request.id, context)
        return task_pb2.Task(
            id=request.id,
            closure=task_pb2.TaskClosure(compiled_task=compiler_pb2.CompiledTask(template=template)),
        )

    def CreateWorkflow(self, request: Any, context: Context) -> Any:
        store_new(self.workflows, request.id, request.spec, "workflow", context)
        return workflow_pb2.WorkflowCreateResponse()

    def GetWorkflow(self, request: Any, context: Context) -> Any:
        spec = find(self.workflows, request.id, context)
        needed = {
            key_of(node.task_node.reference_id) for node in spec.template.nodes if node.HasField("task_node")
        }
        closure = compiler_pb2.CompiledWorkflowClosure(
            primary=compiler_pb2.CompiledWorkflow(template=spec.template),
            tasks=[compiler_pb2.CompiledTask(template=self.tasks[key]) for key in needed],
        )
        return workflow_pb2.Workflow(
            id=request.id, closure=workflow_pb2.WorkflowClosure(compiled_workflow=closure)
        )

    def CreateLaunchPlan(self, request: Any, context: Context) -> Any:
        workflow = find(self.workflows, request.spec.workflow_id, context)
        closure = launch_plan_pb2.LaunchPlanClosure(
            expected_inputs=request.spec.default_inputs,
            expected_outputs=workflow.template.interface.outputs,
            created_at=now(),
        )
        plan = launch_plan_pb2.LaunchPlan(id=request.id, spec=request.spec, closure=closure)
        store_new(self.launch_plans, request.id, plan, "launch plan", context)
        return launch_plan_pb2.LaunchPlanCreateResponse()

    def GetLaunchPlan(self, request: Any, context: Context) -> Any:
        return find(self.launch_plans, request.id, context)

    def UpdateLaunchPlan(self, request: Any, context: Context) -> Any:
        """At most one version of a name is active."""
        plan = find(self.launch_plans, request.id, context)
        for other in self._versions(request.id):
            other.closure.state = launch_plan_pb2.INACTIVE
        plan.closure.state = request.state
        return launch_plan_pb2.LaunchPlanUpdateResponse()

    def GetActiveLaunchPlan(self, request: Any, context: Context) -> Any:
        active = [plan for plan in self._versions(request.id) if plan.closure.state == launch_plan_pb2.ACTIVE]
        return active[0] if active else miss(context, f"no active launch plan {request.id.name}")

    def ListLaunchPlans(self, request: Any, context: Context) -> Any:
        """Newest first; the requested order is ignored."""
        return launch_plan_pb2.LaunchPlanList(launch_plans=self._versions(request.id)[::-1])

    def _versions(self, name: common_pb2.NamedEntityIdentifier | Id) -> list[launch_plan_pb2.LaunchPlan]:
        wanted = (name.project, name.domain, name.name)
        return [plan for key, plan in self.launch_plans.items() if key[:3] == wanted]

    def CreateExecution(self, request: Any, context: Context) -> Any:
        name = request.name or f"f{len(self.executions):08d}"
        plan = find(self.launch_plans, request.spec.launch_plan, context)
        execution = execution_pb2.Execution(
            id=identifier_pb2.WorkflowExecutionIdentifier(
                project=request.project, domain=request.domain, name=name
            ),
            spec=request.spec,
            closure=execution_pb2.ExecutionClosure(
                phase=WorkflowExecution.RUNNING,
                workflow_id=plan.spec.workflow_id,
                started_at=now(),
                created_at=now(),
                updated_at=now(),
            ),
        )
        defaults = {
            key: p.default for key, p in plan.spec.default_inputs.parameters.items() if p.HasField("default")
        }
        inputs = defaults | dict(request.inputs.literals) | dict(plan.spec.fixed_inputs.literals)
        self.executions[name], self.data[name] = execution, (inputs, {})
        threading.Thread(target=self._run, args=(execution, inputs), daemon=True).start()
        return execution_pb2.ExecutionCreateResponse(id=execution.id)

    def _run(self, execution: execution_pb2.Execution, inputs: Literals) -> None:
        name, closure = execution.id.name, execution.closure
        workflow = self.workflows[key_of(closure.workflow_id)].template
        try:
            outputs = self.propeller.run_workflow(
                name, workflow, dict(self.tasks), inputs, execution.spec.overwrite_cache
            )
            self.data[name] = inputs, outputs
            closure.phase = WorkflowExecution.SUCCEEDED
        except Exception as e:
            message = str(e) if isinstance(e, NodeFailed) else traceback.format_exc()
            closure.error.CopyFrom(ExecutionError(code="Failed", message=message))
            closure.phase = WorkflowExecution.FAILED

    def GetExecution(self, request: Any, context: Context) -> Any:
        return self.executions.get(request.id.name) or miss(context, f"no execution {request.id.name}")

    def GetExecutionData(self, request: Any, context: Context) -> Any:
        inputs, outputs = (literals_pb2.LiteralMap(literals=side) for side in self.data[request.id.name])
        return execution_pb2.WorkflowExecutionGetDataResponse(full_inputs=inputs, full_outputs=outputs)

    def ListNodeExecutions(self, request: Any, context: Context) -> Any:
        return node_execution_pb2.NodeExecutionList()


def miss(context: Context, text: str) -> NoReturn:
    context.abort(grpc.StatusCode.NOT_FOUND, text)
    raise AssertionError


def find(entities: dict[Key, Any], identifier: Id, context: Context) -> Any:
    """Return the entity registered under an identifier."""
    return entities.get(key_of(identifier)) or miss(context, f"{identifier} is not registered")


def store_new(entities: dict[Key, Any], identifier: Id, entity: Any, kind: str, context: Context) -> None:
    """Register once. pyflyte accepts that the same entity exists, and fails if another does."""
    known = entities.setdefault(key_of(identifier), entity)
    if known is entity:
        return
    if structure_of(known) == structure_of(entity):
        context.abort(grpc.StatusCode.ALREADY_EXISTS, f"{kind} with identical structure already exists")
    context.abort(
        grpc.StatusCode.INVALID_ARGUMENT, f"{identifier.name} {kind} with different structure already exists"
    )


def structure_of(entity: Any) -> bytes:
    """Serialize an entity. The ids of upstream nodes are sorted, since flytekit takes them from a set."""
    if isinstance(entity, launch_plan_pb2.LaunchPlan):
        entity = entity.spec
    if isinstance(entity, workflow_pb2.WorkflowSpec):
        unsorted, entity = entity, workflow_pb2.WorkflowSpec()
        entity.CopyFrom(unsorted)
        for node in entity.template.nodes:
            node.upstream_node_ids.sort()
    structure: bytes = entity.SerializeToString(deterministic=True)
    return structure


class DataProxy(dataproxy_pb2_grpc.DataProxyServiceServicer):  # type: ignore[misc]
    """Upload locations for code and input files, and outputs of nodes."""

    def __init__(self, store: ObjectStore) -> None:
        self.store = store

    def CreateUploadLocation(self, request: Any, context: Context) -> Any:
        folder = request.filename_root or base64.urlsafe_b64encode(request.content_md5).decode().rstrip("=")
        key = f"upload/{request.project}/{request.domain}/{folder}/{request.filename}"
        md5 = base64.b64encode(request.content_md5).decode()
        url = self.store.s3.generate_presigned_url(
            "put_object", Params={"Bucket": BUCKET, "Key": key, "ContentMD5": md5}
        )
        return dataproxy_pb2.CreateUploadLocationResponse(
            signed_url=url, native_url=f"s3://{BUCKET}/{key}", expires_at=now()
        )

    def GetData(self, request: Any, context: Context) -> Any:
        """One output of a node that ran, by flyte://v1/<project>/<domain>/<execution>/<node>/o/<output>."""
        execution, node, _, output = request.flyte_url.split("/")[-4:]
        keys = [
            key
            for key in self.store.keys(f"metadata/{execution}/{node}/data/")
            if key.endswith("/outputs.pb")
        ]
        made = self.store.read_message(keys[-1], literals_pb2.LiteralMap) if keys else None
        if made is None or output not in made.literals:
            miss(context, f"no output at {request.flyte_url}")
        return dataproxy_pb2.GetDataResponse(literal=made.literals[output])


class ControlPlane:
    """The whole cluster. environment: variables that point `pyflyte` at it."""

    def __init__(self, work: Path, pod_environment: dict[str, str]) -> None:
        self.store = ObjectStore()
        self.pods = PodHost(work, self.store.environment() | pod_environment)
        self.propeller = Propeller(self.store, self.pods)
        self.admin = Admin(self.propeller)
        self._server = grpc.server(futures.ThreadPoolExecutor(8))
        admin_pb2_grpc.add_AdminServiceServicer_to_server(self.admin, self._server)
        dataproxy_pb2_grpc.add_DataProxyServiceServicer_to_server(DataProxy(self.store), self._server)
        port = self._server.add_insecure_port("127.0.0.1:0")
        self._server.start()
        self.environment = self.store.environment() | {
            "FLYTE_PLATFORM_URL": f"127.0.0.1:{port}",
            "FLYTE_PLATFORM_INSECURE": "true",
        }

    @property
    def journal(self) -> list[Entry]:
        return self.propeller.journal

    @contextmanager
    def watching(
        self,
        on_start: Callable[[Pod], None] = lambda pod: None,
        on_put: Callable[[str], None] = lambda key: None,
        refuses: Callable[[str], bool] = lambda key: False,
    ) -> Iterator[None]:
        """Call back on each pod that starts and each object that is stored; the cluster waits for the callback.

        Args:
            on_start: receives the pod.
            on_put: receives the object's key.
            refuses: receives the key of an object that is read; True makes the store answer 503.
        """
        self.pods.on_start, self.store.on_put, self.store.refuses = on_start, on_put, refuses
        try:
            yield
        finally:
            self.pods.on_start, self.store.on_put, self.store.refuses = (
                lambda pod: None,
                lambda key: None,
                lambda key: False,
            )

    def close(self) -> None:
        self._server.stop(None)
        self.pods.close()
        self.store.close()


@contextmanager
def control_plane(**pod_environment: str) -> Iterator[ControlPlane]:
    """Yield a cluster. Its pods work in a directory with a short name, since the address of a socket is short."""
    with tempfile.TemporaryDirectory(prefix="flyte-", ignore_cleanup_errors=True) as work:
        plane = ControlPlane(Path(work), pod_environment)
        try:
            yield plane
        finally:
            plane.close()
