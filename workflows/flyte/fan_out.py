"""Fan out: one node for each shard, in worker slots. A shard that fails for good ends the run; finished
shards stay in the cache."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

S = TypeVar("S")


def fan_out(shards: Sequence[S], num_slots: int, start: Callable[[S, int], Any]) -> list[Any]:
    """Call `start(shard, slot)` for each shard in order; a slot runs one node at a time, so at most num_slots
    run at once."""
    nodes: list[Any] = []
    for i, shard in enumerate(shards):
        node = start(shard, i % num_slots)
        if i >= num_slots:
            nodes[i - num_slots] >> node
        nodes.append(node)
    return nodes
