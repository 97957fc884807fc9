"""What is registered, by the real `pyflyte`: nothing in two forms; and the launch plans, which run and promote."""

import json
import os
import subprocess
import sys
import tarfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from click.testing import CliRunner
from flyteidl.admin import launch_plan_pb2, task_pb2, workflow_pb2
from flyteidl.core.identifier_pb2 import Identifier
from flyteidl.service.admin_pb2_grpc import AdminServiceStub
from flytekit import LaunchPlan
from flytekit.clis.sdk_in_container.pyflyte import main
from flytekit.configuration import Config
from flytekit.remote import FlyteRemote
from test_remote_run import UNCACHED

from tests.flyte_stand_in.control_plane import ControlPlane
from tests.flyte_stand_in.remote_runs import Cluster, Run, as_dict, succeeded
from tests.helpers.flyte_runs import ROOT
from workflows.prepare_data import prepare_shards

pytestmark = [pytest.mark.remote, pytest.mark.slow]
ID = Identifier(project="p", domain="d", name="twice", version="v")
PLACE = "s3://flyte/promoted"
PROMOTING = {"find_current_draft", "check_current_draft", "choose_opponent", "promote_draft"}


def task_request(kind: str) -> Any:
    request = task_pb2.TaskCreateRequest(id=ID)
    request.spec.template.type = kind
    return request


def workflow_request(*upstream: str) -> Any:
    request = workflow_pb2.WorkflowCreateRequest(id=ID)
    request.spec.template.nodes.add(id="n2", upstream_node_ids=upstream)
    return request


def plan_request(role: str) -> Any:
    return launch_plan_pb2.LaunchPlanCreateRequest(
        id=ID, spec=launch_plan_pb2.LaunchPlanSpec(workflow_id=ID, role=role)
    )


def refusal(call: Callable[[Any], Any], request: Any) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.RpcError) as refused:
        call(request)
    return refused.value.code(), refused.value.details()


def test_nothing_is_registered_in_two_forms(plane: ControlPlane) -> None:
    with grpc.insecure_channel(plane.environment["FLYTE_PLATFORM_URL"]) as channel:
        admin = AdminServiceStub(channel)
        cases = [
            ("task", admin.CreateTask, task_request("a"), task_request("a"), task_request("b")),
            # flytekit writes the nodes before a node in any order.
            (
                "workflow",
                admin.CreateWorkflow,
                workflow_request("n0", "n1"),
                workflow_request("n1", "n0"),
                workflow_request("n0"),
            ),
            ("launch plan", admin.CreateLaunchPlan, plan_request("a"), plan_request("a"), plan_request("b")),
        ]
        for kind, create, one, same, other in cases:
            create(one)
            if kind == "launch plan":
                admin.UpdateLaunchPlan(
                    launch_plan_pb2.LaunchPlanUpdateRequest(id=ID, state=launch_plan_pb2.ACTIVE)
                )
            assert refusal(create, same) == (
                grpc.StatusCode.ALREADY_EXISTS,
                f"{kind} with identical structure already exists",
            )
            text = f"twice {kind} with different structure already exists"
            assert refusal(create, other) == (grpc.StatusCode.INVALID_ARGUMENT, text)


