"""The prepare stage: source rows to token shards, published all together or not at all.

Every source is read once, tokenized in batches (eagle3/data/encode.py) and written into a staging directory; only when all counts
are right do the shards move to where they belong. Memory holds one shard. A row that cannot be used is dropped, counted by reason
and shown in the report; a source that cannot be read, or most of which is dropped, is an error.

Without weights the sources follow one another and each fills shards of its own, so that rows appended to one leave the shards of
the others alone. With weights each place in the shards is drawn, by seed and place alone, for one of the sources; the mix ends
when the source drawn has no row left, so that the shares hold.
"""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from eagle3.config.data import DataConfig, SourceConfig
from eagle3.data.chat import load_chat_tokenizer, sample_of
from eagle3.data.encode import EncoderPool, Outcome, RowEncoder, Task, tokens_key
from eagle3.data.sources import read_source, source_name, source_path
from eagle3.data.tally import SourceTally, total_figures
from eagle3.shards.tokens import HELDOUT_NAME, TokenRow, TokenShardSummary, is_tool_task, write_token_shard
from eagle3.uris import redact

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

NUM_SAMPLES = 8
SAMPLES_OF_A_SOURCE = 2
PROGRESS_DELAY_S = 3.0

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class PreparedFile:
    """One token shard on disk with its counts and digest."""

    path: Path
    summary: TokenShardSummary


@dataclass(frozen=True)
class PreparedFiles:
    """Training shards in order, those of tool tasks apart, the held-out prompts, the report (JSON-ready, free of directories).

    report: rows_read, rows_kept, dropped {reason: rows}, truncated, tokens, supervised_tokens over all sources; sources {name:
    SourceTally.figures}, heldout the same; prompts {train, heldout} rows; samples [{sample_id, source, tokens, spans [[text,
    supervised], …]}].
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
        heldout: prompts for evaluation; only what the target is to answer is kept of each row.
        tokenizer_dir: the target's directory, with its chat template.
        cfg: data settings with the training sources; revisions pinned where the result has to be the same again.
        regenerate: rows hold only what the target is asked first, with an all-False mask and a script of what follows, unless
            their source says no; those that offer tools are the tool tasks. Else rows are whole conversations.
        out_dir: gets shard-00000.parquet …, tool-tasks-00000.parquet … and heldout.parquet, all or none.

    Raises:
        ValueError: on a source that cannot be read, too many dropped rows, too few shards, or no held-out prompt left.
    """
    tokenizer = load_chat_tokenizer(tokenizer_dir)
    names = check_sources(cfg.sources)
    Path(out_dir).mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=out_dir, prefix=".prepare-") as staging:
        heldout_rows, heldout_tally, excluded = _read_heldout(RowEncoder(tokenizer, cfg), heldout, cfg)
        heldout_file = _write_shard(Path(staging) / HELDOUT_NAME, heldout_rows)
        tallies = [SourceTally() for _ in names]
        shards, tool_tasks = (
            _ShardFiles(Path(staging), "shard", cfg),
            _ShardFiles(Path(staging), "tool-tasks", cfg),
        )
        samples: list[dict[str, Any]] = []
        with EncoderPool(RowEncoder(tokenizer, cfg, excluded)) as pool:
            for rows in _training_rows(pool, names, tallies, cfg, regenerate):
                for row in tqdm(rows, "training rows", unit="row", delay=PROGRESS_DELAY_S):
                    (tool_tasks if is_tool_task(row.script) else shards).add(row)
                    _add_sample(samples, tokenizer, row)
                shards.end()
                tool_tasks.end()
        _check_training(cfg, tallies, len(shards.files) + len(tool_tasks.files))
        published = [[_publish(f, Path(out_dir)) for f in made] for made in (shards.files, tool_tasks.files)]
        heldout_file = _publish(heldout_file, Path(out_dir))
    return PreparedFiles(
        published[0], published[1], heldout_file, _report(names, tallies, heldout_tally, samples)
    )


