"""What passes between the stages: frozen dataclasses of files, counts and content digests.

A digest is the artefact's identity in every cache key; paths never are. No unions here: flytekit corrupts them silently.
"""

from dataclasses import dataclass, field
from typing import List

from flytekit.types.directory import FlyteDirectory
from flytekit.types.file import FlyteFile


@dataclass(frozen=True)
class TargetRef:
    """A target's identity, cheap to find: hub commit or content hash."""

    name: str
    revision: str
    digest: str


@dataclass(frozen=True)
class Target:
    """A target fetched: a directory with config, tokenizer and safetensors, `digest` as in its TargetRef."""

    name: str
    revision: str
    digest: str
    directory: FlyteDirectory


@dataclass(frozen=True)
class TokenShard:
    """One Parquet file of conversations (eagle3/shards.py)."""

    index: int
    file: FlyteFile
    rows: int
    tokens: int
    supervised_tokens: int
    digest: str


@dataclass(frozen=True)
class PreparedData:
    """Training shards in source order, held-out prompts, and the data report (report.json: rows read, dropped by reason)."""

    shards: List[TokenShard]
    heldout: TokenShard
    report: FlyteFile
    digest: str


@dataclass(frozen=True)
class TokenShards:
    """Shards after regeneration, in order; digest over theirs."""

    shards: List[TokenShard]
    digest: str


@dataclass(frozen=True)
class DraftVocab:
    """vocab.safetensors (d2t int64 [K], t2d bool [V], counts int64 [V]) and the share of supervised tokens it covers."""

    file: FlyteFile
    size: int
    coverage: float
    digest: str


@dataclass(frozen=True)
class HiddenStateShard:
    """One directory of chunks and a manifest (eagle3/shards.py)."""

    index: int
    directory: FlyteDirectory
    rows: int
    tokens: int
    supervised_tokens: int
    size_bytes: int
    digest: str


@dataclass(frozen=True)
class HiddenStateShards:
    """All hidden-state shards, in order; digest over theirs."""

    shards: List[HiddenStateShard]
    digest: str


@dataclass(frozen=True)
class DraftCheckpoint:
    """Draft weights with config (draft/), metrics.jsonl, and the newest resumable checkpoint."""

    directory: FlyteDirectory
    digest: str


@dataclass(frozen=True)
class DraftExport:
    """The directory that vLLM loads."""

    directory: FlyteDirectory
    digest: str


@dataclass(frozen=True)
class EvaluationReport:
    """evaluation.json with every figure, and the export it measured: when that is gone, so is the measurement."""

    file: FlyteFile
    export: FlyteDirectory
    acceptance_length: float
    trainer_acceptance_length: float
    outputs_identical: bool
    acceptance_by_position: List[float] = field(default_factory=list)
