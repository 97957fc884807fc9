"""The chain's stages as every workflow wires them: each function adds a stage's nodes to the workflow that calls it.

    resolve_inputs -> fetch_target -> prepare_data -> regenerate_responses
    regenerate_responses -> build_vocab           -> train_draft -> export_draft -> evaluate_draft -> summarize_run
                         \\> extract_hidden_states /

Every stage is cached by the content of what it reads (`*_digest`, `source_versions`) and its own settings; places, and where and
how a stage runs, are in no key (but that of prepare_heldout, the work of seconds). So a workflow that stops early, or starts from
what exists, shares its entries with all others.
"""

from dataclasses import dataclass
from typing import Any

from workflows.recipe import Recipe
from workflows.tasks.build_vocab import build_vocab
from workflows.tasks.describe_rows import describe_rows
from workflows.tasks.evaluate_draft import evaluate_draft_node
from workflows.tasks.export_draft import export_draft
from workflows.tasks.extract_hidden_states import extract_hidden_states
from workflows.tasks.fetch_target import fetch_target_node, fetch_tokenizer
from workflows.tasks.prepare_data import prepare_data_node
from workflows.tasks.prepare_heldout import prepare_heldout
from workflows.tasks.regenerate_responses import regenerate_responses
from workflows.tasks.resolve_inputs import resolve_inputs, resolve_without_data
from workflows.tasks.summarize_run import summarize_run
from workflows.tasks.take_shards import join_token_shards, take_hidden_states, take_token_shards
from workflows.tasks.train_draft import train_draft_node


@dataclass(frozen=True)
class Start:
    """What every stage reads. found: ResolvedInputs. model: Target. data: PreparedData. All are promises."""

    found: Any
    model: Any
    data: Any


@dataclass(frozen=True)
class Trained:
    """vocab: DraftVocab. checkpoint: DraftCheckpoint. Promises."""

    vocab: Any
    checkpoint: Any


@dataclass(frozen=True)
class Measured:
    """draft: DraftExport. report: EvaluationReport. summary: FlyteDirectory. Promises."""

    draft: Any
    report: Any
    summary: Any


def prepare(recipe: Recipe) -> Start:
    """From a recipe's prompts and sources."""
    found = resolve(recipe)
    model = _fetch_target(recipe, found)
    data = _prepare_data(recipe, found, model)
    return Start(found, model, data)


def prepare_alone(recipe: Recipe) -> Start:
    """The same, without the target's weights."""
    found = resolve(recipe)
    model = fetch_tokenizer(target=recipe.target, ref=found.target, target_digest=found.target.digest)
    return Start(found, model, _prepare_data(recipe, found, model))


def resolve(recipe: Recipe) -> Any:
    """ResolvedInputs, once the recipe has passed all checks."""
    return resolve_inputs(
        run_name=recipe.run_name, prompts=recipe.prompts, heldout=recipe.heldout, **recipe.blocks()
    )


def _fetch_target(recipe: Recipe, found: Any) -> Any:
    return fetch_target_node(
        target=recipe.target, ref=found.target, target_digest=found.target.digest, resources=recipe.resources
    )


def _prepare_data(recipe: Recipe, found: Any, model: Any) -> Any:
    return prepare_data_node(
        prompts=recipe.prompts,
        prompts_digest=found.prompts_digest,
        source_versions=found.source_versions,
        heldout=recipe.heldout,
        heldout_digest=found.heldout_digest,
        target=model,
        target_digest=found.target.digest,
        data=recipe.data,
        regenerate=found.regenerate,
        resources=recipe.resources,
    )


def _prepare_heldout(recipe: Recipe) -> tuple[Any, Any, Any]:
    """Inputs, target and held-out prompts alone; prompts and sources of the recipe are left alone."""
    found = resolve_without_data(run_name=recipe.run_name, heldout=recipe.heldout, **recipe.blocks())
    model = _fetch_target(recipe, found)
    heldout = prepare_heldout(
        heldout=recipe.heldout,
        heldout_digest=found.heldout_digest,
        target=model,
        target_digest=found.target.digest,
        data=recipe.data,
    )
    return found, model, heldout


