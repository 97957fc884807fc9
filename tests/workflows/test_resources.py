"""A recipe's resources reach the nodes that they are meant for, and nothing else."""

from typing import Any, get_args

import pytest
from flytekit import FlyteContextManager
from flytekit.configuration import Image, ImageConfig, SerializationSettings
from flytekit.core.context_manager import ExecutionState
from flytekit.extras import accelerators
from flytekit.types.directory import FlyteDirectory
from flytekit.types.file import FlyteFile
from pydantic import ValidationError

from eagle3.config.data import DataConfig
from eagle3.config.engine import EngineConfig, EvaluateConfig
from eagle3.config.resources import AcceleratorName, ResourcesConfig
from eagle3.config.training import TrainConfig
from eagle3.planning.accelerators import ACCELERATORS
from tests.helpers.flyte_runs import make_recipe
from workflows.flyte.interfaces import (
    DraftExport,
    DraftVocab,
    HiddenStateShards,
    PreparedData,
    Target,
    TargetRef,
    TokenShard,
    TokenShards,
)
from workflows.flyte.pods import CLIENT, DATA, ENGINE, TRAINER, answering_pod
from workflows.tasks.evaluate_draft import evaluate_draft_node
from workflows.tasks.extract_hidden_states import extract_hidden_states
from workflows.tasks.fetch_target import fetch_target_node
from workflows.tasks.prepare_data import prepare_data_node
from workflows.tasks.regenerate_responses import regenerate_responses
from workflows.tasks.train_draft import train_draft_node

ASKED = ResourcesConfig(
    engine={"accelerator": "H100", "mem": "64Gi", "spot": False, "pod_template": "spot-pool"},
    trainer={
        "accelerator": "A100_80GB",
        "gpus": 4,
        "cpu": "48",
        "shared_memory": "64Gi",
        "spot": True,
        "pod_template": "train-pool",
    },
    data={"ephemeral_storage": "900Gi", "spot": True, "pod_template": "cpu-pool"},
)
FILE, DIRECTORY = FlyteFile("s3://bucket/file"), FlyteDirectory("s3://bucket/dir")
TARGET = Target("t", "r", "target", DIRECTORY, 4, 99_999, 8)
SHARD = TokenShard(0, FILE, 1, 2, 1, "shard")
VOCAB = DraftVocab(FILE, 4, 1.0, "vocab")
SHARDS = TokenShards([SHARD, SHARD], "shards")
SPLIT = {"tensor_parallel_size": 2}
# Of each task on a recipe's pods: what makes its nodes, with which inputs, and the recipe's fanout.
DRIVERS: dict[str, tuple[Any, dict[str, Any], dict[str, Any]]] = {
    "fetch_target": (fetch_target_node, {"ref": TargetRef("a", "b", "c"), "target_digest": "c"}, {}),
    "prepare_data": (
        prepare_data_node,
        {
            "prompts_digest": "p",
            "source_versions": ["v"],
            "heldout_digest": "h",
            "target": TARGET,
            "target_digest": "t",
            "data": DataConfig(),
            "regenerate": True,
        },
        {},
    ),
    "regenerate_shard": (
        regenerate_responses,
        {"data": PreparedData([SHARD, SHARD], [], SHARD, FILE), "target": TARGET},
        SPLIT,
    ),
    "extract_shard": (extract_hidden_states, {"shards": SHARDS, "target": TARGET}, SPLIT),
    "train_draft": (
        train_draft_node,
        {
            "states": HiddenStateShards([], [1, 2, 3], "states"),
            "states_digest": "states",
            "vocab": VOCAB,
            "vocab_digest": "vocab",
            "target": TARGET,
            "target_digest": "t",
            "init_from": "",
            "init_digest": "",
            "train": TrainConfig(),
        },
        {},
    ),
    "evaluate_draft": (
        evaluate_draft_node,
        {
            "draft": DraftExport(DIRECTORY, "d"),
            "draft_digest": "d",
            "heldout": SHARD,
            "heldout_digest": "h",
            "target": TARGET,
            "target_digest": "t",
            "engine": EngineConfig(),
            "evaluate": EvaluateConfig(),
        },
        SPLIT | {"server_urls": ["http://a"]},
    ),
}


def compiled(stage: str, fanout: dict[str, Any], resources: ResourcesConfig) -> Any:
    """What a pod makes of a stage's @dynamic: nodes, and the tasks that they run."""
    driver, inputs, _ = DRIVERS[stage]
    recipe = make_recipe(fanout=fanout, resources=resources)
    ctx = FlyteContextManager.current_context()
    state = ctx.new_execution_state().with_params(mode=ExecutionState.Mode.TASK_EXECUTION)
    images = ImageConfig(Image("default", "a", "b"), [Image("default", "a", "b")])
    settings = SerializationSettings(images, project="p", domain="d", version="v")
    driver._wf = None  # a pod compiles once, and flytekit keeps what it compiled
    with FlyteContextManager.with_context(
        ctx.with_execution_state(state).with_serialization_settings(settings)
    ) as pod:
        return driver.compile_into_workflow(pod, driver.task_function, **inputs, recipe=recipe)


def nodes(stage: str, fanout: dict[str, Any], resources: ResourcesConfig) -> list[Any]:
    """The nodes of `stage`."""
    made = compiled(stage, fanout, resources).nodes
    return [
        node
        for node in made
        if node.task_node and stage in node.task_node.reference_id.name.rsplit(".", 1)[-1]
    ]


