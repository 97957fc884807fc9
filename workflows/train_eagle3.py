"""The whole chain as one workflow: a recipe in, a draft that vLLM loads and its measurement out.

The other workflows stop after a stage or start from what exists. All take the same recipe and are made of the
same stages (workflows/chain.py), so each takes from the cache what another has made:

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
    """Train, export and measure an EAGLE-3 draft for a target on the target's own answers."""
    start = chain.prepare(recipe)
    rows = chain.answer(start)
    return chain.finish(start, rows, chain.extract(start, rows)).summary


@workflow
def until_regenerate(recipe: Recipe) -> tuple[TokenShards, FlyteFile]:
    """Stop after the target's answers: token shards, and their listing, token_shards.json (here in
    runs/<run_name>)."""
    start = chain.prepare(recipe)
    shards, listing = list_token_shards(recipe=recipe, target=start.target, shards=chain.answer(start))
    return shards, listing


@workflow
def until_extract(recipe: Recipe) -> tuple[HiddenStateShards, FlyteFile]:
    """Stop after vocabulary and hidden states: the states, and their listing, hidden_states.json (here in
    runs/<run_name>)."""
    start = chain.prepare(recipe)
    rows = chain.answer(start)
    chain.choose_vocab(start, rows)
    states = chain.extract(start, rows)
    shards, listing = list_hidden_states(recipe=recipe, target=start.target, states=states)
    return shards, listing


@workflow
def until_train(recipe: Recipe) -> DraftCheckpoint:
    """Stop after training, with the weights."""
    start = chain.prepare(recipe)
    rows = chain.answer(start)
    return chain.train(start, rows, chain.extract(start, rows)).checkpoint


@workflow
def until_export(recipe: Recipe) -> DraftExport:
    """Stop after the export, with the directory that vLLM loads; nothing is measured."""
    start = chain.prepare(recipe)
    rows = chain.answer(start)
    return chain.export(start, chain.train(start, rows, chain.extract(start, rows)))


@workflow
def train_from_shards(recipe: Recipe, shards: list[str]) -> FlyteDirectory:
    """Start from token shards: Parquet files, directories of them or token_shards.json, by path or URL.

    Rows without an answer get one first. The recipe's `prompts` and `data.sources` are not read.
    """
    start, rows = chain.from_token_shards(recipe, shards)
    return chain.finish(start, rows, chain.extract(start, rows)).summary


@workflow
def train_from_states(recipe: Recipe, shards: list[str]) -> FlyteDirectory:
    """Start from hidden states: directories with manifest.json, directories of them or hidden_states.json, by
    path or URL.

    Nothing is answered or captured. The recipe's `prompts` and `data.sources` are not read.
    """
    start, rows, states = chain.from_hidden_states(recipe, shards)
    return chain.finish(start, rows, states).summary
