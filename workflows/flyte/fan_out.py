"""What the two answering tasks share: one shard played by the target, and the shards of a fan-out dealt out to replicas."""

import logging
from collections.abc import Callable
from typing import Any

from flytekit import Cache
from flytekit.types.file import FlyteFile

from eagle3.config.engine import EngineConfig, FanOutConfig, RegenerateConfig
from eagle3.config.resources import ResourcesConfig
from workflows.flyte import store
from workflows.flyte.interfaces import Target, TokenShard
from workflows.flyte.live import JobDeck
from workflows.flyte.pods import replica_pod

logger = logging.getLogger("eagle3")


def answer_shard(
    name: str,
    key: str,
    shard: TokenShard,
    target: Target,
    engine: EngineConfig,
    regenerate: RegenerateConfig,
    server_url: str,
    tensor_parallel_size: int,
) -> TokenShard:
    """Let the target answer a shard; its answers are kept where the key says, so that another attempt asks only for the rest.

    Args:
        name: of the stage's directories.
        key: of everything that decides the answers.
    """
    from eagle3.engine.engine import play
    from eagle3.regenerate.generator import outcomes_text, warn_of_limit

    store.share_credentials()
    path = store.new_dir(name) / f"shard-{shard.index:05d}.parquet"
    deck = JobDeck(f"{name.partition('_')[0]} shard {shard.index}")
    with store.keyed_place(name, key) as log_place:
        made = play(
            target.directory.download(),
            shard.file.download(),
            path,
            log_place,
            engine,
            regenerate,
            tensor_parallel_size=tensor_parallel_size,
            server_url=server_url,
            watch=deck.watch(),
        )
    accounts = made.pop("counts")
    logger.info("shard %d: %s", shard.index, outcomes_text(accounts))
    names = ("rows", "tokens", "supervised_tokens")
    deck.finish({name.replace("_", " "): f"{made[name]:,}" for name in names}, outcomes_text(accounts))
    warn_of_limit(accounts, f"shard {shard.index}")
    # Without a row there is no new file; gather_token_shards leaves such a shard out.
    file = FlyteFile(str(path)) if made["rows"] else shard.file
    return TokenShard(shard.index, file, accounts=accounts, **made)


def answering_key(
    cache: Cache, shard_digest: str, target_digest: str, engine: EngineConfig, regenerate: RegenerateConfig
) -> str:
    """What an answering task is cached by, as the name of the place where its unfinished answers are kept."""
    settings = [engine.model_dump_json(), regenerate.model_dump_json()]
    return store.digest_of_digests([cache.version, shard_digest, target_digest, *settings])


def in_lanes(
    shards: list[TokenShard],
    task: Callable[..., Any],
    regenerate: RegenerateConfig,
    fanout: FanOutConfig,
    resources: ResourcesConfig,
    **inputs: Any,
) -> list[Any]:
    """One node a shard, in as many lanes as there are replicas or servers; a lane runs one after the other."""
    nodes: list[Any] = []
    num_lanes = len(fanout.server_urls) or fanout.replicas
    pod = replica_pod(fanout, resources)
    for i, shard in enumerate(shards):
        node = pod.node(
            task,
            shard=shard,
            shard_digest=shard.digest,
            regenerate=regenerate.for_sources(shard.sources),
            server_url=fanout.server_urls[i % num_lanes] if fanout.server_urls else "",
            tensor_parallel_size=fanout.tensor_parallel_size,
            **inputs,
        )
        if i >= num_lanes:
            nodes[i - num_lanes] >> node
        nodes.append(node)
    return nodes
