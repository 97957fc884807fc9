"""extract: the engine's hidden states for every token, one engine task a shard."""

import functools
import logging
from dataclasses import replace
from typing import Any, cast

from flytekit import Cache, dynamic, map_task, task
from flytekit.types.directory import FlyteDirectory

import images
from eagle3.config.engine import EngineConfig, ExtractConfig, FanOutConfig
from eagle3.config.resources import ResourcesConfig
from eagle3.uris import redact
from workflows.flyte import store
from workflows.flyte.interfaces import HiddenStateShard, HiddenStateShards, Target, TokenShard, TokenShards
from workflows.flyte.live import JobDeck
from workflows.flyte.pods import DYNAMIC, ENGINE, LIGHT, Pod, after_template, replica_pod
from workflows.flyte.stage import recoverable, stage

logger = logging.getLogger("eagle3")
CACHE = Cache(version="3", ignored_inputs=("shard", "target", "tensor_parallel_size"))
# Constant, since both are in a map task's name and so in its cache key: no failure fails the node, and the recipe's ratio is
# enforced by gather_hidden_states.
LANE = {"concurrency": 1, "min_success_ratio": 0.0}
NAME = "extract_hidden_states"


@task(
    container_image=images.GPU,
    cache=CACHE,
    retries=3,
    interruptible=True,
    enable_deck=True,
    deck_fields=(),
    **ENGINE,
)
@stage
def extract_shard(
    shard: TokenShard,
    shard_digest: str,
    target: Target,
    target_digest: str,
    engine: EngineConfig,
    extract: ExtractConfig,
    tensor_parallel_size: int,
) -> HiddenStateShard:
    """Capture one shard where its key says it belongs: a retry or another run goes on behind the last finished chunk."""
    from eagle3.engine.engine import capture
    from eagle3.targets.properties import aux_layer_ids

    store.share_credentials()
    layer_ids = aux_layer_ids(extract.layer_ids, target.num_layers)
    info = {"target": target.name, "target_revision": target.revision, "target_digest": target_digest}
    deck = JobDeck(f"extract shard {shard.index}")
    with store.keyed_place(NAME, _key(shard_digest, target_digest, engine, extract)) as out:
        manifest = capture(
            target.directory.download(),
            shard.file.download(),
            out,
            layer_ids,
            engine,
            extract,
            info,
            tensor_parallel_size=tensor_parallel_size,
            watch=deck.watch(),
        )
    deck.finish(_figures(manifest))
    return HiddenStateShard(
        index=shard.index,
        directory=FlyteDirectory(out),
        rows=manifest["rows"],
        tokens=manifest["tokens"],
        supervised_tokens=manifest["supervised_tokens"],
        size_bytes=manifest["bytes"],
        layer_ids=layer_ids,
        digest=manifest["digest"],
    )


def _figures(manifest: dict[str, Any]) -> dict[str, str]:
    """What the Deck says of a finished shard."""
    return {
        **{name.replace("_", " "): f"{manifest[name]:,}" for name in ("rows", "tokens", "supervised_tokens")},
        "GB of states": f"{manifest['bytes'] / 1e9:.3f}",
        "bytes a token": f"{manifest['bytes'] / manifest['tokens']:,.0f}",
    }


def _key(shard_digest: str, target_digest: str, engine: EngineConfig, extract: ExtractConfig) -> str:
    settings = [engine.model_dump_json(), extract.model_dump_json()]
    return store.digest_of_digests([CACHE.version, shard_digest, target_digest, *settings])


@task(container_image=images.CPU, retries=2, **LIGHT)
@recoverable
def gather_hidden_states(
    shards: TokenShards, lanes: list[list[HiddenStateShard | None]], fanout: FanOutConfig
) -> HiddenStateShards:
    """Put the shards in order again: lane i holds the shards i, i + number of lanes, …; None where one failed for good.

    Raises:
        ValueError: if fewer than `fanout.min_success_ratio` of them are there.
    """
    found = {i + step * len(lanes): shard for i, lane in enumerate(lanes) for step, shard in enumerate(lane)}
    done = [shard for number in range(len(shards.shards)) if (shard := found[number]) is not None]
    lost = [shards.shards[number] for number in range(len(shards.shards)) if found[number] is None]
    if lost:
        named = ", ".join(
            f"shard {shard.index} ({shard.rows} rows, {redact(shard.file.path)})" for shard in lost[:8]
        )
        text = f"{len(lost)} of {len(shards.shards)} shards, {sum(s.rows for s in lost)} rows, could not be captured: {named}"
        if len(done) < fanout.min_success_ratio * len(shards.shards):
            asked = f"fanout.min_success_ratio is {fanout.min_success_ratio}"
            raise ValueError(f"{text}; {asked}: run again (what is finished is kept) or lower it")
        logger.warning("%s; training goes on without them", text)
    # Two shards that hold the same rows come from the cache under one index.
    ordered = [replace(shard, index=i) for i, shard in enumerate(done)]
    return HiddenStateShards(
        ordered, ordered[0].layer_ids, store.digest_of_digests(shard.digest for shard in ordered)
    )