def pyflyte(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """In a process of its own: flytekit keeps what earlier runs here have compiled, and would compile it
    again from that."""
    program = "from flytekit.clis.sdk_in_container.pyflyte import main; main()"
    environment = os.environ | {"PYTHONPATH": str(ROOT)} | variables
    command = [sys.executable, "-c", program, *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)


@pytest.fixture(scope="module")
def register(cluster: Cluster, first: Run) -> Callable[..., subprocess.CompletedProcess[str]]:
    """`pyflyte register` everything as version v1, the launch plans with the first run's recipe and copies of its prompts."""
    recipe = cluster.recipe()
    variables = {"EAGLE3_RECIPE": str(recipe), "EAGLE3_PROMOTED": PLACE, "EAGLE3_OWNERS": "a@x.org"}
    for name, path in (("TRAFFIC", cluster.prompts()), ("HELDOUT", recipe.with_suffix(".heldout.jsonl"))):
        variables[f"EAGLE3_{name}"] = cluster.plane.store.write(f"sources/{name}.jsonl", path.read_bytes())

    def run(**others: str) -> subprocess.CompletedProcess[str]:
        return pyflyte(
            "register", "--copy", "all", "--version", "v1", str(ROOT / "workflows"), **(variables | others)
        )

    return run


@pytest.fixture(scope="module")
def registered(cluster: Cluster, register: Callable[..., subprocess.CompletedProcess[str]]) -> Cluster:
    done = register()
    assert done.returncode == 0, done.stdout + done.stderr
    return cluster


def test_the_same_may_be_registered_again_and_anything_else_needs_another_version(
    registered: Cluster, register: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    again = register()
    assert again.returncode == 0, again.stdout + again.stderr
    other = register(EAGLE3_PROMOTED="s3://flyte/elsewhere")
    assert other.returncode != 0
    assert "retraining launch plan with different structure already exists" in other.stdout + other.stderr


def test_a_registered_launch_plan_runs_and_shares_the_cache(registered: Cluster) -> None:
    plan = LaunchPlan.create("nightly", prepare_shards, fixed_inputs={"recipe": registered.recipe_value()})
    FlyteRemote(Config.auto(), "flytesnacks", "development").register_launch_plan(plan, version="v1")
    activated = CliRunner().invoke(main, ["launchplan", "--activate", "nightly", "v1"])
    assert activated.exit_code == 0, (activated.output, activated.exception)
    run = succeeded(registered.pyflyte_run("remote-launchplan", "nightly"))
    tasks = run.tasks("OK") + run.tasks("CACHE_HIT")
    assert tasks == Counter(
        ["resolve_inputs", "fetch_tokenizer", "prepare_data_node", "prepare_data", "report_data", "show_data"]
    )
    assert run.tasks("CACHE_HIT")["prepare_data"] == 1


def promotion(cluster: Cluster, name: str = "promoted.json") -> dict[str, Any]:
    content = cluster.plane.store.read(f"{PLACE}/{name}")
    assert content is not None
    found: dict[str, Any] = json.loads(content)
    return found


def test_the_shipped_plan_trains_from_the_promoted_draft_and_promotes(
    registered: Cluster, first: Run
) -> None:
    begun = succeeded(
        registered.run_workflow(
            "retrain_eagle3",
            registered.recipe(),
            "--promote",
            json.dumps({"place": PLACE}),
            file="retrain_eagle3.py",
        )
    )
    assert not begun.tasks("OK").keys() & {"train_draft", "export_draft", "evaluate_draft"}
    assert as_dict(begun.result_literal())["promoted"]
    current = promotion(registered)
    assert (current["number"], current["digest"]) == (1, first.output("export_draft")["digest"])

    asked = registered.pyflyte_run("remote-launchplan", "retraining", "--help").result
    assert asked.exit_code == 0, (asked.output, asked.exception)
    assert all(name in asked.output for name in ("--prompts", "--heldout", "--run_name"))
    run = succeeded(registered.pyflyte_run("remote-launchplan", "retraining", "--run_name", "tonight"))
    assert run.output("resolve_inputs", "found")["init_from"] == current["export"]
    made_anew = {"build_vocab", "train_draft", "export_draft", "evaluate_draft"}
    assert run.tasks("OK").keys() - UNCACHED.keys() - PROMOTING == made_anew
    assert run.tasks("CACHE_HIT")["evaluate_draft"] == 1  # of the draft before
    assert run.tasks("CACHE_HIT")["extract_shard"] == 2
    ended = promotion(registered)
    assert (ended["number"], ended["previous"]) == (2, current["digest"])
    assert ended == promotion(registered, "promotions/00002.json")
    assert ended["export"] == as_dict(run.result_literal())["export"]
    assert registered.plane.store.read(f"{ended['export']}/model.safetensors") is not None


def test_everything_packages_without_a_cluster(workplace: Path) -> None:
    package = workplace / "package.tgz"
    done = pyflyte(
        "--pkgs", "workflows", "package", "--source", str(ROOT), "--output", str(package), "--force"
    )
    assert done.returncode == 0, done.stdout + done.stderr
    with tarfile.open(package) as packed:
        assert "train_eagle3" in " ".join(packed.getnames())
