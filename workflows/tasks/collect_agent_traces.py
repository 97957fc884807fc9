"""regenerate, for tool tasks: the target calls the tools, recorded results answer it, one engine task a shard."""

from typing import cast

from flytekit import Cache, dynamic, task

import images
from eagle3.config.engine import EngineConfig, FanOutConfig, RegenerateConfig
from eagle3.config.resources import ResourcesConfig
from workflows.flyte.fan_out import answer_shard, answering_key, in_lanes
from workflows.flyte.interfaces import PreparedData, Target, TokenShard, TokenShards
from workflows.flyte.pods import DYNAMIC, ENGINE, SERVER
from workflows.flyte.stage import recoverable, stage
from workflows.tasks.gather_token_shards import gather_token_shards

NAME = "collect_agent_traces"
CACHE = Cache(version="2", ignored_inputs=("shard", "target", "server_url", "tensor_parallel_size"))


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
def collect_shard(
    shard: TokenShard,
    shard_digest: str,
    target: Target,
    target_digest: str,
    engine: EngineConfig,
    regenerate: RegenerateConfig,
    server_url: str,
    tensor_parallel_size: int,
) -> TokenShard:
    """Play the tool tasks of one shard."""
    key = answering_key(CACHE, shard_digest, target_digest, engine, regenerate)
    return answer_shard(NAME, key, shard, target, engine, regenerate, server_url, tensor_parallel_size)


@dynamic(container_image=images.CPU, retries=2, **DYNAMIC)
@recoverable
def collect_agent_traces(
    data: PreparedData,
    chats: TokenShards,
    target: Target,
    engine: EngineConfig,
    regenerate: RegenerateConfig,
    fanout: FanOutConfig,
    resources: ResourcesConfig,
) -> TokenShards:
    """Let the target play every tool task, `fanout.replicas` shards at a time; returns the shards of chats and, behind, these."""
    inputs = {"target": target, "target_digest": target.digest, "engine": engine}
    traces = in_lanes(data.tool_tasks, collect_shard, regenerate, fanout, resources, **inputs)
    return cast(TokenShards, gather_token_shards(stage=NAME, before=chats.shards, shards=traces))
