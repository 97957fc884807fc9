"""regenerate: the target's own answers, one engine task a shard."""

import json
import logging
from dataclasses import replace
from typing import Any, cast

from flytekit import Cache, dynamic, task
from flytekit.types.file import FlyteFile

import images
from eagle3.config import EngineConfig, ExtractConfig, FanOutConfig, RegenerateConfig, VocabConfig
from eagle3.resources import ResourcesConfig
from eagle3.target.properties import aux_layer_ids
from workflows import store
from workflows.interfaces import PreparedData, Target, TokenShard, TokenShards
from workflows.resources import DYNAMIC, ENGINE, LIGHT, replica_overrides
from workflows.stage import stage

logger = logging.getLogger("eagle3")


CACHE = Cache(version="1", ignored_inputs=("shard", "target", "server_url", "tensor_parallel_size"))


@task(container_image=images.GPU, cache=CACHE, retries=3, interruptible=True, **ENGINE)
@stage
def regenerate_shard(
    shard: TokenShard,
    shard_digest: str,
    target: Target,
    target_digest: str,
    engine: EngineConfig,
    regenerate: RegenerateConfig,
    server_url: str,
    tensor_parallel_size: int,
) -> TokenShard:
    from eagle3.data.regenerate import attach_answers, waiting_rows
    from eagle3.shards import read_token_shard, write_token_shard
    from eagle3.target.engine import generate

    rows = read_token_shard(shard.file.download())
    waiting = waiting_rows(rows)
    if not waiting:
        return shard
    generation = generate(
        target.directory.download(),
        [row.token_ids for row in waiting],
        engine,
        temperature=regenerate.temperature,
        top_p=regenerate.top_p,
        max_new_tokens=regenerate.max_new_tokens,
        seed=regenerate.seed,
        tensor_parallel_size=tensor_parallel_size,
        server_url=server_url,
    )
    answered = attach_answers(rows, generation.answers)
    too_short = len(rows) - len(answered)
    logger.info(
        "shard %d: %d of %d prompts answered, the other answers are too short",
        shard.index,
        len(waiting) - too_short,
        len(waiting),
    )
    path = store.new_dir("regenerate_responses") / f"shard-{shard.index:05d}.parquet"
    written = write_token_shard(path, answered)
    return TokenShard(shard.index, FlyteFile(str(path)), written.rows, written.tokens, written.supervised_tokens, written.digest)


def _check_initial(init_from: str, init_digest: str, target: Target, layer_ids: list[int]) -> None:
    """Refuse an initial draft whose settings do not fit; reads two JSON files, no weights."""
    import fsspec

    from eagle3.draft.initial import check_settings, read_settings

    store.share_credentials()
    with fsspec.open(f"{store.location(target.directory)}/config.json") as f:
        config = json.load(f)
    check_settings(read_settings(init_from, init_digest, config), config, layer_ids)


@task(container_image=images.CPU, **LIGHT)
def gather_token_shards(shards: list[TokenShard]) -> TokenShards:
    """Put the shards in order: two that hold the same rows come from the cache under one index."""
    ordered = [replace(shard, index=i) for i, shard in enumerate(shards)]
    return TokenShards(ordered, store.digest_of_digests(shard.digest for shard in ordered))


@dynamic(container_image=images.CPU, **DYNAMIC)
def regenerate_responses(
    data: PreparedData,
    target: Target,
    engine: EngineConfig,
    regenerate: RegenerateConfig,
    vocab: VocabConfig,
    init_from: str,
    init_digest: str,
    extract: ExtractConfig,
    fanout: FanOutConfig,
    resources: ResourcesConfig,
) -> TokenShards:
    """Let the target answer every shard, `fanout.replicas` at a time; without regeneration the shards pass as they are.

    Raises:
        ValueError: on settings of later stages that this target cannot meet, before the first engine starts.
    """
    layer_ids = aux_layer_ids(extract.layer_ids, target.num_layers)
    if init_digest:
        _check_initial(init_from, init_digest, target, layer_ids)
    elif vocab.size > target.vocab_size:
        raise ValueError(
            f"draft vocab must not exceed the target's {target.vocab_size}, got {vocab.size}; lower vocab.size in the recipe"
        )
    if not regenerate.enabled:
        return cast(TokenShards, gather_token_shards(shards=data.shards))
    answered: list[Any] = []
    num_lanes = len(fanout.server_urls) or fanout.replicas
    for i, shard in enumerate(data.shards):
        node = regenerate_shard(
            shard=shard,
            shard_digest=shard.digest,
            target=target,
            target_digest=target.digest,
            engine=engine,
            regenerate=regenerate,
            server_url=fanout.server_urls[i % num_lanes] if fanout.server_urls else "",
            tensor_parallel_size=fanout.tensor_parallel_size,
        )
        if not store.is_local():
            node.with_overrides(**replica_overrides(fanout, resources))
        if i >= num_lanes:
            answered[i - num_lanes] >> node
        answered.append(node)
    return cast(TokenShards, gather_token_shards(shards=answered))
