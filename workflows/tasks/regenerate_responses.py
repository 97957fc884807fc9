"""regenerate: the target's own answers, one engine task a shard."""

import json
from typing import cast

from flytekit import Cache, dynamic, task

import images
from eagle3.config.data import VocabConfig
from eagle3.config.engine import EngineConfig, ExtractConfig, FanOutConfig, RegenerateConfig
from eagle3.config.resources import ResourcesConfig
from eagle3.targets.properties import aux_layer_ids
from workflows.flyte import store
from workflows.flyte.fan_out import answer_shard, answering_key, in_lanes
from workflows.flyte.interfaces import PreparedData, Target, TokenShard, TokenShards
from workflows.flyte.pods import DYNAMIC, ENGINE, HUB, SERVER
from workflows.flyte.stage import recoverable, stage
from workflows.tasks.gather_token_shards import gather_token_shards

NAME = "regenerate_responses"
CACHE = Cache(version="3", ignored_inputs=("shard", "target", "server_url", "tensor_parallel_size"))


@task(
    container_image=images.GPU,
    cache=CACHE,
    retries=3,
    interruptible=True,
    enable_deck=True,
    deck_fields=(),
    **ENGINE,
    **SERVER,
)
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
    """Play the waiting conversations of one shard; the others keep the answers that they came with."""
    from eagle3.shards.tokens import read_token_shard

    if all(any(row.loss_mask) for row in read_token_shard(shard.file.download())):
        return shard
    key = answering_key(CACHE, shard_digest, target_digest, engine, regenerate)
    return answer_shard(NAME, key, shard, target, engine, regenerate, server_url, tensor_parallel_size)


def _check_initial(init_from: str, init_digest: str, target: Target, layer_ids: list[int]) -> None:
    """Refuse an initial draft whose settings do not fit; reads two JSON files, no weights."""
    import fsspec

    from eagle3.draft.initial import check_settings, read_settings

    store.share_credentials()
    with fsspec.open(f"{store.location(target.directory)}/config.json") as f:
        config = json.load(f)
    check_settings(read_settings(init_from, init_digest, config), config, layer_ids)


@dynamic(container_image=images.CPU, retries=2, **DYNAMIC, **HUB)
@recoverable
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
    """Let the target answer every chat, `fanout.replicas` shards at a time; without regeneration the shards pass as they are.

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
        return cast(TokenShards, gather_token_shards(stage=NAME, before=data.shards, shards=[]))
    inputs = {"target": target, "target_digest": target.digest, "engine": engine}
    answered = in_lanes(data.shards, regenerate_shard, regenerate, fanout, resources, **inputs)
    return cast(TokenShards, gather_token_shards(stage=NAME, before=[], shards=answered))
