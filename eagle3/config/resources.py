"""Resource requests of each kind of pod. They change no result, so no cache key holds them."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, ValidationInfo

from eagle3.config.base import StageConfig

# Names as in flytekit.extras.accelerators.
AcceleratorName = Literal[
    "H200", "H100", "A100", "A100_80GB", "RTX_PRO_6000", "L40S", "L4", "A10G", "V100", "T4"
]


def _as_quantity(value: Any, info: ValidationInfo) -> Any:
    """Accept a plain number of cores, as Kubernetes does, but no bytes without a unit."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return value
    if info.field_name != "cpu":
        raise ValueError(f'a quantity of bytes must have a unit, got {value}; write "{value}Gi"')
    return f"{value:.0f}" if float(value).is_integer() else str(value)


Quantity = Annotated[str, BeforeValidator(_as_quantity), Field(pattern=r"^(\d+(\.\d+)?(m|[KMGT]i?)?)?$")]


class PodResources(StageConfig):
    """Quantities as Kubernetes writes them, for requests and limits; empty: as in workflows/flyte/pods.py."""

    cpu: Quantity = Field(default="", description='cores, for example "8"')
    mem: Quantity = Field(default="", description='memory, for example "96Gi"')
    ephemeral_storage: Quantity = Field(default="", description='local disk, for example "400Gi"')
    pod_template: str = Field(
        default="",
        pattern=r"^([a-z0-9]([-.a-z0-9]*[a-z0-9])?)?$",
        description="name of a PodTemplate, for node selectors, tolerations and the like",
    )


class GpuPodResources(PodResources):
    """Pods with GPUs."""

    accelerator: AcceleratorName = Field(default="H200", description="GPU model")
    shared_memory: Quantity = Field(default="", description='size of /dev/shm, for example "16Gi"')


class EngineResources(GpuPodResources):
    """Pods that run the target on fanout.tensor_parallel_size GPUs."""

    spot: bool = Field(default=True, description="run regeneration and extraction on spot machines")


class TrainerResources(GpuPodResources):
    """The pod that trains."""

    gpus: int = Field(default=1, ge=1, description="GPUs, one process on each; divides train.packs_per_step")
    spot: bool = Field(default=False, description="train on a spot machine; up to 3 resumes from checkpoints")


class DataResources(PodResources):
    """Pods that fetch the target and prepare the data."""

    spot: bool = Field(default=False, description="run on spot machines")


class ResourcesConfig(StageConfig):
    """What the pods of a run ask for."""

    engine: EngineResources = Field(default=EngineResources(), description="regenerate, extract and evaluate")
    trainer: TrainerResources = Field(default=TrainerResources(), description="train")
    data: DataResources = Field(default=DataResources(), description="fetching the target, and prepare")


SUFFIXES = {"": 1, "m": 1e-3}
SUFFIXES |= {letter: 1000**power for power, letter in enumerate("KMGT", 1)}
SUFFIXES |= {f"{letter}i": 1024**power for power, letter in enumerate("KMGT", 1)}


def quantity_bytes(quantity: str) -> int:
    """Bytes of a Kubernetes quantity such as "400Gi"."""
    number = quantity.rstrip("mKMGTi")
    return int(float(number) * SUFFIXES[quantity[len(number) :]])