def prepare_heldout(
    heldout: SourceConfig, tokenizer_dir: str | Path, cfg: DataConfig, out_dir: str | Path
) -> PreparedFile:
    """The held-out prompts alone, for shards that exist already; the same file as `prepare_shards` makes of them."""
    alone = cfg.model_copy(update={"sources": [], "excluded": []})
    rows, _, _ = _read_heldout(RowEncoder(load_chat_tokenizer(tokenizer_dir), alone), heldout, alone)
    return _write_shard(Path(out_dir) / HELDOUT_NAME, rows)


class _ShardFiles:
    """Rows filled into files of `rows_per_shard`; memory holds the rows of one."""

    def __init__(self, directory: Path, name: str, cfg: DataConfig) -> None:
        self.directory, self.name, self.rows_per_shard = directory, name, cfg.rows_per_shard
        self.files: list[PreparedFile] = []
        self.rows: list[TokenRow] = []

    def add(self, row: TokenRow) -> None:
        self.rows.append(row)
        if len(self.rows) == self.rows_per_shard:
            self.end()

    def end(self) -> None:
        """Write what is left: the next row begins another file."""
        if self.rows:
            self.files.append(
                _write_shard(self.directory / f"{self.name}-{len(self.files):05d}.parquet", self.rows)
            )
            self.rows = []


def _read_heldout(
    encoder: RowEncoder, heldout: SourceConfig, cfg: DataConfig
) -> tuple[list[TokenRow], SourceTally, frozenset[str]]:
    """The held-out prompts, their counts, and the keys of what must not come into training: theirs and those of data.excluded."""
    excluded: set[str] = set()

    def outcomes(source: SourceConfig) -> Iterator[Outcome]:
        for outcome in encoder.encode_all(
            read_source(source), Task("heldout", source.preset, source.thinking, "last_prompt")
        ):
            excluded.update(
                [outcome.opening] if outcome.opening else [],
                (tokens_key(row.token_ids) for row in outcome.rows),
            )
            yield outcome

    tally = SourceTally()
    rows = list(
        tqdm(
            _keep(outcomes(heldout), tally, set(), heldout.max_rows),
            "held-out prompts",
            delay=PROGRESS_DELAY_S,
        )
    )
    if not rows:
        raise ValueError(
            f"{redact(source_path(heldout))}: none of {tally.read} held-out prompts is left, dropped {dict(tally.dropped)}; "
            f"raise data.max_prompt_tokens or add shorter prompts{tally.first_example()}"
        )
    _check_dropped(heldout, tally, cfg)
    for source in cfg.excluded:
        other = SourceTally()
        for _ in _keep(outcomes(source), other, set(), source.max_rows):
            pass
        _check_dropped(source, other, cfg)
    return rows, tally, frozenset(excluded)


def _training_rows(
    pool: EncoderPool, names: list[str], tallies: list[SourceTally], cfg: DataConfig, regenerate: bool
) -> Iterator[Iterator[TokenRow]]:
    """The rows that are kept, each counted in its source's tally, in one stream a source or in one of all."""
    seen: set[str] = set()
    streams = []
    for source, name, tally in zip(cfg.sources, names, tallies, strict=True):
        task = Task(
            name, source.preset, source.thinking, "script" if regenerate and source.regenerate else "answers"
        )
        streams.append(_keep(pool.encode(read_source(source), task), tally, seen, source.max_rows))
    return _mix(streams, [source.weight for source in cfg.sources], cfg.seed)


def _keep(
    outcomes: Iterator[Outcome], tally: SourceTally, seen: set[str], max_rows: int
) -> Iterator[TokenRow]:
    """Yield the rows that are kept, in order; each is counted when it is asked for."""
    for outcome in outcomes:
        tally.read += 1
        if not outcome.rows:
            tally.drop(outcome.where, outcome.reason, outcome.message)
            continue
        if outcome.rows[0].sample_id in seen:
            tally.drop(outcome.where, "duplicate", "an earlier row has the same content")
            continue
        seen.add(outcome.rows[0].sample_id)
        tally.keep(outcome)
        for row in outcome.rows:
            tally.keep_row(row)
            yield row
        if tally.taken == max_rows:
            return


