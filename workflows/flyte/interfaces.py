"""The values that tasks pass to each other: frozen dataclasses of files, counts and content digests.

Cache keys have an artefact's digest, never its path. No field is a union: flytekit corrupts unions silently.
A named tuple is several outputs of one task. Use one if several nodes take the same output: a local run
changes a promise that comes from a dataclass field in place, so only one node can take it.
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
    """A target's name and version. digest: of the hub commit or of the content."""

    name: str
    revision: str
    digest: str


@dataclass(frozen=True)
class ResolvedInputs:
    """The versions of a run's inputs, for the cache keys, and a survey of its rows, for the plan.

    source_versions: hub commit or content digest of each of data.sources, then of each of data.excluded.
    public_name: the target's name in the export.
    regenerate: whether the target answers the prompts; prepare depends on no other setting of that stage.
    init_from, init_digest: URI and digest of the draft that training starts from; empty without one.
    target_config: the text of the target's config.json.
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
    """The versions of a run's inputs, and the recipe's blocks as cache keys have them: without URIs and
    without settings of where and how a stage runs."""

    found: ResolvedInputs
    engine: EngineConfig
    data: DataConfig
    vocab: VocabConfig
    train: TrainConfig
    export: ExportConfig
    evaluate: EvaluateConfig


@dataclass(frozen=True)
class Target:
    """A fetched target: a directory with config, tokenizer and safetensors. digest: that of its TargetRef."""

    name: str
    revision: str
    digest: str
    directory: FlyteDirectory
    num_layers: int
    vocab_size: int
    hidden_size: int


@dataclass(frozen=True)
class TokenShard:
    """One Parquet file of conversations (eagle3/shards/tokens.py). sources: the source names in its rows.
    accounts: number of prompts by outcome, after regeneration."""

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
    """Training shards in source order, shards of tool tasks, held-out prompts, and the data report
    (report.json)."""

    shards: list[TokenShard]
    tool_tasks: list[TokenShard]
    heldout: TokenShard
    report: FlyteFile


@dataclass(frozen=True)
class TokenShards:
    """Shards after regeneration. digest: of their digests, in order; accounts: summed."""

    shards: list[TokenShard]
    digest: str
    accounts: dict[str, int] = field(default_factory=dict)


class GivenTokenShards(NamedTuple):
    """Token shards that existed before the run. answered: shards in which every row has an answer. waiting:
    the others. data: all of them, for the summary."""

    answered: TokenShards
    waiting: PreparedData
    data: PreparedData


@dataclass(frozen=True)
class DraftVocab:
    """vocab.safetensors (d2t int64 [K], t2d bool [V], counts int64 [V]). coverage: share of the supervised
    tokens that are in it."""

    file: FlyteFile
    size: int
    coverage: float
    digest: str


@dataclass(frozen=True)
class HiddenStateShard:
    """One directory of chunks with a manifest (eagle3/shards/hidden_states.py)."""

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
    """All hidden-state shards. digest: of their digests, in order."""

    shards: list[HiddenStateShard]
    layer_ids: list[int]
    digest: str


class GivenHiddenStates(NamedTuple):
    """Hidden states that existed before the run, and their rows. data: the same rows, for the summary."""

    states: HiddenStateShards
    rows: TokenShards
    data: PreparedData


@dataclass(frozen=True)
class DraftCheckpoint:
    """Draft weights with config (draft.json) and metrics.jsonl, without the optimizer's state."""

    directory: FlyteDirectory
    digest: str


@dataclass(frozen=True)
class DraftExport:
    """The directory that vLLM loads."""

    directory: FlyteDirectory
    digest: str


@dataclass(frozen=True)
class EvaluationReport:
    """evaluation.json and the export that it measures: a deleted export makes the cache entry a miss."""

    file: FlyteFile
    export: FlyteDirectory
    acceptance_length: float
    trainer_acceptance_length: float
    outputs_identical: bool
    acceptance_by_position: list[float] = field(default_factory=list)


class CurrentDraft(NamedTuple):
    """The draft that is served before a retraining. recipe: for the new draft; for a warm start its
    train.init_from is the served draft. number: of the promotion. If no draft is served: 0, [] and ""."""

    recipe: Recipe
    number: int
    drafts: list[DraftExport]
    target_digest: str


@dataclass(frozen=True)
class Promotion:
    """The result of a retraining. export: URI of the draft that is served now, or "". acceptance_length: of
    the new draft."""

    promoted: bool
    reason: str
    export: str
    acceptance_length: float
