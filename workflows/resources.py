"""What the stages' pods ask for, unless the recipe's `resources` says otherwise. Quantities are strings, as Kubernetes wants.

Inputs reach a node's resources only inside a `@dynamic`: the fan-outs are such, and a thin one stands around each other task that
takes resources from the recipe. The tasks themselves, and so their cache keys, know nothing of it.

What the environment said where the tasks were registered holds in their pods too: a `@dynamic` makes its nodes there, with the
images and secrets that the pod knows.
"""

import os
from dataclasses import replace
from datetime import timedelta
from typing import Any

from flytekit import Resources, Secret
from flytekit.extras import accelerators
from flytekit.extras.accelerators import H200

from eagle3.config import FanOutConfig
from eagle3.resources import EngineResources, PodResources, ResourcesConfig, TrainerResources

POD_TEMPLATES = {name: f"EAGLE3_{name}_POD_TEMPLATE" for name in ("DATA", "ENGINE", "TRAINER")}
CARRIED = ("EAGLE3_REGISTRY", "EAGLE3_TAG", "EAGLE3_HF_SECRET", "EAGLE3_SERVER_SECRET", "EAGLE3_STORE", *POD_TEMPLATES.values())


def carried_environment() -> dict[str, str]:
    """What pods have to know of this environment; a store only where it is one that they can reach."""
    found = {name: os.environ.get(name, "") for name in CARRIED}
    if "://" not in found["EAGLE3_STORE"]:
        del found["EAGLE3_STORE"]
    return {name: value for name, value in found.items() if value}


def secret(setting: str, variable: str) -> dict[str, Any]:
    """A secret of the cluster for a task's pod, if the environment names one.

    Args:
        setting: variable that holds <group>/<key>, for Kubernetes a secret's name and key.
        variable: under which the pod gets the secret itself.

    Raises:
        ValueError: if the setting reads otherwise.
    """
    named = os.environ.get(setting, "")
    if not named:
        return {}
    group, _, key = named.partition("/")
    if not (group and key):
        raise ValueError(f"{setting} must read group/key, the name and key of a secret in the cluster; it does not")
    how = Secret.MountType.ENV_VAR
    return {"secret_requests": [Secret(group=group, key=key, env_var=variable, mount_requirement=how)]}


def node_pool(group: str) -> dict[str, Any]:
    """The PodTemplate of the cluster that a group's pods are made after, if the environment names one.

    Labels of node pools, tolerations and the like stand there: at run time flytekit takes them only with a package of Kubernetes.
    """
    name = os.environ.get(POD_TEMPLATES[group], "")
    return {"pod_template_name": name} if name else {}


# For tasks that read the hub, and for those that may ask a server.
HUB = secret("EAGLE3_HF_SECRET", "HF_TOKEN")
SERVER = secret("EAGLE3_SERVER_SECRET", "EAGLE3_SERVER_KEY")
ENVIRONMENT = carried_environment()

# Reading inputs, gathering shards, the summary: seconds of one core.
LIGHT: dict[str, Any] = {
    "environment": ENVIRONMENT,
    "requests": Resources(cpu="1", mem="2Gi", ephemeral_storage="4Gi"),
    "limits": Resources(cpu="2", mem="4Gi", ephemeral_storage="8Gi"),
    "timeout": timedelta(hours=1),
    "interruptible": False,
}

# A @dynamic: as light, but it lasts as long as its nodes.
DYNAMIC: dict[str, Any] = LIGHT | {"timeout": timedelta(days=30)}

# Tokenising, counting, fetching and exporting: some cores, room for the target's files.
DATA: dict[str, Any] = {
    "environment": ENVIRONMENT,
    "requests": Resources(cpu="4", mem="16Gi", ephemeral_storage="100Gi"),
    "limits": Resources(cpu="8", mem="32Gi", ephemeral_storage="200Gi"),
    "timeout": timedelta(hours=24),
    "interruptible": False,
    **node_pool("DATA"),
}

# A client of somebody's engine server.
CLIENT: dict[str, Any] = {
    "requests": Resources(cpu="4", mem="16Gi", gpu="0", ephemeral_storage="100Gi"),
    "limits": Resources(cpu="8", mem="32Gi", gpu="0", ephemeral_storage="200Gi"),
}

# Time-outs are for what hangs: far above what a shard or a training takes. Regeneration and extraction, which lose little with
# a pod, are `interruptible` where they are declared and run on spot; nothing else does.

# One engine replica or one trainer: a whole H200 each. A trainer that is given several runs one process on each
# (train.processes: 0).
ENGINE: dict[str, Any] = {
    "environment": ENVIRONMENT,
    "requests": Resources(cpu="8", mem="96Gi", gpu="1", ephemeral_storage="200Gi"),
    "limits": Resources(cpu="16", mem="128Gi", gpu="1", ephemeral_storage="400Gi"),
    "accelerator": H200,
    "shared_memory": "16Gi",
    "timeout": timedelta(days=2),
    **node_pool("ENGINE"),
}
TRAINER: dict[str, Any] = {
    "environment": ENVIRONMENT,
    "requests": Resources(cpu="16", mem="128Gi", gpu="1", ephemeral_storage="300Gi"),
    "limits": Resources(cpu="24", mem="192Gi", gpu="1", ephemeral_storage="400Gi"),
    "accelerator": H200,
    "shared_memory": "16Gi",
    "timeout": timedelta(days=14),
    "interruptible": False,
    **node_pool("TRAINER"),
}


def replica_overrides(fanout: FanOutConfig, resources: ResourcesConfig) -> dict[str, Any]:
    """What the node of an engine task asks for: the recipe's GPUs, as many as a split target needs, none beside a server."""
    spot = {"interruptible": resources.engine.spot}
    if fanout.server_urls:
        return CLIENT | spot
    return _gpu_pod(ENGINE, resources.engine, fanout.tensor_parallel_size) | spot


def evaluation_overrides(resources: ResourcesConfig) -> dict[str, Any]:
    """What the node of the evaluation asks for: one engine GPU, never on spot."""
    return _gpu_pod(ENGINE, resources.engine, 1) | {"interruptible": False}


def trainer_overrides(resources: ResourcesConfig) -> dict[str, Any]:
    """What the trainer's node asks for."""
    trainer = resources.trainer
    return _gpu_pod(TRAINER, trainer, trainer.gpus) | {"interruptible": trainer.spot}


def data_overrides(resources: ResourcesConfig) -> dict[str, Any]:
    """What the nodes that fetch the target and prepare the data ask for."""
    return _sides(DATA, resources.data) | {"interruptible": resources.data.spot}


def _gpu_pod(group: dict[str, Any], asked: EngineResources | TrainerResources, gpus: int) -> dict[str, Any]:
    # An override of quantities drops the task's own accelerator and shared memory: all are given.
    return _sides(group, asked, gpu=str(gpus)) | {
        "accelerator": getattr(accelerators, asked.accelerator),
        "shared_memory": asked.shared_memory or group["shared_memory"],
    }


def _sides(group: dict[str, Any], asked: PodResources, **quantities: str) -> dict[str, Any]:
    for name in ("cpu", "mem", "ephemeral_storage"):
        if quantity := getattr(asked, name):
            quantities[name] = quantity
    return {side: replace(group[side], **quantities) for side in ("requests", "limits")}