def _mix(streams: list[Iterator[TokenRow]], weights: list[float], seed: int) -> Iterator[Iterator[TokenRow]]:
    """The streams one by one; with weights one stream of rows drawn from all."""
    if not any(weights):
        yield from streams
        return

    def draw() -> Iterator[TokenRow]:
        random = Random(seed)
        while True:
            row = next(random.choices(streams, weights)[0], None)
            if row is None:
                return
            yield row

    yield draw()


def _write_shard(path: Path, rows: list[TokenRow]) -> PreparedFile:
    return PreparedFile(path, write_token_shard(path, rows))


def _publish(file: PreparedFile, out_dir: Path) -> PreparedFile:
    return PreparedFile(file.path.replace(out_dir / file.path.name), file.summary)


def check_sources(sources: Sequence[SourceConfig]) -> list[str]:
    """The sources' names, each its own; with weights for all or none."""
    names = [source_name(source) for source in sources]
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        raise ValueError(
            f"every source needs a name of its own, got {', '.join(repeated)} twice; set `name` in data.sources"
        )
    without = [name for name, source in zip(names, sources, strict=True) if not source.weight]
    if without and len(without) < len(names):
        raise ValueError(
            f"either all sources must have a weight above 0, or none, got none for {', '.join(without)}; add it"
        )
    return names


def _check_dropped(source: SourceConfig, tally: SourceTally, cfg: DataConfig) -> None:
    num_dropped = tally.dropped.total()
    if num_dropped > cfg.max_dropped_share * tally.read:
        reasons = ", ".join(f"{reason} {rows}" for reason, rows in tally.dropped.most_common())
        raise ValueError(
            f"{redact(source_path(source))}: {num_dropped} of {tally.read} rows dropped ({reasons}), more than "
            f"data.max_dropped_share = {cfg.max_dropped_share}; mend the source, raise data.max_prompt_tokens, or "
            f"raise the share{tally.first_example()}"
        )


def _check_training(cfg: DataConfig, tallies: list[SourceTally], num_shards: int) -> None:
    """Refuse sources of which too much was dropped, and too few shards; a tally a source, in order."""
    for source, tally in zip(cfg.sources, tallies, strict=True):
        _check_dropped(source, tally, cfg)
    num_rows = sum(tally.kept for tally in tallies)
    if num_rows and num_shards >= cfg.min_shards:
        return
    fitting = num_rows // cfg.min_shards
    remedy = (
        f"lower data.rows_per_shard to {fitting} or data.min_shards" if fitting else "lower data.min_shards"
    )
    places = ", ".join(redact(source_path(source)) for source in cfg.sources)
    raise ValueError(
        f"{places}: {num_rows} usable rows of {sum(tally.read for tally in tallies)} fill "
        f"{num_shards} shards of data.rows_per_shard = {cfg.rows_per_shard}, data.min_shards = {cfg.min_shards} are required; "
        f"add rows or {remedy}"
    )


def _report(
    names: list[str], tallies: list[SourceTally], heldout: SourceTally, samples: list[dict[str, Any]]
) -> dict[str, Any]:
    """The report of PreparedFiles; names and tallies: of the training sources, in order."""
    report = total_figures(tallies)
    logger.info("prepared %s", report)
    return report | {
        "sources": {name: tally.figures() for name, tally in zip(names, tallies, strict=True)},
        "prompts": {"train": report["rows_kept"], "heldout": heldout.kept},
        "heldout": heldout.figures(),
        "samples": samples,
    }


def _add_sample(samples: list[dict[str, Any]], tokenizer: "PreTrainedTokenizerBase", row: TokenRow) -> None:
    """Add the first rows of each source as text, as long as there are few."""
    if (
        len(samples) < NUM_SAMPLES
        and sum(sample["source"] == row.source for sample in samples) < SAMPLES_OF_A_SOURCE
    ):
        samples.append(sample_of(tokenizer, row))
