"""extract: the engine's hidden states for every token, one engine task a shard."""

from dataclasses import replace
from typing import Any

from flytekit import Cache, dynamic, task
from flytekit.types.directory import FlyteDirectory

from eagle3.config.engine import EngineConfig, ExtractConfig
from workflows.flyte import store
from workflows.flyte.fan_out import fan_out
from workflows.flyte.interfaces import HiddenStateShard, HiddenStateShards, Target, TokenShard, TokenShards
from workflows.flyte.live import JobDeck
from workflows.flyte.pods import DECK, DYNAMIC, ENGINE, LIGHT, engine_pod
from workflows.flyte.recipe import Recipe
from workflows.flyte.stage import recoverable, stage

CACHE = Cache(version="3", ignored_inputs=("shard", "target", "tensor_parallel_size"))
NAME = "extract_hidden_states"


@task(cache=CACHE, **ENGINE, **DECK)
@stage
def extract_shard(
    shard: TokenShard,
    shard_digest: str,
    target: Target,
    target_digest: str,
    engine: EngineConfig,
    extract: ExtractConfig,
    tensor_parallel_size: int,
) -> HiddenStateShard:
    """Capture one shard into the directory of its key: a retry or another run resumes after the last finished
    chunk."""
    from eagle3.engine.engine import capture
    from eagle3.engine.interface import EngineSettings
    from eagle3.targets.properties import aux_layer_ids

    store.share_credentials()
    layer_ids = aux_layer_ids(extract.layer_ids, target.num_layers)
    info = {"target": target.name, "target_revision": target.revision, "target_digest": target_digest}
    deck = JobDeck(f"extract shard {shard.index}")
    with store.keyed_uri(NAME, _key(shard_digest, target_digest, engine, extract)) as out:
        settings = EngineSettings.from_dirs(
            target.directory.download(),
            engine,
            layer_ids=layer_ids,
            tensor_parallel_size=tensor_parallel_size,
        )
        manifest = capture(settings, shard.file.download(), out, extract, info, deck.watch())
    deck.finish(_statistics(manifest))
    return HiddenStateShard(
        index=shard.index,
        directory=FlyteDirectory(out),
        rows=manifest["rows"],
        tokens=manifest["tokens"],
        supervised_tokens=manifest["supervised_tokens"],
        size_bytes=manifest["bytes"],
        layer_ids=layer_ids,
        digest=manifest["digest"],
    )


def _statistics(manifest: dict[str, Any]) -> dict[str, str]:
    """What the Deck shows of a finished shard."""
    return {
        **{name.replace("_", " "): f"{manifest[name]:,}" for name in ("rows", "tokens", "supervised_tokens")},
        "GB of states": f"{manifest['bytes'] / 1e9:.3f}",
        "bytes a token": f"{manifest['bytes'] / manifest['tokens']:,.0f}",
    }


def _key(shard_digest: str, target_digest: str, engine: EngineConfig, extract: ExtractConfig) -> str:
    settings = [engine.model_dump_json(), extract.model_dump_json()]
    return store.digest_of_digests([CACHE.version, shard_digest, target_digest, *settings])


@task(**LIGHT)
@recoverable
def gather_hidden_states(shards: list[HiddenStateShard]) -> HiddenStateShards:
    """Number the shards: two that hold the same rows come from the cache under one index."""
    ordered = [replace(shard, index=i) for i, shard in enumerate(shards)]
    digest = store.digest_of_digests(shard.digest for shard in ordered)
    return HiddenStateShards(ordered, ordered[0].layer_ids, digest)


@dynamic(**DYNAMIC)
@recoverable
def extract_hidden_states(shards: TokenShards, target: Target, recipe: Recipe) -> HiddenStateShards:
    """Run every shard through the target, on engines of our own: a server captures nothing.

    Raises:
        ValueError: if the states do not fit on the local disk.
    """
    check_room(shards, target, recipe)
    pod = engine_pod(recipe)

    def start(shard: TokenShard, _: int) -> Any:
        return pod.node(
            extract_shard,
            shard=shard,
            shard_digest=shard.digest,
            target=target,
            target_digest=target.digest,
            engine=recipe.engine,
            extract=recipe.extract,
            tensor_parallel_size=recipe.fanout.tensor_parallel_size,
        )

    captured = fan_out(shards.shards, recipe.fanout.replicas, start)
    return gather_hidden_states(shards=captured)


def check_room(shards: TokenShards, target: Target, recipe: Recipe) -> None:
    """Print the size of the states; locally, refuse states that do not fit on the disk."""
    from eagle3.shards.hidden_states import hidden_state_bytes
    from eagle3.targets.properties import aux_layer_ids

    encoding = recipe.extract.encoding
    num_aux = len(aux_layer_ids(recipe.extract.layer_ids, target.num_layers))
    tokens = sum(shard.tokens for shard in shards.shards)
    supervised = sum(shard.supervised_tokens for shard in shards.shards)
    needed = hidden_state_bytes(tokens, supervised, num_aux, target.hidden_size, encoding)
    text = f"states of {tokens} tokens as {encoding}: at most {needed / 1e9:.3f} GB before compression"
    if store.is_local():
        free = store.free_bytes()
        text += f"; {store.root()} has {free / 1e9:.3f} GB free"
        digests = {shard.digest for shard in shards.shards}
        keys = [_key(digest, target.digest, recipe.engine, recipe.extract) for digest in digests]
        if needed > free + sum(store.taken(NAME, key) for key in keys):
            raise ValueError(f"{text}: free some, train on fewer prompts, or set extract.encoding to fp8")
    print(text, flush=True)
