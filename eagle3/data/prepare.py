"""The prepare stage: turn source rows into token shards, published atomically.

Each source is read once and encoded in batches (eagle3/data/encode.py) into a staging directory. The shards
move to the output directory after all checks. Memory holds one shard. Rows that cannot be used are dropped
and counted by reason; a source that cannot be read or loses too many rows is an error.

Without weights each source has its own shards, so rows appended to one source do not change the shards of the
others. With weights each row's source is drawn at random; the mix ends when that source has no more rows.
"""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from eagle3.config.data import DataConfig, SourceConfig
from eagle3.data.chat import load_chat_tokenizer, sample_of
from eagle3.data.encode import Outcome, RowEncoder, Task
from eagle3.data.pool import EncoderPool
from eagle3.data.sources import read_source, source_name, source_path
from eagle3.data.tally import SourceTally, total_statistics
from eagle3.shards.tokens import HELDOUT_NAME, TokenRow, TokenShardSummary, is_tool_task, write_token_shard
from eagle3.uris import redact

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MAX_SAMPLES = 8
MAX_SOURCE_SAMPLES = 2
PROGRESS_DELAY_S = 3.0

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class PreparedFile:
    """A token shard with its counts and digest."""

    path: Path
    summary: TokenShardSummary


@dataclass(frozen=True)
class PreparedFiles:
    """The shards of a run and a report about them.

    report: JSON-ready, without directories: total_statistics; sources {name: SourceTally.statistics}; heldout
    (the same statistics); prompts {train, heldout} rows; samples as `sample_of` returns them.
    """

    shards: list[PreparedFile]
    tool_tasks: list[PreparedFile]
    heldout: PreparedFile
    report: dict[str, Any]


def prepare_shards(
    heldout: SourceConfig, tokenizer_dir: str | Path, cfg: DataConfig, regenerate: bool, out_dir: str | Path
) -> PreparedFiles:
    """Turn training sources and a held-out source into token shards.

    Args:
        heldout: prompts for evaluation: each row without its last answer.
        tokenizer_dir: the target's directory, with its chat template.
        cfg: data settings with the training sources; pinned revisions make the result reproducible.
        regenerate: write prompts, scripts and tool tasks for sources with `regenerate`; write whole
            conversations for the others.
        out_dir: gets shard-00000.parquet …, tool-tasks-00000.parquet … and heldout.parquet.
    """
    tokenizer = load_chat_tokenizer(tokenizer_dir)
    names = check_sources(cfg.sources)
    out = Path(out_dir)
    out.mkdir(parents=True, exist_ok=True)
    with _staging(out) as staging:
        heldout_rows, heldout_tally, excluded = _read_heldout(RowEncoder(tokenizer, cfg), heldout, cfg)
        heldout_summary = write_token_shard(staging / HELDOUT_NAME, heldout_rows)
        tallies = [SourceTally() for _ in names]
        shards = _ShardFiles(staging, out, "shard", cfg.rows_per_shard)
        tool_tasks = _ShardFiles(staging, out, "tool-tasks", cfg.rows_per_shard)
        samples: list[dict[str, Any]] = []
        with EncoderPool(RowEncoder(tokenizer, cfg, excluded)) as pool:
            for rows in _training_rows(pool, names, tallies, cfg, regenerate):
                for row in tqdm(rows, "training rows", unit="row", delay=PROGRESS_DELAY_S):
                    (tool_tasks if is_tool_task(row.script) else shards).add(row)
                    _add_sample(samples, tokenizer, row)
                shards.end_file()
                tool_tasks.end_file()
        _check_training(cfg, tallies, len(shards.files) + len(tool_tasks.files))
    totals = total_statistics(tallies)
    logger.info("prepared %s", totals)
    report = totals | {
        "sources": {name: tally.statistics() for name, tally in zip(names, tallies, strict=True)},
        "prompts": {"train": totals["rows_kept"], "heldout": heldout_tally.kept.rows},
        "heldout": heldout_tally.statistics(),
        "samples": samples,
    }
    heldout_file = PreparedFile(out / HELDOUT_NAME, heldout_summary)
    return PreparedFiles(shards.files, tool_tasks.files, heldout_file, report)


