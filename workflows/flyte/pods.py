"""The pod of each task: image, resources, retries, timeout, secrets. A recipe's `resources` replace
quantities.

Only a `@dynamic` can set a node's resources from an input. The fan-outs are `@dynamic`; `on_pod` wraps other
tasks in one. So resources are in no task's inputs and in no cache key.

A `@dynamic` compiles its nodes in a pod, and needs the images and secrets that were set at registration: pods
get those variables (CARRIED).
"""

import copy
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import cache
from inspect import signature
from typing import Any, get_type_hints

from flytekit import Resources, Secret, dynamic
from flytekit.extras import accelerators
from flytekit.extras.accelerators import H200

import images
from eagle3.config.resources import (
    EngineResources,
    PodResources,
    ResourcesConfig,
    TrainerResources,
    quantity_bytes,
)
from eagle3.files import is_remote
from workflows.flyte import store
from workflows.flyte.recipe import Recipe
from workflows.flyte.stage import recoverable

CARRIED = ("EAGLE3_REGISTRY", "EAGLE3_TAG", "EAGLE3_HF_SECRET", "EAGLE3_SERVER_SECRET", "EAGLE3_STORE")


def carried_environment() -> dict[str, str]:
    """The variables of this environment that pods need. EAGLE3_STORE only if it is a URL."""
    found = {name: os.environ.get(name, "") for name in CARRIED}
    if not is_remote(found["EAGLE3_STORE"]):
        del found["EAGLE3_STORE"]
    return {name: value for name, value in found.items() if value}


def secret(setting: str, variable: str) -> dict[str, Any]:
    """Put a secret of the cluster into a task's environment as `variable`, if the variable `setting` names
    one as <group>/<key>: name and key of a Kubernetes secret."""
    named = os.environ.get(setting, "")
    if not named:
        return {}
    group, _, key = named.partition("/")
    if not (group and key):
        raise ValueError(
            f"{setting} must read group/key, the name and key of a secret in the cluster; it does not"
        )
    mount = Secret.MountType.ENV_VAR
    return {"secret_requests": [Secret(group=group, key=key, env_var=variable, mount_requirement=mount)]}


# For tasks that read the hub, and for tasks that may call an engine server.
HUB = secret("EAGLE3_HF_SECRET", "HF_TOKEN")
SERVER = secret("EAGLE3_SERVER_SECRET", "EAGLE3_SERVER_KEY")
DECK: dict[str, Any] = {"enable_deck": True, "deck_fields": ()}

ON_CPU: dict[str, Any] = {
    "container_image": images.CPU,
    "environment": carried_environment(),
    "retries": 2,
    "interruptible": False,
}

# Reading inputs, gathering shards, the summary: seconds of one core.
LIGHT: dict[str, Any] = ON_CPU | {
    "requests": Resources(cpu="1", mem="2Gi", ephemeral_storage="4Gi"),
    "limits": Resources(cpu="2", mem="4Gi", ephemeral_storage="8Gi"),
    "timeout": timedelta(hours=1),
}

# A @dynamic lasts as long as its nodes.
DYNAMIC: dict[str, Any] = LIGHT | {"timeout": timedelta(days=30)}

# Tokenizing, counting, fetching and exporting: some cores, room for the target's files.
DATA: dict[str, Any] = ON_CPU | {
    "requests": Resources(cpu="4", mem="16Gi", ephemeral_storage="100Gi"),
    "limits": Resources(cpu="8", mem="32Gi", ephemeral_storage="200Gi"),
    "timeout": timedelta(hours=24),
}

# A client of an engine server that runs elsewhere.
CLIENT: dict[str, Any] = {
    "requests": Resources(cpu="4", mem="16Gi", gpu="0", ephemeral_storage="100Gi"),
    "limits": Resources(cpu="8", mem="32Gi", gpu="0", ephemeral_storage="200Gi"),
}

# One engine replica or one trainer on one H200. Timeouts end pods that hang; they are far above the time of a
# shard or a training.
ON_GPU: dict[str, Any] = {
    "container_image": images.GPU,
    "environment": carried_environment(),
    "retries": 3,
    "accelerator": H200,
    "shared_memory": "16Gi",
}
ENGINE: dict[str, Any] = ON_GPU | {
    "requests": Resources(cpu="8", mem="96Gi", gpu="1", ephemeral_storage="200Gi"),
    "limits": Resources(cpu="16", mem="128Gi", gpu="1", ephemeral_storage="400Gi"),
    "timeout": timedelta(days=2),
    "interruptible": True,  # a new pod resumes the shard
}
EVALUATION: dict[str, Any] = ENGINE | {"interruptible": False}
TRAINER: dict[str, Any] = ON_GPU | {
    "requests": Resources(cpu="16", mem="128Gi", gpu="1", ephemeral_storage="300Gi"),
    "limits": Resources(cpu="24", mem="192Gi", gpu="1", ephemeral_storage="400Gi"),
    "timeout": timedelta(days=14),
    "interruptible": False,
}


