"""What the local cache already holds of a run: its chain of stages, looked up without running any.

A stage's key needs the results before it, so the walk ends where the first one is missing. A cluster's cache cannot be asked.
"""

from typing import TYPE_CHECKING, Any, TypeVar, cast

import msgpack
from flytekit import FlyteContextManager
from flytekit.core.local_cache import LocalTaskCache
from flytekit.core.type_engine import TypeEngine
from flytekit.models.literals import Binary, Literal, LiteralMap, Scalar

from workflows.flyte import store
from workflows.flyte.interfaces import (
    DraftCheckpoint,
    DraftExport,
    DraftVocab,
    EvaluationReport,
    HiddenStateShard,
    PreparedData,
    ResolvedInputs,
    TokenShard,
)
from workflows.tasks.build_vocab import build_vocab
from workflows.tasks.collect_agent_traces import collect_shard
from workflows.tasks.evaluate_draft import evaluate_draft
from workflows.tasks.export_draft import export_draft
from workflows.tasks.extract_hidden_states import extract_shard
from workflows.tasks.prepare_data import prepare_data
from workflows.tasks.regenerate_responses import regenerate_shard
from workflows.tasks.train_draft import train_draft

if TYPE_CHECKING:
    from eagle3.config.engine import RegenerateConfig
    from eagle3.planning.plan import RunSettings

T = TypeVar("T")
STAGES = ("prepare", "regenerate", "vocab", "extract", "train", "export", "evaluate")


def cached_stages(found: ResolvedInputs, cfg: "RunSettings") -> dict[str, str]:
    """What is there of each stage, as text."""
    from eagle3.data.sources import without_places

    state = dict.fromkeys(STAGES, "unknown before what it reads is made")
    prepared = cached_output(
        prepare_data,
        PreparedData,
        prompts_digest=found.prompts_digest,
        source_versions=found.source_versions,
        heldout_digest=found.heldout_digest,
        target_digest=found.target.digest,
        data=without_places(cfg.data),
        regenerate=found.regenerate,
    )
    state["prepare"] = _word(prepared)
    if prepared is None:
        return state
    shards = waiting = [*prepared.shards, *prepared.tool_tasks]
    state["regenerate"] = "not enabled"
    if cfg.regenerate.enabled:
        keyed = {"target_digest": found.target.digest, "engine": cfg.engine}
        shards = _answered_shards(regenerate_shard, prepared.shards, keyed, cfg.regenerate)
        shards += _answered_shards(collect_shard, prepared.tool_tasks, keyed, cfg.regenerate)
        state["regenerate"] = f"{len(shards)} of {len(waiting)} shards"
    if len(shards) == len(waiting):
        _add_states_and_vocab(found, cfg, prepared, shards, state)
    return state


def _add_states_and_vocab(
    found: ResolvedInputs,
    cfg: "RunSettings",
    prepared: PreparedData,
    shards: list[TokenShard],
    state: dict[str, str],
) -> None:
    """The two stages that read finished rows, and those behind."""
    target_digest = found.target.digest
    vocab = cached_output(
        build_vocab,
        DraftVocab,
        shards_digest=store.digest_of_digests(shard.digest for shard in shards),
        target_digest=target_digest,
        vocab=cfg.vocab,
        init_digest=found.init_digest,
    )
    state["vocab"] = _word(vocab)
    keyed = {"target_digest": target_digest, "engine": cfg.engine, "extract": cfg.extract}
    states = _cached_shards(extract_shard, HiddenStateShard, shards, keyed)
    state["extract"] = f"{len(states)} of {len(shards)} shards"
    if vocab is not None and len(states) == len(shards):
        _add_draft(found, cfg, prepared, states, vocab, state)


def _add_draft(
    found: ResolvedInputs,
    cfg: "RunSettings",
    prepared: PreparedData,
    states: list[HiddenStateShard],
    vocab: DraftVocab,
    state: dict[str, str],
) -> None:
    """Training, export and evaluation."""
    keyed: dict[str, Any] = {"target_digest": found.target.digest, "vocab_digest": vocab.digest}
    digest = store.digest_of_digests(shard.digest for shard in states)
    training = {
        "states_digest": digest,
        "init_digest": found.init_digest,
        "train": cfg.train.settings_of_result(),
    }
    trained = cached_output(train_draft, DraftCheckpoint, **keyed, **training)
    state["train"] = _word(trained)
    if trained is None:
        return
    exporting = {"checkpoint_digest": trained.digest, "public_name": found.public_name, "export": cfg.export}
    exported = cached_output(export_draft, DraftExport, **keyed, **exporting)
    state["export"] = _word(exported)
    if exported is None:
        return
    report = cached_output(
        evaluate_draft,
        EvaluationReport,
        draft_digest=exported.digest,
        heldout_digest=prepared.heldout.digest,
        target_digest=found.target.digest,
        engine=cfg.engine,
        evaluate=cfg.evaluate,
    )
    state["evaluate"] = _word(report)


def cached_output(task: Any, kind: type[T], **keyed: Any) -> T | None:
    """A task's output in the local cache, or None.

    Args:
        task: a cached task.
        kind: type of its one output.
        keyed: the inputs that are in its key, all of them.
    """
    ignored = task.metadata.cache_ignore_input_vars
    assert keyed.keys() == task.interface.inputs.keys() - set(ignored), task.name
    ctx = FlyteContextManager.current_context()
    inputs = {
        name: TypeEngine.to_literal(
            ctx, value, task.python_interface.inputs[name], task.interface.inputs[name].type
        )
        for name, value in keyed.items()
    }
    # A workflow passes strings on as attributes of earlier results, which flytekit packs; a @dynamic passes them plain.
    packed = inputs | {name: _packed(value) for name, value in keyed.items() if isinstance(value, str)}
    for literals in (inputs, packed):
        found = LocalTaskCache.get(task.name, task.metadata.cache_version, LiteralMap(literals), ignored)
        if found is not None:
            (literal,) = found.literals.values()
            return cast(T, TypeEngine.to_python_value(ctx, literal, kind))
    return None


def _packed(text: str) -> Literal:
    return Literal(scalar=Scalar(binary=Binary(value=msgpack.dumps(text), tag="msgpack")))


def _answered_shards(
    task: Any, shards: list[TokenShard], keyed: dict[str, Any], regenerate: "RegenerateConfig"
) -> list[TokenShard]:
    """The shards of an answering task, each by the sampling of its own sources."""
    keys = [keyed | {"regenerate": regenerate.for_sources(shard.sources)} for shard in shards]
    return [
        made
        for shard, key in zip(shards, keys, strict=True)
        for made in _cached_shards(task, TokenShard, [shard], key)
    ]


def _cached_shards(task: Any, kind: type[T], shards: list[TokenShard], keyed: dict[str, Any]) -> list[T]:
    """What is there for the shards, in order."""
    outputs = [cached_output(task, kind, shard_digest=shard.digest, **keyed) for shard in shards]
    return [output for output in outputs if output is not None]


def _word(output: Any) -> str:
    return "not yet" if output is None else "yes"
