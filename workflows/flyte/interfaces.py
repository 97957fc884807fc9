"""What passes between the stages: frozen dataclasses of files, counts and content digests.

A digest is the artefact's identity in every cache key; its path never is. No unions here: flytekit corrupts
them silently.
A named tuple is several outputs of one task: what is taken out of a dataclass can be handed to one node only,
since local runs resolve it in place.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

from flytekit.types.directory import FlyteDirectory
from flytekit.types.file import FlyteFile

from eagle3.config.data import DataConfig, VocabConfig
from eagle3.config.engine import EngineConfig, EvaluateConfig
from eagle3.config.training import ExportConfig, TrainConfig
from eagle3.planning.workload import SourceSurvey
from workflows.flyte.recipe import Recipe


@dataclass(frozen=True)
class TargetRef:
    """A target's identity, cheap to find: hub commit or content hash."""

    name: str
    revision: str
    digest: str


@dataclass(frozen=True)
class ResolvedInputs:
    """What every cache key starts from: content digests of the two prompt files and the target's identity.

    `source_versions`: hub commit or content digest of each of data.sources, then of each of data.excluded.
    `public_name` is the target's name in the export. `regenerate` says whether the target answers the prompts
    itself; prepare needs to know no more of that stage's settings. `init_from` is the URI of the draft that
    training starts from and `init_digest` its content, both empty when it starts afresh. `target_config` is
    the target's config.json; `surveys` and `num_heldout` say what the first rows of prompts, sources and
    held-out prompts hold, for a plan.
    """

    prompts_digest: str
    source_versions: list[str]
    heldout_digest: str
    target: TargetRef
    public_name: str
    regenerate: bool
    init_from: str
    init_digest: str
    target_config: str
    surveys: list[SourceSurvey]
    num_heldout: int


class Resolved(NamedTuple):
    """What a run starts from, and the recipe's blocks in the form that cache keys hold: no URIs, nothing of
    where and how a stage runs."""

    found: ResolvedInputs
    engine: EngineConfig
    data: DataConfig
    vocab: VocabConfig
    train: TrainConfig
    export: ExportConfig
    evaluate: EvaluateConfig


@dataclass(frozen=True)
class Target:
    """A target fetched: a directory with config, tokenizer and safetensors, `digest` as in its TargetRef.

    num_layers, vocab_size and hidden_size let later stages refuse impossible settings without fetching it.
    """

    name: str
    revision: str
    digest: str
    directory: FlyteDirectory
    num_layers: int
    vocab_size: int
    hidden_size: int


@dataclass(frozen=True)
class TokenShard:
    """One Parquet file of conversations (eagle3/shards/tokens.py). sources: the names in its rows. accounts:
    what became of its prompts, once they are answered."""

    index: int
    file: FlyteFile
    rows: int
    tokens: int
    supervised_tokens: int
    digest: str
    sources: list[str] = field(default_factory=list)
    accounts: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class PreparedData:
    """Training shards in source order, those of tool tasks apart, held-out prompts, and the data report
    (report.json: rows read, dropped by reason)."""

    shards: list[TokenShard]
    tool_tasks: list[TokenShard]
    heldout: TokenShard
    report: FlyteFile


@dataclass(frozen=True)
class TokenShards:
    """Shards after regeneration, in order; digest over theirs, accounts the sum of theirs."""

    shards: list[TokenShard]
    digest: str
    accounts: dict[str, int] = field(default_factory=dict)


class GivenTokenShards(NamedTuple):
    """Token shards that existed before the run. answered: those without a waiting row. waiting: the others,
    for the answering stages. data: all of them, for the summary."""

    answered: TokenShards
    waiting: PreparedData
    data: PreparedData


@dataclass(frozen=True)
class DraftVocab:
    """vocab.safetensors (d2t int64 [K], t2d bool [V], counts int64 [V]) and the share of supervised tokens it
    covers."""

    file: FlyteFile
    size: int
    coverage: float
    digest: str


@dataclass(frozen=True)
class HiddenStateShard:
    """One directory of chunks and a manifest (eagle3/shards/hidden_states.py)."""

    index: int
    directory: FlyteDirectory
    rows: int
    tokens: int
    supervised_tokens: int
    size_bytes: int
    layer_ids: list[int]
    digest: str


@dataclass(frozen=True)
class HiddenStateShards:
    """All hidden-state shards, in order; layer_ids are theirs, digest over theirs."""

    shards: list[HiddenStateShard]
    layer_ids: list[int]
    digest: str


class GivenHiddenStates(NamedTuple):
    """Hidden states that existed before the run, and the rows in them. data: these rows, for the summary."""

    states: HiddenStateShards
    rows: TokenShards
    data: PreparedData


@dataclass(frozen=True)
class DraftCheckpoint:
    """Draft weights with config (draft.json) and metrics.jsonl; the resumable checkpoint goes when training
    is over."""

    directory: FlyteDirectory
    digest: str


@dataclass(frozen=True)
class DraftExport:
    """The directory that vLLM loads."""

    directory: FlyteDirectory
    digest: str


@dataclass(frozen=True)
class EvaluationReport:
    """evaluation.json with every figure, and the export it measured: when that is gone, so is the
    measurement."""

    file: FlyteFile
    export: FlyteDirectory
    acceptance_length: float
    trainer_acceptance_length: float
    outputs_identical: bool
    acceptance_by_position: list[float] = field(default_factory=list)


class CurrentDraft(NamedTuple):
    """The draft that is served before a retraining. recipe: the retraining's; for a warm start its
    `train.init_from` is that draft. number: of its promotion, 0 for none. drafts: that draft, or none.
    target_digest: of its target, "" for none."""

    recipe: Recipe
    number: int
    drafts: list[DraftExport]
    target_digest: str


@dataclass(frozen=True)
class Promotion:
    """How a retraining ended. promoted: whether the new draft is served now. reason: why, or why not. export:
    the draft that is served now, "" for none; acceptance_length is the new draft's."""

    promoted: bool
    reason: str
    export: str
    acceptance_length: float
