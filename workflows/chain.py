"""The stages of the chain. Each function adds the nodes of its stages to the workflow that calls it.

    resolve_inputs -> fetch_target -> prepare_data -> regenerate_responses
    regenerate_responses -> build_vocab           -> train_draft -> export_draft
                         \\> extract_hidden_states /
    export_draft -> evaluate_draft -> summarize_run

A stage's cache key has the content of its inputs (`*_digest`, `source_versions`) and its own settings. No key
has a URI, or a setting of where and how a stage runs, so all workflows share their cache entries.
The annotations name the types of the values; when Flyte compiles a workflow, the values are promises.
"""

from dataclasses import dataclass

from flytekit.types.directory import FlyteDirectory

from workflows.flyte.interfaces import (
    DraftCheckpoint,
    DraftExport,
    DraftVocab,
    EvaluationReport,
    GivenHiddenStates,
    GivenTokenShards,
    HiddenStateShards,
    PreparedData,
    Resolved,
    Target,
    TokenShard,
    TokenShards,
)
from workflows.flyte.recipe import Recipe
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
    """The inputs that all stages share."""

    recipe: Recipe
    resolved: Resolved
    target: Target
    data: PreparedData


@dataclass(frozen=True)
class Trained:
    vocab: DraftVocab
    checkpoint: DraftCheckpoint


@dataclass(frozen=True)
class Measured:
    draft: DraftExport
    report: EvaluationReport
    summary: FlyteDirectory


def prepare(recipe: Recipe, with_weights: bool = True) -> Start:
    """Prepare a recipe's prompts and sources; `with_weights=False` fetches the target without its weights."""
    resolved: Resolved = resolve_inputs(recipe=recipe)
    found = resolved.found
    fetch = fetch_target_node if with_weights else fetch_tokenizer
    target: Target = fetch(ref=found.target, target_digest=found.target.digest, recipe=recipe)
    data: PreparedData = prepare_data_node(
        prompts_digest=found.prompts_digest,
        source_versions=found.source_versions,
        heldout_digest=found.heldout_digest,
        target=target,
        target_digest=found.target.digest,
        data=resolved.data,
        regenerate=found.regenerate,
        recipe=recipe,
    )
    return Start(recipe, resolved, target, data)


def _prepare_heldout(recipe: Recipe) -> tuple[Resolved, Target, TokenShard]:
    """Prepare the held-out prompts only."""
    resolved: Resolved = resolve_without_data(recipe=recipe)
    found = resolved.found
    target: Target = fetch_target_node(ref=found.target, target_digest=found.target.digest, recipe=recipe)
    heldout: TokenShard = prepare_heldout(
        heldout_digest=found.heldout_digest,
        target=target,
        target_digest=found.target.digest,
        data=resolved.data,
        recipe=recipe,
    )
    return resolved, target, heldout


def from_token_shards(recipe: Recipe, shards: list[str]) -> tuple[Start, TokenShards]:
    """Start from existing token shards and answer those without answers. Returns all rows, too."""
    resolved, target, heldout = _prepare_heldout(recipe)
    given: GivenTokenShards = take_token_shards(places=shards, heldout=heldout, target=target, recipe=recipe)
    made = answer(Start(recipe, resolved, target, given.waiting))
    rows: TokenShards = join_token_shards(answered=given.answered, made=made)
    return Start(recipe, resolved, target, given.data), rows


def from_hidden_states(recipe: Recipe, shards: list[str]) -> tuple[Start, TokenShards, HiddenStateShards]:
    """Start from existing hidden states. Returns their rows and the states, too."""
    resolved, target, heldout = _prepare_heldout(recipe)
    given: GivenHiddenStates = take_hidden_states(
        places=shards, heldout=heldout, target=target, recipe=recipe
    )
    return Start(recipe, resolved, target, given.data), given.rows, given.states


def answer(start: Start) -> TokenShards:
    """Let the target answer the chats, then the tool tasks."""
    return regenerate_responses(data=start.data, target=start.target, recipe=start.recipe)


def choose_vocab(start: Start, rows: TokenShards) -> DraftVocab:
    """Choose the draft vocabulary from the answered rows."""
    return build_vocab(
        shards=rows,
        shards_digest=rows.digest,
        target=start.target,
        target_digest=start.resolved.found.target.digest,
        vocab=start.resolved.vocab,
        init_from=start.resolved.found.init_from,
        init_digest=start.resolved.found.init_digest,
    )


def extract(start: Start, rows: TokenShards) -> HiddenStateShards:
    """Capture the hidden states of the answered rows."""
    return extract_hidden_states(shards=rows, target=start.target, recipe=start.recipe)


def train(start: Start, rows: TokenShards, states: HiddenStateShards) -> Trained:
    """Choose the vocabulary and train."""
    vocab = choose_vocab(start, rows)
    checkpoint: DraftCheckpoint = train_draft_node(
        states=states,
        states_digest=states.digest,
        vocab=vocab,
        vocab_digest=vocab.digest,
        target=start.target,
        target_digest=start.resolved.found.target.digest,
        init_from=start.resolved.found.init_from,
        init_digest=start.resolved.found.init_digest,
        train=start.resolved.train,
        recipe=start.recipe,
    )
    return Trained(vocab, checkpoint)


def export(start: Start, trained: Trained) -> DraftExport:
    """Write the directory that vLLM loads."""
    return export_draft(
        checkpoint=trained.checkpoint,
        checkpoint_digest=trained.checkpoint.digest,
        vocab=trained.vocab,
        vocab_digest=trained.vocab.digest,
        target=start.target,
        target_digest=start.resolved.found.target.digest,
        public_name=start.resolved.found.public_name,
        export=start.resolved.export,
    )


def evaluate(start: Start, draft: DraftExport) -> EvaluationReport:
    """Measure an exported draft on the held-out prompts."""
    return evaluate_draft_node(
        draft=draft,
        draft_digest=draft.digest,
        heldout=start.data.heldout,
        heldout_digest=start.data.heldout.digest,
        target=start.target,
        target_digest=start.resolved.found.target.digest,
        engine=start.resolved.engine,
        evaluate=start.resolved.evaluate,
        recipe=start.recipe,
    )


def finish(start: Start, rows: TokenShards, states: HiddenStateShards) -> Measured:
    """Run the stages after extraction: train, export, evaluate, summarize."""
    trained = train(start, rows, states)
    draft = export(start, trained)
    report = evaluate(start, draft)
    described: FlyteDirectory = describe_rows(
        shards=rows,
        shards_digest=rows.digest,
        target=start.target,
        target_digest=start.resolved.found.target.digest,
    )
    summary: FlyteDirectory = summarize_run(
        recipe=start.recipe,
        found=start.resolved.found,
        model=start.target,
        prepared=start.data,
        rows=rows,
        described=described,
        draft_vocab=trained.vocab,
        states=states,
        checkpoint=trained.checkpoint,
        draft=draft,
        evaluation=report,
    )
    return Measured(draft, report, summary)
