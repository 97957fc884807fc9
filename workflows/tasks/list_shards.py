"""The end of a run that stops early: list its shards, in the terminal and in a file from which another run
starts."""

from typing import Any

from flytekit import task
from flytekit.types.file import FlyteFile

from workflows.flyte import store
from workflows.flyte.interfaces import HiddenStateShard, HiddenStateShards, Target, TokenShard, TokenShards
from workflows.flyte.pods import LIGHT
from workflows.flyte.recipe import Recipe
from workflows.flyte.run_dir import run_dir, write_text
from workflows.flyte.stage import recoverable
from workflows.tasks.take_shards import identity


@task(**LIGHT)
@recoverable
def list_token_shards(recipe: Recipe, target: Target, shards: TokenShards) -> tuple[TokenShards, FlyteFile]:
    """Write token_shards.json: into runs/<run_name> here, into the cluster's storage in a pod."""
    entries = [_entry(shard, store.location(shard.file)) for shard in shards.shards]
    return shards, _list(recipe.run_name, "token_shards", target, entries)


@task(**LIGHT)
@recoverable
def list_hidden_states(
    recipe: Recipe, target: Target, states: HiddenStateShards
) -> tuple[HiddenStateShards, FlyteFile]:
    """Write hidden_states.json: into runs/<run_name> here, into the cluster's storage in a pod."""
    entries = [_entry(shard, store.location(shard.directory)) for shard in states.shards]
    return states, _list(recipe.run_name, "hidden_states", target, entries)


def _entry(shard: TokenShard | HiddenStateShard, uri: str) -> dict[str, Any]:
    counts = {name: getattr(shard, name) for name in ("rows", "tokens", "supervised_tokens")}
    return {"place": uri, **counts, "digest": shard.digest}


def _list(run_name: str, kind: str, target: Target, shards: list[dict[str, Any]]) -> FlyteFile:
    from eagle3.shards.existing import listing

    text = listing(kind, identity(target), shards)
    name = f"{kind}.json"
    if store.is_local():
        path = run_dir(run_name) / name
        write_text(path, text)
        made = FlyteFile(str(path))
    else:
        # Stored by the task itself, so that the log can say where: what flytekit uploads gets its name when
        # the task is over.
        made = FlyteFile.new_remote_file(name)
        with made.open("w") as file:
            file.write(text)
    print(text, f"{kind}: {len(shards)}, listed in {made.path}", sep="\n", flush=True)
    return made
