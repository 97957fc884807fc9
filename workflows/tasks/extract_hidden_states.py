"""extract: the engine's hidden states for every token, one engine task a shard."""

from dataclasses import replace
from typing import Any, cast

from flytekit import Cache, dynamic, task
from flytekit.types.directory import FlyteDirectory

import images
from eagle3.config import EngineConfig, ExtractConfig, FanOutConfig
from workflows import store
from workflows.interfaces import HiddenStateShard, HiddenStateShards, Target, TokenShard, TokenShards
from workflows.resources import ENGINE, LIGHT
from workflows.stage import stage


@task(
    container_image=images.GPU,
    cache=Cache(version="2", ignored_inputs=("shard", "target")),
    retries=3,
    interruptible=True,
    **ENGINE,
)
@stage
def extract_shard(
    shard: TokenShard, shard_digest: str, target: Target, target_digest: str, engine: EngineConfig, extract: ExtractConfig
) -> HiddenStateShard:
    from eagle3.target.engine import capture
    from eagle3.target.properties import aux_layer_ids

    layer_ids = aux_layer_ids(extract.layer_ids, target.num_layers)
    out = store.new_dir("extract_hidden_states")
    info = {"target": target.name, "target_revision": target.revision, "target_digest": target_digest}
    manifest = capture(target.directory.download(), shard.file.download(), str(out), layer_ids, engine, extract, info)
    return HiddenStateShard(
        index=shard.index,
        directory=FlyteDirectory(str(out)),
        rows=manifest["rows"],
        tokens=manifest["tokens"],
        supervised_tokens=manifest["supervised_tokens"],
        size_bytes=manifest["bytes"],
        layer_ids=layer_ids,
        digest=manifest["digest"],
    )


@task(container_image=images.CPU, **LIGHT)
def gather_hidden_states(shards: list[HiddenStateShard]) -> HiddenStateShards:
    """Put the shards in order: two that hold the same rows come from the cache under one index."""
    ordered = [replace(shard, index=i) for i, shard in enumerate(shards)]
    return HiddenStateShards(ordered, ordered[0].layer_ids, store.digest_of_digests(shard.digest for shard in ordered))


@dynamic(container_image=images.CPU, **LIGHT)
def extract_hidden_states(
    shards: TokenShards, target: Target, engine: EngineConfig, extract: ExtractConfig, fanout: FanOutConfig
) -> HiddenStateShards:
    """Run every shard through the target, `fanout.replicas` at a time."""
    extracted: list[Any] = []
    for i, shard in enumerate(shards.shards):
        node = extract_shard(
            shard=shard, shard_digest=shard.digest, target=target, target_digest=target.digest, engine=engine, extract=extract
        )
        if i >= fanout.replicas:
            extracted[i - fanout.replicas] >> node
        extracted.append(node)
    return cast(HiddenStateShards, gather_hidden_states(shards=extracted))
