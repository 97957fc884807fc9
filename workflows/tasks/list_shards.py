"""The end of a run that stops early: where its shards lie, in the terminal and as a listing from which another run starts."""

from typing import Any

from flytekit import task

import images
from workflows import store
from workflows.interfaces import HiddenStateShard, HiddenStateShards, Target, TokenShard, TokenShards
from workflows.resources import LIGHT
from workflows.summary import run_dir, write_text
from workflows.tasks.take_shards import identity


@task(container_image=images.CPU, **LIGHT)
def list_token_shards(run_name: str, target: Target, shards: TokenShards) -> TokenShards:
    """Write runs/<run_name>/token_shards.json."""
    _list(run_name, "token_shards", target, [_entry(shard, store.location(shard.file)) for shard in shards.shards])
    return shards


@task(container_image=images.CPU, **LIGHT)
def list_hidden_states(run_name: str, target: Target, states: HiddenStateShards) -> HiddenStateShards:
    """Write runs/<run_name>/hidden_states.json."""
    _list(run_name, "hidden_states", target, [_entry(shard, store.location(shard.directory)) for shard in states.shards])
    return states


def _entry(shard: TokenShard | HiddenStateShard, place: str) -> dict[str, Any]:
    counts = {name: getattr(shard, name) for name in ("rows", "tokens", "supervised_tokens")}
    return {"place": place, **counts, "digest": shard.digest}


def _list(run_name: str, kind: str, target: Target, shards: list[dict[str, Any]]) -> None:
    from eagle3.existing import listing

    text = listing(kind, identity(target), shards)
    path = run_dir(run_name) / f"{kind}.json"
    write_text(path, text)
    print(text, f"{kind}: {len(shards)}, listed in {path}", sep="\n", flush=True)
