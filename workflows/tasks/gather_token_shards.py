"""The answered shards of a fan-out as one value."""

from collections import Counter
from dataclasses import replace

from flytekit import task

import images
from workflows.flyte import store
from workflows.flyte.interfaces import TokenShard, TokenShards
from workflows.flyte.pods import LIGHT
from workflows.flyte.stage import recoverable


@task(container_image=images.CPU, retries=2, **LIGHT)
@recoverable
def gather_token_shards(stage: str, before: list[TokenShard], shards: list[TokenShard]) -> TokenShards:
    """Put the shards in order behind those of earlier stages, and tell what became of the stage's prompts."""
    from eagle3.regenerate.generator import check_any_left, outcomes_text

    accounts = sum((Counter(shard.accounts) for shard in shards), Counter[str]())
    if accounts:
        print(f"{stage}: {outcomes_text(accounts)}", flush=True)
    left = [shard for shard in (*before, *shards) if shard.rows]
    total = sum((Counter(shard.accounts) for shard in before), accounts)
    if accounts:
        check_any_left(len(left), dict(total))
    # Two shards that hold the same rows come from the cache under one index.
    ordered = [replace(shard, index=i) for i, shard in enumerate(left)]
    return TokenShards(ordered, store.digest_of_digests(shard.digest for shard in ordered), dict(total))
