"""A fan-out: one node a shard, dealt out to worker slots. A shard that fails for good ends the run; what is
finished is kept."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

S = TypeVar("S")


def fan_out(shards: Sequence[S], num_slots: int, start: Callable[[S, int], Any]) -> list[Any]:
    """Start a node for each shard, in order; each slot runs one node after the other.

    Args:
        num_slots: nodes that run at the same time at most.
        start: makes the node of a shard in a slot, an index below num_slots.
    """
    nodes: list[Any] = []
    for i, shard in enumerate(shards):
        node = start(shard, i % num_slots)
        if i >= num_slots:
            nodes[i - num_slots] >> node
        nodes.append(node)
    return nodes
