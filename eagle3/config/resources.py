"""What a recipe may ask of the cluster for each kind of pod, and what a plan has to know of the accelerators.

Nothing here decides a result, so none of it is in a cache key.
"""

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, ValidationInfo

from eagle3.config.base import StageConfig

# Names as in flytekit.extras.accelerators.
AcceleratorName = Literal[
    "H200", "H100", "A100", "A100_80GB", "RTX_PRO_6000", "L40S", "L4", "A10G", "V100", "T4"
]


def _as_quantity(value: Any, info: ValidationInfo) -> Any:
    """A number as Kubernetes' manifests take it too: of cores. Of bytes a number without a unit is a mistake."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return value
    if info.field_name != "cpu":
        raise ValueError(f'a quantity of bytes must have a unit, got {value}; write "{value}Gi"')
    return f"{value:.0f}" if float(value).is_integer() else str(value)


Quantity = Annotated[str, BeforeValidator(_as_quantity), Field(pattern=r"^(\d+(\.\d+)?(m|[KMGT]i?)?)?$")]


class PodResources(StageConfig):
    """Quantities as Kubernetes writes them, requested and set as the limit; empty keeps those of workflows/flyte/pods.py."""

    cpu: Quantity = Field(default="", description='cores, for example "8"')
    mem: Quantity = Field(default="", description='memory, for example "96Gi"')
    ephemeral_storage: Quantity = Field(default="", description='local disk, for example "400Gi"')
    pod_template: str = Field(
        default="",
        pattern=r"^([a-z0-9]([-.a-z0-9]*[a-z0-9])?)?$",
        description="name of a PodTemplate in the pods' namespace: labels of node pools, tolerations and whatever else pods need",
    )


class EngineResources(PodResources):
    """Pods that run the target; their number of GPUs is fanout.tensor_parallel_size."""

    accelerator: AcceleratorName = Field(
        default="H200", description="GPU model, by its name in flytekit.extras.accelerators"
    )
    shared_memory: Quantity = Field(default="", description='size of /dev/shm, for example "16Gi"')
    spot: bool = Field(
        default=True,
        description="regeneration and extraction may lose their pods; evaluation never runs on spot",
    )


class TrainerResources(PodResources):
    """The pod that trains."""

    accelerator: AcceleratorName = Field(
        default="H200", description="GPU model, by its name in flytekit.extras.accelerators"
    )
    shared_memory: Quantity = Field(default="", description='size of /dev/shm, for example "16Gi"')
    gpus: int = Field(
        default=1, ge=1, description="GPUs, one process on each; train.packs_per_step is a multiple of them"
    )
    spot: bool = Field(
        default=False,
        description="training may lose its pod; it goes on from its last checkpoint, three times",
    )


class DataResources(PodResources):
    """Pods that fetch the target and prepare the data."""

    spot: bool = Field(default=False, description="these pods may be lost; what they were doing starts again")


class ResourcesConfig(StageConfig):
    """What the pods of a run ask for. In no cache key."""

    engine: EngineResources = Field(default=EngineResources(), description="regenerate, extract and evaluate")
    trainer: TrainerResources = Field(default=TrainerResources(), description="train")
    data: DataResources = Field(default=DataResources(), description="fetching the target, and prepare")


SUFFIXES = {"": 1, "m": 1e-3} | {
    k + i: (1024 if i else 1000) ** (n + 1) for n, k in enumerate("KMGT") for i in ("", "i")
}


def quantity_bytes(quantity: str) -> int:
    """Bytes of a Kubernetes quantity such as "400Gi"."""
    number = quantity.rstrip("mKMGTi")
    return int(float(number) * SUFFIXES[quantity[len(number) :]])


@dataclass(frozen=True)
class PodDisks:
    """Local disk, bytes, that pods may use at most: those of the data stages, of one engine, of the trainer."""

    data: int
    engine: int
    trainer: int
