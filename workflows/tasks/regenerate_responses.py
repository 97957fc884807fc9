"""regenerate: the target's own answers to chats and tool tasks, one engine task a shard."""

import logging
from dataclasses import replace
from typing import Any

from flytekit import Cache, dynamic, task
from flytekit.types.file import FlyteFile

from eagle3.config.engine import EngineConfig, RegenerateConfig
from eagle3.regenerate.parsers import check_parsers
from workflows.flyte import store
from workflows.flyte.fan_out import fan_out
from workflows.flyte.interfaces import PreparedData, Target, TokenShard, TokenShards
from workflows.flyte.live import JobDeck
from workflows.flyte.pods import DECK, DYNAMIC, ENGINE, SERVER, answering_pod
from workflows.flyte.recipe import Recipe
from workflows.flyte.stage import recoverable, stage
from workflows.tasks.gather_token_shards import gather_token_shards

logger = logging.getLogger("eagle3")
NAME = "regenerate_responses"
CACHE = Cache(version="3", ignored_inputs=("shard", "target", "server_url", "tensor_parallel_size"))


@task(cache=CACHE, **ENGINE, **DECK, **SERVER)
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
    """Answer the waiting conversations of one shard; the others keep the answers that they came with.

    Answers are stored as they come, in a directory named by everything that decides them: another attempt
    asks for the rest.
    """
    from eagle3.engine import engine as target_engine
    from eagle3.engine.interface import EngineSettings
    from eagle3.regenerate.generator import outcomes_text, warn_of_limit
    from eagle3.shards.tokens import read_token_shard

    if all(any(row.loss_mask) for row in read_token_shard(shard.file.download())):
        return shard
    store.share_credentials()
    path = store.new_dir(NAME) / f"shard-{shard.index:05d}.parquet"
    keyed = [engine.model_dump_json(), regenerate.model_dump_json()]
    key = store.digest_of_digests([CACHE.version, shard_digest, target_digest, *keyed])
    deck = JobDeck(f"regenerate shard {shard.index}")
    with store.keyed_uri(NAME, key) as log_uri:
        settings = EngineSettings.from_dirs(
            target.directory.download(),
            engine,
            tensor_parallel_size=tensor_parallel_size,
            server_url=server_url,
        )
        made = target_engine.regenerate(
            settings, shard.file.download(), path, log_uri, regenerate, deck.watch()
        )
    outcomes = made.pop("counts")
    logger.info("shard %d: %s", shard.index, outcomes_text(outcomes))
    names = ("rows", "tokens", "supervised_tokens")
    deck.finish({name.replace("_", " "): f"{made[name]:,}" for name in names}, outcomes_text(outcomes))
    warn_of_limit(outcomes, f"shard {shard.index}")
    # Without a row there is no new file; gather_token_shards leaves such a shard out.
    file = FlyteFile(str(path)) if made["rows"] else shard.file
    return TokenShard(shard.index, file, accounts=outcomes, **made)


@dynamic(**DYNAMIC)
@recoverable
def regenerate_responses(data: PreparedData, target: Target, recipe: Recipe) -> TokenShards:
    """Let the target answer every chat and tool task; without regeneration the shards pass unchanged.

    Raises:
        ValueError: if there are tool tasks and no parser of tool calls.
    """
    check_parsers(recipe.regenerate, has_tools=bool(data.tool_tasks))
    # Tool tasks follow the chats: each prepared list counts its own shards from 0.
    shards = [replace(shard, index=i) for i, shard in enumerate([*data.shards, *data.tool_tasks])]
    if not recipe.regenerate.enabled:
        return gather_token_shards(shards=shards)
    pod = answering_pod(recipe)
    urls = recipe.fanout.server_urls

    def start(shard: TokenShard, slot: int) -> Any:
        return pod.node(
            regenerate_shard,
            shard=shard,
            shard_digest=shard.digest,
            target=target,
            target_digest=target.digest,
            engine=recipe.engine,
            regenerate=recipe.regenerate.for_sources(shard.sources),
            server_url=urls[slot] if urls else "",
            tensor_parallel_size=recipe.fanout.tensor_parallel_size,
        )

    answered = fan_out(shards, len(urls) or recipe.fanout.replicas, start)
    return gather_token_shards(shards=answered)
