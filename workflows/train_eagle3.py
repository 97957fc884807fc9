"""The whole chain as one workflow: prompts and a target in, a draft that vLLM loads and its measurement out.

Beside it, workflows that stop after a stage or start from what exists. All take the same recipe and are made of the same stages
(workflows/chain.py), so what one has made comes from the cache for the others:

    pyflyte run workflows/train_eagle3.py until_extract --inputs-file recipe.yaml
"""

from typing import cast

from flytekit.types.directory import FlyteDirectory
from flytekit.types.file import FlyteFile

from workflows import chain
from workflows.flyte.interfaces import DraftCheckpoint, DraftExport, HiddenStateShards, TokenShards
from workflows.recipe import Recipe, recipe_workflow
from workflows.tasks.list_shards import list_hidden_states, list_token_shards


@recipe_workflow
def train_eagle3(recipe: Recipe) -> FlyteDirectory:
    """Train, export and measure an EAGLE-3 draft for a target on the target's own answers."""
    start = chain.prepare(recipe)
    rows = chain.answer(recipe, start)
    return cast(FlyteDirectory, chain.finish(recipe, start, rows, chain.extract(recipe, start, rows)).summary)


@recipe_workflow
def until_regenerate(recipe: Recipe) -> tuple[TokenShards, FlyteFile]:
    """Stop with the target's answers: token shards, and token_shards.json, their listing: here in runs/<run_name>."""
    start = chain.prepare(recipe)
    rows = chain.answer(recipe, start)
    shards, listing = list_token_shards(run_name=recipe.run_name, target=start.model, shards=rows)
    return shards, listing


@recipe_workflow
def until_extract(recipe: Recipe) -> tuple[HiddenStateShards, FlyteFile]:
    """Stop with vocabulary and hidden states, and hidden_states.json, the listing of the latter: here in runs/<run_name>."""
    start = chain.prepare(recipe)
    rows = chain.answer(recipe, start)
    chain.choose_vocab(recipe, start, rows)
    states = chain.extract(recipe, start, rows)
    shards, listing = list_hidden_states(run_name=recipe.run_name, target=start.model, states=states)
    return shards, listing


@recipe_workflow
def until_train(recipe: Recipe) -> DraftCheckpoint:
    """Stop with the trained weights."""
    start = chain.prepare(recipe)
    rows = chain.answer(recipe, start)
    return cast(
        DraftCheckpoint, chain.train(recipe, start, rows, chain.extract(recipe, start, rows)).checkpoint
    )


@recipe_workflow
def until_export(recipe: Recipe) -> DraftExport:
    """Stop with the directory that vLLM loads, not measured."""
    start = chain.prepare(recipe)
    rows = chain.answer(recipe, start)
    return cast(
        DraftExport,
        chain.export(recipe, start, chain.train(recipe, start, rows, chain.extract(recipe, start, rows))),
    )


@recipe_workflow
def train_from_shards(recipe: Recipe, shards: list[str]) -> FlyteDirectory:
    """Start from token shards: Parquet files, directories of them or token_shards.json, by path or URL.

    Rows that wait for an answer get it first. The recipe's `prompts` and `data.sources` are left alone.
    """
    start, rows = chain.from_token_shards(recipe, shards)
    return cast(FlyteDirectory, chain.finish(recipe, start, rows, chain.extract(recipe, start, rows)).summary)


@recipe_workflow
def train_from_states(recipe: Recipe, shards: list[str]) -> FlyteDirectory:
    """Start from hidden states: directories with manifest.json, directories of them or hidden_states.json, by path or URL.

    Nothing is answered or captured. The recipe's `prompts` and `data.sources` are left alone.
    """
    start, rows, states = chain.from_hidden_states(recipe, shards)
    return cast(FlyteDirectory, chain.finish(recipe, start, rows, states).summary)
