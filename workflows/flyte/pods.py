"""What the stages' pods ask for, unless the recipe's `resources` says otherwise. Quantities are strings, as Kubernetes wants.

Inputs reach a node's resources only inside a `@dynamic`: the fan-outs are such, and a thin one stands around each other task that
takes resources from the recipe. The tasks themselves, and so their cache keys, know nothing of it.

What the environment said where the tasks were registered holds in their pods too: a `@dynamic` makes its nodes there, with the
images and secrets that the pod knows.
"""

import copy
import os
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import cache
from typing import Any

from flytekit import Resources, Secret
from flytekit.extras import accelerators
from flytekit.extras.accelerators import H200

from eagle3.config.engine import FanOutConfig
from eagle3.config.resources import (
    EngineResources,
    PodResources,
    ResourcesConfig,
    TrainerResources,
    quantity_bytes,
)
from eagle3.files import is_remote
from workflows.flyte import store

CARRIED = ("EAGLE3_REGISTRY", "EAGLE3_TAG", "EAGLE3_HF_SECRET", "EAGLE3_SERVER_SECRET", "EAGLE3_STORE")


def carried_environment() -> dict[str, str]:
    """What pods have to know of this environment; a store only where it is one that they can reach."""
    found = {name: os.environ.get(name, "") for name in CARRIED}
    if not is_remote(found["EAGLE3_STORE"]):
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
        raise ValueError(
            f"{setting} must read group/key, the name and key of a secret in the cluster; it does not"
        )
    how = Secret.MountType.ENV_VAR
    return {"secret_requests": [Secret(group=group, key=key, env_var=variable, mount_requirement=how)]}


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
}
TRAINER: dict[str, Any] = {
    "environment": ENVIRONMENT,
    "requests": Resources(cpu="16", mem="128Gi", gpu="1", ephemeral_storage="300Gi"),
    "limits": Resources(cpu="24", mem="192Gi", gpu="1", ephemeral_storage="400Gi"),
    "accelerator": H200,
    "shared_memory": "16Gi",
    "timeout": timedelta(days=14),
    "interruptible": False,
}


@dataclass(frozen=True)
class Pod:
    """What a node's pod asks for.

    overrides: for `with_overrides`. template: the PodTemplate of the cluster that it is made after, or empty.
    """

    overrides: dict[str, Any]
    template: str

    def node(self, task: Any, **inputs: Any) -> Any:
        """A task's node in a @dynamic, on this pod; locally the task runs at once, and this is its result."""
        if store.is_local():
            return task(**inputs)
        return after_template(task, self.template)(**inputs).with_overrides(**self.overrides)


@cache
def after_template(task: Any, name: str) -> Any:
    """The task, its pods made after a PodTemplate; for a @dynamic, whose nodes bring along the tasks they were compiled from.

    Labels of node pools, tolerations and the like stand in the PodTemplate. A node's own override would have to be the whole
    pod, which Propeller takes as it stands (flyteorg/flyte 6463), and which flytekit writes with the package kubernetes only.
    """
    if not name:
        return task
    made = copy.copy(task)
    made._metadata = replace(task.metadata, pod_template_name=name)
    return made


def replica_pod(fanout: FanOutConfig, resources: ResourcesConfig) -> Pod:
    """An engine task's pod: the recipe's GPUs, as many as a split target needs, none beside a server."""
    asked = resources.engine
    quantities = CLIENT if fanout.server_urls else _gpu_pod(ENGINE, asked, fanout.tensor_parallel_size)
    return Pod(quantities | {"interruptible": asked.spot}, "" if fanout.server_urls else asked.pod_template)


def evaluation_pod(fanout: FanOutConfig, resources: ResourcesConfig) -> Pod:
    """The evaluation's: as many GPUs as a split target needs, beside a server too; never on spot."""
    asked = resources.engine
    return Pod(
        _gpu_pod(ENGINE, asked, fanout.tensor_parallel_size) | {"interruptible": False}, asked.pod_template
    )


def trainer_pod(resources: ResourcesConfig) -> Pod:
    """The trainer's."""
    trainer = resources.trainer
    return Pod(
        _gpu_pod(TRAINER, trainer, trainer.gpus) | {"interruptible": trainer.spot}, trainer.pod_template
    )


def data_pod(resources: ResourcesConfig) -> Pod:
    """Of what fetches the target and prepares the data."""
    return Pod(
        _sides(DATA, resources.data) | {"interruptible": resources.data.spot}, resources.data.pod_template
    )


def pod_disks(resources: ResourcesConfig) -> dict[str, int]:
    """Local disk of each kind of pod, bytes, by its name in the recipe's `resources`."""
    groups = {"data": DATA, "engine": ENGINE, "trainer": TRAINER}
    return {
        name: quantity_bytes(getattr(resources, name).ephemeral_storage or group["limits"].ephemeral_storage)
        for name, group in groups.items()
    }


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
