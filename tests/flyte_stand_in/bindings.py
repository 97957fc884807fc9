"""Data between nodes: the nodes that a node waits for, its bound inputs, and its cache key."""

import asyncio
import hashlib
from collections.abc import Iterable

from flyteidl.core import literals_pb2, tasks_pb2, workflow_pb2
from flytekit.core.promise import Promise, resolve_attr_path_in_promise
from flytekit.models.literals import Literal as LiteralModel

Literals = dict[str, literals_pb2.Literal]


def upstream(node: workflow_pb2.Node) -> set[str]:
    """Ids of the nodes that must end before this one."""

    def named(binding: literals_pb2.BindingData) -> set[str]:
        kind = binding.WhichOneof("value")
        if kind == "promise":
            return {binding.promise.node_id}
        items = binding.collection.bindings if kind == "collection" else binding.map.bindings.values()
        return {name for item in items for name in named(item)}

    return set(node.upstream_node_ids).union(*(named(binding.binding) for binding in node.inputs))


def bind_all(bindings: list[literals_pb2.Binding], made: dict[str, Literals]) -> Literals:
    """Inputs by name, from constants and from outputs of nodes. The node "" has the workflow's inputs."""
    return {binding.var: bind(binding.binding, made) for binding in bindings}


def bind(binding: literals_pb2.BindingData, made: dict[str, Literals]) -> literals_pb2.Literal:
    kind = binding.WhichOneof("value")
    if kind == "scalar":
        return literals_pb2.Literal(scalar=binding.scalar)
    if kind == "collection":
        return collection(bind(item, made) for item in binding.collection.bindings)
    if kind == "map":
        items = {key: bind(item, made) for key, item in binding.map.bindings.items()}
        return literals_pb2.Literal(map=literals_pb2.LiteralMap(literals=items))
    literal = made[binding.promise.node_id][binding.promise.var]
    path = [step.string_value or step.int_value for step in binding.promise.attr_path]
    return attribute(literal, path) if path else literal


def attribute(literal: literals_pb2.Literal, path: list[str | int]) -> literals_pb2.Literal:
    """A field of an output, as in `rows.digest`."""
    promise = Promise("output", LiteralModel.from_flyte_idl(literal))
    promise._attr_path = path
    return asyncio.run(resolve_attr_path_in_promise(promise)).val.to_flyte_idl()


def collection(literals: Iterable[literals_pb2.Literal]) -> literals_pb2.Literal:
    return literals_pb2.Literal(collection=literals_pb2.LiteralCollection(literals=literals))


def cache_key(task: tasks_pb2.TaskTemplate, inputs: Literals) -> tuple[str, str, str] | None:
    """Name, version and hash of the inputs that are in the key; None for a task that is not cached."""
    if not task.metadata.discoverable:
        return None
    ignored = set(task.metadata.cache_ignore_input_vars)
    counted = literals_pb2.LiteralMap(literals={k: hashed(v) for k, v in inputs.items() if k not in ignored})
    content = hashlib.sha256(counted.SerializeToString(deterministic=True)).hexdigest()
    return task.id.name, task.metadata.discovery_version, content


def hashed(literal: literals_pb2.Literal) -> literals_pb2.Literal:
    """A literal as it enters the key: one that carries a hash is represented by that hash."""
    if literal.hash:
        return literals_pb2.Literal(hash=literal.hash)
    if literal.WhichOneof("value") == "collection":
        return collection(hashed(item) for item in literal.collection.literals)
    return literal