def prepare_heldout(
    heldout: SourceConfig, tokenizer_dir: str | Path, cfg: DataConfig, out_dir: str | Path
) -> PreparedFile:
    """Write the held-out prompts alone, in the same file as `prepare_shards`."""
    alone = cfg.model_copy(update={"sources": [], "excluded": []})
    rows, _, _ = _read_heldout(RowEncoder(load_chat_tokenizer(tokenizer_dir), alone), heldout, alone)
    path = Path(out_dir) / HELDOUT_NAME
    return PreparedFile(path, write_token_shard(path, rows))


@contextmanager
def _staging(out_dir: Path) -> Iterator[Path]:
    """A directory whose files move to `out_dir` at the end, or are removed after an error."""
    with TemporaryDirectory(dir=out_dir, prefix=".prepare-") as directory:
        yield Path(directory)
        for file in Path(directory).iterdir():
            file.replace(out_dir / file.name)


class _ShardFiles:
    """Writes rows to files of `rows_per_shard` in a staging directory; `files` has their final paths."""

    def __init__(self, staging: Path, out_dir: Path, name: str, rows_per_shard: int) -> None:
        self.staging = staging
        self.out_dir = out_dir
        self.name = name
        self.rows_per_shard = rows_per_shard
        self.files: list[PreparedFile] = []
        self.rows: list[TokenRow] = []

    def add(self, row: TokenRow) -> None:
        self.rows.append(row)
        if len(self.rows) == self.rows_per_shard:
            self.end_file()

    def end_file(self) -> None:
        if not self.rows:
            return
        name = f"{self.name}-{len(self.files):05d}.parquet"
        summary = write_token_shard(self.staging / name, self.rows)
        self.files.append(PreparedFile(self.out_dir / name, summary))
        self.rows = []


def _read_heldout(
    encoder: RowEncoder, heldout: SourceConfig, cfg: DataConfig
) -> tuple[list[TokenRow], SourceTally, frozenset[str]]:
    """The held-out prompts, their counts, and the keys of held-out and excluded rows."""
    excluded: set[str] = set()

    def read(source: SourceConfig) -> tuple[list[TokenRow], SourceTally]:
        task = Task("heldout", source.preset, source.thinking, "last_prompt")
        outcomes = encoder.encode_all(read_source(source), task)
        tally = SourceTally()
        return list(_kept_rows(_collect_keys(outcomes, excluded), tally, set(), source.max_rows)), tally

    rows, tally = read(heldout)
    if not rows:
        raise ValueError(
            f"{redact(source_path(heldout))}: none of {tally.num_read} held-out prompts is left, dropped "
            f"{dict(tally.dropped)}; raise data.max_prompt_tokens or add shorter prompts"
            f"{tally.first_example()}"
        )
    _check_dropped(heldout, tally, cfg)
    for source in cfg.excluded:
        _check_dropped(source, read(source)[1], cfg)
    return rows, tally, frozenset(excluded)


def _collect_keys(outcomes: Iterator[Outcome], keys: set[str]) -> Iterator[Outcome]:
    for outcome in outcomes:
        keys |= outcome.keys
        yield outcome


def _training_rows(
    pool: EncoderPool, names: list[str], tallies: list[SourceTally], cfg: DataConfig, regenerate: bool
) -> list[Iterator[TokenRow]]:
    """One stream of kept rows for each source, or one for all with weights; fills the tallies."""
    seen: set[str] = set()
    streams = []
    for source, name, tally in zip(cfg.sources, names, tallies, strict=True):
        task = Task(
            name, source.preset, source.thinking, "script" if regenerate and source.regenerate else "answers"
        )
        outcomes = pool.encode(read_source(source), task)
        streams.append(_kept_rows(outcomes, tally, seen, source.max_rows))
    weights = [source.weight for source in cfg.sources]
    return [_mix(streams, weights, cfg.seed)] if any(weights) else streams