def templates_of_pods(stage: str, resources: ResourcesConfig) -> dict[str, str]:
    """The PodTemplate of each task that the nodes run, by the task's name."""
    tasks = compiled(stage, DRIVERS[stage][2], resources).tasks
    pairs = {(task.id.name.rsplit(".", 1)[-1], task.metadata.pod_template_name or "") for task in tasks}
    assert len(dict(pairs)) == len(pairs)  # Propeller takes the first of a name
    return dict(pairs)


def asked(node: Any) -> dict[str, Any]:
    """Quantities of both sides, accelerator, shared memory and interruptible of a node."""
    overrides = node.task_node.overrides
    extended = overrides.extended_resources
    sides = {
        side: {entry.name: entry.value for entry in getattr(overrides.resources, side)}
        for side in ("requests", "limits")
    }
    names = {0: "", 1: "cpu", 2: "gpu", 3: "mem", 4: "storage", 5: "ephemeral_storage"}
    found = {
        f"{side}.{names[name]}": value for side, entries in sides.items() for name, value in entries.items()
    }
    found["interruptible"] = node.metadata.interruptible
    if extended is not None:
        found["accelerator"] = extended.gpu_accelerator.device
        found["shared_memory"] = extended.shared_memory.size_limit
    return found


EXPECTED: dict[str, dict[str, Any]] = {
    "fetch_target": {
        "requests.ephemeral_storage": "900Gi",
        "limits.ephemeral_storage": "900Gi",
        "interruptible": True,
    },
    "prepare_data": {
        "requests.ephemeral_storage": "900Gi",
        "limits.cpu": DATA["limits"].cpu,
        "interruptible": True,
    },
    "regenerate_shard": {
        "requests.mem": "64Gi",
        "limits.mem": "64Gi",
        "requests.gpu": "2",
        "accelerator": "nvidia-h100",
    },
    "extract_shard": {
        "requests.mem": "64Gi",
        "requests.cpu": ENGINE["requests"].cpu,
        "limits.gpu": "2",
        "accelerator": "nvidia-h100",
        "shared_memory": "16Gi",
        "interruptible": False,
    },
    "train_draft": {
        "requests.cpu": "48",
        "limits.cpu": "48",
        "requests.mem": TRAINER["requests"].mem,
        "requests.gpu": "4",
        "limits.gpu": "4",
        "accelerator": "nvidia-a100-80gb",
        "shared_memory": "64Gi",
        "interruptible": True,
    },
    "evaluate_draft": {
        "requests.mem": "64Gi",
        "requests.gpu": "2",
        "accelerator": "nvidia-h100",
        "interruptible": False,
    },
}


@pytest.mark.parametrize("stage", EXPECTED)
def test_a_recipes_resources_reach_the_stages_nodes(stage: str) -> None:
    found = [asked(node) for node in nodes(stage, DRIVERS[stage][2], ASKED)]
    assert len(found) == (2 if stage.endswith("shard") else 1)
    for node in found:
        assert node | EXPECTED[stage] == node


@pytest.mark.parametrize("stage", EXPECTED)
def test_without_resources_nodes_ask_for_what_their_tasks_do(stage: str) -> None:
    group = {"fetch_target": DATA, "prepare_data": DATA, "train_draft": TRAINER}.get(stage, ENGINE)
    for node in nodes(stage, {}, ResourcesConfig()):
        found = asked(node)
        assert found["requests.cpu"] == group["requests"].cpu
        assert found["limits.ephemeral_storage"] == group["limits"].ephemeral_storage
        assert found["interruptible"] == stage.endswith("shard")
        assert found.get("accelerator") == (None if group is DATA else "nvidia-h200")


@pytest.mark.parametrize("stage", EXPECTED)
def test_pods_are_made_after_the_template_that_the_recipe_names(stage: str) -> None:
    named = {"fetch_target": "cpu-pool", "prepare_data": "cpu-pool", "train_draft": "train-pool"}.get(
        stage, "spot-pool"
    )
    found = templates_of_pods(stage, ASKED)
    assert found.pop(stage) == named
    assert set(found.values()) <= {""}  # what gathers needs no pool
    assert set(templates_of_pods(stage, ResourcesConfig()).values()) == {""}


def test_clients_of_servers_ask_for_no_gpu() -> None:
    pod = answering_pod(make_recipe(fanout={"server_urls": ["http://a"]}, resources=ASKED))
    assert {side.gpu for side in (pod.overrides["requests"], pod.overrides["limits"])} == {"0"}
    assert pod.overrides == CLIENT | {"interruptible": False}
    assert pod.template == ""


def test_every_accelerator_is_known_to_flytekit_and_to_the_plan() -> None:
    assert set(get_args(AcceleratorName)) == set(ACCELERATORS)
    for name in ACCELERATORS:
        assert isinstance(getattr(accelerators, name), accelerators.BaseAccelerator)


@pytest.mark.parametrize("quantity", ["8", "0.5", "500m", "96Gi", "1.5Ti", "3G", ""])
def test_quantities_of_kubernetes_are_taken(quantity: str) -> None:
    assert ResourcesConfig(trainer={"mem": quantity}).trainer.mem == quantity


@pytest.mark.parametrize(
    "wrong",
    [{"mem": 8}, {"mem": "96 GB"}, {"cpu": "-1"}, {"accelerator": "H300"}, {"pod_template": "GPU pool"}],
)
def test_what_kubernetes_or_flytekit_would_refuse_is_refused_at_once(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        ResourcesConfig(engine=wrong)
