"""The answered shards of a fan-out as one value."""

from collections import Counter
from dataclasses import replace

from flytekit import task

from workflows.flyte import store
from workflows.flyte.interfaces import TokenShard, TokenShards
from workflows.flyte.pods import LIGHT
from workflows.flyte.stage import recoverable


@task(**LIGHT)
@recoverable
def gather_token_shards(shards: list[TokenShard]) -> TokenShards:
    """Number the shards that have a row, and print what became of the prompts of all."""
    from eagle3.regenerate.generator import check_any_left, outcomes_text

    outcomes = dict(sum((Counter(shard.accounts) for shard in shards), Counter[str]()))
    left = [shard for shard in shards if shard.rows]
    if outcomes:
        print(f"regenerate_responses: {outcomes_text(outcomes)}", flush=True)
        check_any_left(len(left), outcomes)
    # Two shards that hold the same rows come from the cache under one index.
    ordered = [replace(shard, index=i) for i, shard in enumerate(left)]
    return TokenShards(ordered, store.digest_of_digests(shard.digest for shard in ordered), outcomes)
