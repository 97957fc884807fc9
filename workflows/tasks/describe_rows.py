"""Describe the rows of a run for its report pages: statistics, samples and token counts by source."""

from flytekit import Cache, task
from flytekit.types.directory import FlyteDirectory

from workflows.flyte import store
from workflows.flyte.interfaces import Target, TokenShards
from workflows.flyte.pods import DATA
from workflows.flyte.stage import stage

NUM_SAMPLES = 8


@task(cache=Cache(version="2", ignored_inputs=("shards", "target")), **DATA)
@stage
def describe_rows(
    shards: TokenShards, shards_digest: str, target: Target, target_digest: str
) -> FlyteDirectory:
    """Go through all shards, one at a time; cached, so that a rerun reads none and loads no tokenizer."""
    from eagle3.data.chat import load_chat_tokenizer
    from eagle3.data.describe import describe_rows, write_description
    from eagle3.shards.tokens import read_token_shard
    from eagle3.targets.properties import end_of_turn_ids

    target_dir, out = target.directory.download(), store.new_dir("describe_rows")
    rows = (row for shard in shards.shards for row in read_token_shard(shard.file.download()))
    description = describe_rows(
        rows, load_chat_tokenizer(target_dir), target.vocab_size, end_of_turn_ids(target_dir), NUM_SAMPLES
    )
    write_description(out, description)
    return FlyteDirectory(str(out))