def _kept_rows(
    outcomes: Iterator[Outcome], tally: SourceTally, seen: set[str], max_rows: int
) -> Iterator[TokenRow]:
    """The kept rows in order; each is counted when the caller takes it."""
    for outcome in outcomes:
        tally.num_read += 1
        if not outcome.rows:
            tally.drop(outcome.where, outcome.reason, outcome.message)
            continue
        if outcome.rows[0].sample_id in seen:
            tally.drop(outcome.where, "duplicate", "an earlier row has the same content")
            continue
        seen.add(outcome.rows[0].sample_id)
        tally.use(outcome)
        for row in outcome.rows:
            tally.kept.add(row)
            yield row
        if tally.num_used == max_rows:
            return


def _mix(streams: list[Iterator[TokenRow]], weights: list[float], seed: int) -> Iterator[TokenRow]:
    """Draw streams by weight, until the drawn stream has no more rows."""
    random = Random(seed)
    while row := next(random.choices(streams, weights)[0], None):
        yield row


def check_sources(sources: Sequence[SourceConfig]) -> list[str]:
    """The names of training sources. Refuses repeated names, and weights for some sources only."""
    names = [source_name(source) for source in sources]
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        rule = f"every source needs a name of its own, got {', '.join(repeated)} twice"
        raise ValueError(f"{rule}; set `name` in data.sources")
    unweighted = [name for name, source in zip(names, sources, strict=True) if not source.weight]
    if unweighted and len(unweighted) < len(names):
        rule = "either all sources must have a weight above 0, or none"
        raise ValueError(f"{rule}, got none for {', '.join(unweighted)}; add it")
    return names


def _check_dropped(source: SourceConfig, tally: SourceTally, cfg: DataConfig) -> None:
    num_dropped = tally.dropped.total()
    if num_dropped > cfg.max_dropped_share * tally.num_read:
        reasons = ", ".join(f"{reason} {rows}" for reason, rows in tally.dropped.most_common())
        rule = f"{num_dropped} of {tally.num_read} rows dropped ({reasons}), more than data.max_dropped_share"
        remedy = "correct the source, raise data.max_prompt_tokens, or raise the share"
        name = redact(source_path(source))
        raise ValueError(f"{name}: {rule} = {cfg.max_dropped_share}; {remedy}{tally.first_example()}")


def _check_training(cfg: DataConfig, tallies: list[SourceTally], num_shards: int) -> None:
    """Refuse sources that lost too many rows, and too few shards."""
    for source, tally in zip(cfg.sources, tallies, strict=True):
        _check_dropped(source, tally, cfg)
    num_rows = sum(tally.kept.rows for tally in tallies)
    if num_rows and num_shards >= cfg.min_shards:
        return
    most = num_rows // cfg.min_shards
    remedy = f"data.rows_per_shard to {most} or data.min_shards" if most else "data.min_shards"
    raise ValueError(
        f"{', '.join(redact(source_path(source)) for source in cfg.sources)}: {num_rows} usable rows of "
        f"{sum(tally.num_read for tally in tallies)} fill {num_shards} shards of data.rows_per_shard = "
        f"{cfg.rows_per_shard}, data.min_shards = {cfg.min_shards} are required; add rows or lower {remedy}"
    )


def _add_sample(samples: list[dict[str, Any]], tokenizer: "PreTrainedTokenizerBase", row: TokenRow) -> None:
    """Add a row as text while the limits allow it."""
    num_of_source = sum(sample["source"] == row.source for sample in samples)
    if len(samples) < MAX_SAMPLES and num_of_source < MAX_SOURCE_SAMPLES:
        samples.append(sample_of(tokenizer, row))
