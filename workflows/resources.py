"""What the stages' pods ask for, the one place to change for another cluster. Quantities are strings, as Kubernetes wants."""

from dataclasses import replace
from typing import Any

from flytekit import Resources
from flytekit.extras.accelerators import H200

from eagle3.config import FanOutConfig

# Reading inputs, gathering shards, the summary: seconds of one core.
LIGHT: dict[str, Any] = {
    "requests": Resources(cpu="1", mem="2Gi", ephemeral_storage="4Gi"),
    "limits": Resources(cpu="2", mem="4Gi", ephemeral_storage="8Gi"),
}

# Tokenising, counting, fetching and exporting: some cores, room for the target's files.
DATA: dict[str, Any] = {
    "requests": Resources(cpu="4", mem="16Gi", ephemeral_storage="100Gi"),
    "limits": Resources(cpu="8", mem="32Gi", ephemeral_storage="200Gi"),
}

# A client of somebody's engine server.
CLIENT: dict[str, Any] = {
    "requests": Resources(cpu="4", mem="16Gi", gpu="0", ephemeral_storage="100Gi"),
    "limits": Resources(cpu="8", mem="32Gi", gpu="0", ephemeral_storage="200Gi"),
}

# One engine replica or one trainer: a whole H200 each. A trainer that is given several runs one process on each
# (train.processes: 0).
ENGINE: dict[str, Any] = {
    "requests": Resources(cpu="8", mem="96Gi", gpu="1", ephemeral_storage="200Gi"),
    "limits": Resources(cpu="16", mem="128Gi", gpu="1", ephemeral_storage="400Gi"),
    "accelerator": H200,
    "shared_memory": "16Gi",
}
TRAINER: dict[str, Any] = {
    "requests": Resources(cpu="16", mem="128Gi", gpu="1", ephemeral_storage="300Gi"),
    "limits": Resources(cpu="24", mem="192Gi", gpu="1", ephemeral_storage="400Gi"),
    "accelerator": H200,
    "shared_memory": "16Gi",
}


def replica_overrides(fanout: FanOutConfig) -> dict[str, Any]:
    """What an engine task's node asks for instead of ENGINE: several GPUs for a split target, none beside a server."""
    if fanout.server_urls:
        return dict(CLIENT)
    if fanout.tensor_parallel_size == 1:
        return {}
    gpus = str(fanout.tensor_parallel_size)
    return {side: replace(ENGINE[side], gpu=gpus) for side in ("requests", "limits")}
