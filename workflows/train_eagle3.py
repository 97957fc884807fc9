"""The whole chain as one workflow: from a recipe to a draft that vLLM loads, and its evaluation.

The other workflows stop early or start from existing shards. All use the stages of workflows/chain.py, so
they share cache entries:

    pyflyte run workflows/train_eagle3.py until_extract --recipe recipe.yaml
"""

from flytekit import workflow
from flytekit.types.directory import FlyteDirectory
from flytekit.types.file import FlyteFile

from workflows import chain
from workflows.flyte.interfaces import DraftCheckpoint, DraftExport, HiddenStateShards, TokenShards
from workflows.flyte.recipe import Recipe
from workflows.tasks.list_shards import list_hidden_states, list_token_shards


@workflow
def train_eagle3(recipe: Recipe) -> FlyteDirectory:
    """Train an EAGLE-3 draft on the target's own answers, export it and measure it."""
    start = chain.prepare(recipe)
    rows = chain.answer(start)
    return chain.finish(start, rows, chain.extract(start, rows)).summary


@workflow
def until_regenerate(recipe: Recipe) -> tuple[TokenShards, FlyteFile]:
    """Stop after the target's answers. Returns token shards and token_shards.json, which lists them."""
    start = chain.prepare(recipe)
    shards, listing = list_token_shards(recipe=recipe, target=start.target, shards=chain.answer(start))
    return shards, listing


@workflow
def until_extract(recipe: Recipe) -> tuple[HiddenStateShards, FlyteFile]:
    """Stop after vocabulary and hidden states. Returns the states and hidden_states.json, their list."""
    start = chain.prepare(recipe)
    rows = chain.answer(start)
    chain.choose_vocab(start, rows)
    states = chain.extract(start, rows)
    shards, listing = list_hidden_states(recipe=recipe, target=start.target, states=states)
    return shards, listing


@workflow
def until_train(recipe: Recipe) -> DraftCheckpoint:
    """Stop after training."""
    start = chain.prepare(recipe)
    rows = chain.answer(start)
    return chain.train(start, rows, chain.extract(start, rows)).checkpoint


@workflow
def until_export(recipe: Recipe) -> DraftExport:
    """Stop after the export."""
    start = chain.prepare(recipe)
    rows = chain.answer(start)
    return chain.export(start, chain.train(start, rows, chain.extract(start, rows)))


@workflow
def train_from_shards(recipe: Recipe, shards: list[str]) -> FlyteDirectory:
    """Start from token shards: paths or URLs of Parquet files, of directories of them or of
    token_shards.json.

    The target answers the rows that have no answer. The recipe's `prompts` and `data.sources` are not read.
    """
    start, rows = chain.from_token_shards(recipe, shards)
    return chain.finish(start, rows, chain.extract(start, rows)).summary


@workflow
def train_from_states(recipe: Recipe, shards: list[str]) -> FlyteDirectory:
    """Start from hidden states: paths or URLs of directories with manifest.json, of directories of these or
    of hidden_states.json.

    No engine answers or captures. The recipe's `prompts` and `data.sources` are not read.
    """
    start, rows, states = chain.from_hidden_states(recipe, shards)
    return chain.finish(start, rows, states).summary