@dataclass(frozen=True)
class Pod:
    """A node's pod. overrides: for `with_overrides`. template: name of a PodTemplate in the cluster, or
    empty."""

    overrides: dict[str, Any]
    template: str

    def node(self, task: Any, **inputs: Any) -> Any:
        """Make a task's node on this pod, in a @dynamic. Locally, run the task and return its result."""
        if store.is_local():
            return task(**inputs)
        return _with_template(task, self.template)(**inputs).with_overrides(**self.overrides)


@cache
def _with_template(task: Any, name: str) -> Any:
    """A copy of the task whose pods start from a PodTemplate, for labels, tolerations and the like.

    A node's override cannot name one: it is a complete pod, which Propeller does not merge
    (flyteorg/flyte#6463) and for which flytekit needs the package kubernetes.
    """
    if not name:
        return task
    templated = copy.copy(task)
    templated._metadata = replace(task.metadata, pod_template_name=name)
    return templated


def on_pod(task: Any, pod_for: Callable[[Recipe], Pod]) -> Any:
    """A @dynamic <task>_node with the task's inputs. It runs the task on the pod that `recipe` asks for."""
    function = task.task_function

    def node(**inputs: Any) -> Any:
        return pod_for(inputs["recipe"]).node(task, **inputs)

    node.__name__ = node.__qualname__ = f"{function.__name__}_node"
    node.__module__ = function.__module__
    node.__doc__ = f"{function.__name__} on the pod that the recipe asks for."
    node.__annotations__ = get_type_hints(function)
    node.__signature__ = signature(function)  # type: ignore[attr-defined]
    return dynamic(**DYNAMIC)(recoverable(node))


def engine_pod(recipe: Recipe) -> Pod:
    """An engine replica with one GPU for each tensor-parallel rank."""
    asked = recipe.resources.engine
    quantities = _gpu_pod(ENGINE, asked, recipe.fanout.tensor_parallel_size)
    return Pod(quantities | {"interruptible": asked.spot}, asked.pod_template)


def answering_pod(recipe: Recipe) -> Pod:
    """An engine replica, or a client of the recipe's servers."""
    if not recipe.fanout.server_urls:
        return engine_pod(recipe)
    return Pod(CLIENT | {"interruptible": recipe.resources.engine.spot}, "")


def evaluation_pod(recipe: Recipe) -> Pod:
    """An engine replica, never on spot since it measures speed."""
    pod = engine_pod(recipe)
    return Pod(pod.overrides | {"interruptible": False}, pod.template)


def trainer_pod(recipe: Recipe) -> Pod:
    """A trainer."""
    asked = recipe.resources.trainer
    return Pod(_gpu_pod(TRAINER, asked, asked.gpus) | {"interruptible": asked.spot}, asked.pod_template)


def data_pod(recipe: Recipe) -> Pod:
    """A pod that fetches the target or prepares the data."""
    asked = recipe.resources.data
    return Pod(_quantities(DATA, asked) | {"interruptible": asked.spot}, asked.pod_template)


def pod_disks(resources: ResourcesConfig) -> dict[str, int]:
    """Local disk in bytes of each kind of pod, by its name in the recipe's `resources`."""
    groups = {"data": DATA, "engine": ENGINE, "trainer": TRAINER}
    return {
        name: quantity_bytes(getattr(resources, name).ephemeral_storage or group["limits"].ephemeral_storage)
        for name, group in groups.items()
    }


def _gpu_pod(group: dict[str, Any], asked: EngineResources | TrainerResources, gpus: int) -> dict[str, Any]:
    # An override of quantities drops the task's accelerator and shared memory, so it has to set them.
    return _quantities(group, asked, gpu=str(gpus)) | {
        "accelerator": getattr(accelerators, asked.accelerator),
        "shared_memory": asked.shared_memory or group["shared_memory"],
    }


def _quantities(group: dict[str, Any], asked: PodResources, **quantities: str) -> dict[str, Any]:
    for name in ("cpu", "mem", "ephemeral_storage"):
        if quantity := getattr(asked, name):
            quantities[name] = quantity
    return {side: replace(group[side], **quantities) for side in ("requests", "limits")}
