"""Read shards that existed before the run, with counts and digests from the files, and refuse wrong ones.

Never cached: a file may have changed since the last run. Later stages are cached by the digests found here.
"""

import json
from dataclasses import asdict

from flytekit import task
from flytekit.types.directory import FlyteDirectory
from flytekit.types.file import FlyteFile

from eagle3.uris import redact
from workflows.flyte import store
from workflows.flyte.interfaces import (
    GivenHiddenStates,
    GivenTokenShards,
    HiddenStateShard,
    HiddenStateShards,
    PreparedData,
    Target,
    TokenShard,
    TokenShards,
)
from workflows.flyte.pods import DATA, LIGHT
from workflows.flyte.recipe import Recipe
from workflows.flyte.stage import recoverable


@task(**DATA)
@recoverable
def take_token_shards(
    places: list[str], heldout: TokenShard, target: Target, recipe: Recipe
) -> GivenTokenShards:
    """Separate shards with answers from shards without.

    Raises:
        ValueError: on shards that do not fit, or that wait while regeneration is off.
    """
    from eagle3.shards.existing import find_token_shards
    from eagle3.shards.tokens import read_token_shard

    store.share_credentials()
    heldout_rows = read_token_shard(heldout.file.download())
    found = find_token_shards(places, identity(target), target.vocab_size, heldout_rows)
    waiting = [shard.uri for shard in found if shard.waits]
    if waiting and not recipe.regenerate.enabled:
        raise ValueError(
            f"{redact(waiting[0])}: rows wait for the target's answers; set regenerate.enabled to true"
        )
    shards = [TokenShard(i, FlyteFile(shard.uri), **asdict(shard.summary)) for i, shard in enumerate(found)]
    pairs = list(zip(shards, found, strict=True))
    answered = [shard for shard, seen in pairs if not seen.waits]
    chats = [shard for shard, seen in pairs if seen.waits and not seen.is_tool_tasks]
    tool_tasks = [shard for shard, seen in pairs if seen.is_tool_tasks]
    report = _report(shards, heldout)
    return GivenTokenShards(
        answered=_token_shards(answered),
        waiting=PreparedData(chats, tool_tasks, heldout, report),
        data=PreparedData(shards, [], heldout, report),
    )


@task(**DATA)
@recoverable
def take_hidden_states(
    places: list[str], heldout: TokenShard, target: Target, recipe: Recipe
) -> GivenHiddenStates:
    """Read manifests, and write token ids and masks of the chunks as token shards: the vocabulary is chosen
    by them.

    Raises:
        ValueError: on shards that do not fit.
    """
    from eagle3.shards.existing import find_hidden_states
    from eagle3.shards.tokens import read_token_shard, write_token_shard
    from eagle3.targets.properties import aux_layer_ids

    store.share_credentials()
    layer_ids = aux_layer_ids(recipe.extract.layer_ids, target.num_layers)
    heldout_rows = read_token_shard(heldout.file.download())
    out = store.new_dir("take_hidden_states")
    states = []
    rows = []
    found_shards = find_hidden_states(places, identity(target), layer_ids, target.vocab_size, heldout_rows)
    for i, found in enumerate(found_shards):
        manifest = found.manifest
        states.append(
            HiddenStateShard(
                index=i,
                directory=FlyteDirectory(found.uri),
                rows=manifest["rows"],
                tokens=manifest["tokens"],
                supervised_tokens=manifest["supervised_tokens"],
                size_bytes=manifest["bytes"],
                layer_ids=layer_ids,
                digest=manifest["digest"],
            )
        )
        path = out / f"shard-{i:05d}.parquet"
        rows.append(TokenShard(i, FlyteFile(str(path)), **asdict(write_token_shard(path, found.rows))))
    digest = store.digest_of_digests(shard.digest for shard in states)
    return GivenHiddenStates(
        states=HiddenStateShards(states, layer_ids, digest),
        rows=_token_shards(rows),
        data=PreparedData(rows, [], heldout, _report(rows, heldout)),
    )


@task(**LIGHT)
@recoverable
def join_token_shards(answered: TokenShards, made: TokenShards) -> TokenShards:
    """The shards that had their answers, then those that got them now."""
    return _token_shards([*answered.shards, *made.shards], made.accounts)


def identity(target: Target) -> dict[str, str]:
    """Name, revision and digest."""
    return {"name": target.name, "revision": target.revision, "digest": target.digest}


def _token_shards(shards: list[TokenShard], accounts: dict[str, int] | None = None) -> TokenShards:
    return TokenShards(shards, store.digest_of_digests(shard.digest for shard in shards), accounts or {})


def _report(shards: list[TokenShard], heldout: TokenShard) -> FlyteFile:
    """The data report of a run that prepared nothing but its held-out prompts."""
    rows = sum(shard.rows for shard in shards)
    report = {
        "rows_read": rows,
        "rows_kept": rows,
        "dropped": {},
        "truncated": 0,
        "tokens": sum(shard.tokens for shard in shards),
        "supervised_tokens": sum(shard.supervised_tokens for shard in shards),
        "sources": {},
        "heldout": {},
        "prompts": {"train": rows, "heldout": heldout.rows},
        "samples": [],
    }
    path = store.new_dir("given_data") / "report.json"
    path.write_text(json.dumps(report, indent=1))
    return FlyteFile(str(path))