def from_token_shards(recipe: Recipe, shards: list[str]) -> tuple[Start, Any]:
    """From token shards that exist; those that wait are answered. Returns the start and the rows: TokenShards."""
    found, model, heldout = _prepare_heldout(recipe)
    given = take_token_shards(places=shards, heldout=heldout, target=model, regenerate=recipe.regenerate)
    made = answer(recipe, Start(found, model, given.waiting))
    rows = join_token_shards(answered=given.answered, made=made)
    return Start(found, model, given.data), rows


def from_hidden_states(recipe: Recipe, shards: list[str]) -> tuple[Start, Any, Any]:
    """From hidden states that exist. Returns the start, their rows (TokenShards) and themselves (HiddenStateShards)."""
    found, model, heldout = _prepare_heldout(recipe)
    given = take_hidden_states(places=shards, heldout=heldout, target=model, extract=recipe.extract)
    return Start(found, model, given.data), given.rows, given.states


def answer(recipe: Recipe, start: Start) -> Any:
    """TokenShards with the target's answers: to chats, then to tool tasks."""
    return regenerate_responses(
        data=start.data,
        target=start.model,
        engine=recipe.engine,
        regenerate=recipe.regenerate,
        fanout=recipe.fanout,
        resources=recipe.resources,
    )


def choose_vocab(recipe: Recipe, start: Start, rows: Any) -> Any:
    """DraftVocab of the answered rows."""
    return build_vocab(
        shards=rows,
        shards_digest=rows.digest,
        target=start.model,
        target_digest=start.found.target.digest,
        vocab=recipe.vocab,
        init_from=start.found.init_from,
        init_digest=start.found.init_digest,
    )


def extract(recipe: Recipe, start: Start, rows: Any) -> Any:
    """HiddenStateShards of the answered rows."""
    return extract_hidden_states(
        shards=rows,
        target=start.model,
        engine=recipe.engine,
        extract=recipe.extract,
        fanout=recipe.fanout,
        resources=recipe.resources,
    )


def train(recipe: Recipe, start: Start, rows: Any, states: Any) -> Trained:
    """Vocabulary and checkpoint."""
    vocab = choose_vocab(recipe, start, rows)
    checkpoint = train_draft_node(
        states=states,
        states_digest=states.digest,
        vocab=vocab,
        vocab_digest=vocab.digest,
        target=start.model,
        target_digest=start.found.target.digest,
        init_from=start.found.init_from,
        init_digest=start.found.init_digest,
        train=recipe.train,
        resources=recipe.resources,
    )
    return Trained(vocab, checkpoint)


def export(recipe: Recipe, start: Start, trained: Trained) -> Any:
    """DraftExport of the checkpoint."""
    return export_draft(
        checkpoint=trained.checkpoint,
        checkpoint_digest=trained.checkpoint.digest,
        vocab=trained.vocab,
        vocab_digest=trained.vocab.digest,
        target=start.model,
        target_digest=start.found.target.digest,
        public_name=start.found.public_name,
        export=recipe.export,
    )


def evaluate(recipe: Recipe, start: Start, draft: Any) -> Any:
    """EvaluationReport of an export on the held-out prompts."""
    return evaluate_draft_node(
        draft=draft,
        draft_digest=draft.digest,
        heldout=start.data.heldout,
        heldout_digest=start.data.heldout.digest,
        target=start.model,
        target_digest=start.found.target.digest,
        engine=recipe.engine,
        evaluate=recipe.evaluate,
        fanout=recipe.fanout,
        resources=recipe.resources,
    )


def finish(recipe: Recipe, start: Start, rows: Any, states: Any) -> Measured:
    """Everything behind extraction: train, export, evaluate, summary."""
    trained = train(recipe, start, rows, states)
    draft = export(recipe, start, trained)
    report = evaluate(recipe, start, draft)
    described = describe_rows(
        shards=rows, shards_digest=rows.digest, target=start.model, target_digest=start.found.target.digest
    )
    summary = summarize_run(
        run_name=recipe.run_name,
        found=start.found,
        model=start.model,
        prepared=start.data,
        rows=rows,
        described=described,
        draft_vocab=trained.vocab,
        states=states,
        checkpoint=trained.checkpoint,
        draft=draft,
        evaluation=report,
        target=recipe.target,
        engine=recipe.engine,
        data=recipe.data,
        regenerate=recipe.regenerate,
        vocab=recipe.vocab,
        extract=recipe.extract,
        train=recipe.train,
        export=recipe.export,
        evaluate=recipe.evaluate,
        fanout=recipe.fanout,
    )
    return Measured(draft, report, summary)