@dynamic(container_image=images.CPU, retries=2, **DYNAMIC)
@recoverable
def extract_hidden_states(
    shards: TokenShards,
    target: Target,
    engine: EngineConfig,
    extract: ExtractConfig,
    fanout: FanOutConfig,
    resources: ResourcesConfig,
) -> HiddenStateShards:
    """Run every shard through the target, in as many lanes as there are replicas: a server captures nothing.

    Raises:
        ValueError: if the states do not fit on the local disk.
    """
    check_room(shards, target, engine, extract)
    num_lanes = min(len(shards.shards), fanout.replicas)
    common = {
        "target": target,
        "target_digest": target.digest,
        "engine": engine,
        "extract": extract,
        "tensor_parallel_size": fanout.tensor_parallel_size,
    }
    pod = replica_pod(fanout.model_copy(update={"server_urls": []}), resources)
    lanes: list[Any] = []
    for i in range(num_lanes):
        lane = shards.shards[i::num_lanes]
        if fanout.min_success_ratio == 1:
            lanes.append(_strict_lane(lane, common, pod))
        elif store.is_local():
            lanes.append([_local_attempt(shard, common) for shard in lane])
        else:
            lanes.append(_tolerant_lane(lane, common, pod))
    return cast(HiddenStateShards, gather_hidden_states(shards=shards, lanes=lanes, fanout=fanout))


def _strict_lane(lane: list[TokenShard], common: dict[str, Any], pod: Pod) -> list[Any]:
    """One node a shard, one after the other."""
    nodes: list[Any] = []
    for shard in lane:
        node = pod.node(extract_shard, shard=shard, shard_digest=shard.digest, **common)
        if nodes:
            nodes[-1] >> node
        nodes.append(node)
    return nodes


def _tolerant_lane(lane: list[TokenShard], common: dict[str, Any], pod: Pod) -> Any:
    """One map node, which a failed shard does not fail."""
    run_lane = map_task(functools.partial(after_template(extract_shard, pod.template), **common), **LANE)
    return run_lane(shard=lane, shard_digest=[shard.digest for shard in lane]).with_overrides(**pod.overrides)


def _local_attempt(shard: TokenShard, common: dict[str, Any]) -> Any:
    """Locally a task runs when it is called. Settings that cannot work fail every shard, and the run."""
    try:
        return extract_shard(shard=shard, shard_digest=shard.digest, **common)
    except ValueError:
        raise
    except Exception as e:
        logger.warning("shard %d could not be captured: %s", shard.index, e)
        return None


def check_room(shards: TokenShards, target: Target, engine: EngineConfig, extract: ExtractConfig) -> None:
    """Say how many bytes the states take; locally, refuse what does not fit beside what is captured already."""
    from eagle3.shards.hidden_states import hidden_state_bytes
    from eagle3.targets.properties import aux_layer_ids

    num_aux = len(aux_layer_ids(extract.layer_ids, target.num_layers))
    tokens, supervised = sum(s.tokens for s in shards.shards), sum(s.supervised_tokens for s in shards.shards)
    needed = hidden_state_bytes(tokens, supervised, num_aux, target.hidden_size, extract.encoding)
    text = (
        f"states of {tokens} tokens as {extract.encoding}: at most {needed / 1e9:.3f} GB before compression"
    )
    if store.is_local():
        free = store.free_bytes()
        text += f"; {store.root()} has {free / 1e9:.3f} GB free"
        keys = {_key(shard.digest, target.digest, engine, extract) for shard in shards.shards}
        if needed > free + sum(store.taken(NAME, key) for key in keys):
            raise ValueError(f"{text}: free some, train on fewer prompts, or set extract.encoding to fp8")
    print(text, flush=True)
