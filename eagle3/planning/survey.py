"""How many rows and tokens the sources hold, in seconds: small ones are tokenized whole, of large ones the first rows.

A source of at most COUNT_ROWS rows is encoded as prepare will, held-out prompts and repetitions left out: its figures are exact.
Of a longer one SAMPLE_ROWS are encoded, and the number of its rows comes from its Parquet footers, its bytes, or the hub.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from math import ceil
from pathlib import Path

from eagle3.config.data import DataConfig, SourceConfig
from eagle3.config.engine import RegenerateConfig
from eagle3.data.chat import load_chat_tokenizer
from eagle3.data.encode import RowEncoder, Task, tokens_key
from eagle3.data.files import COMPRESSIONS, Record, file_format
from eagle3.data.sources import hub_parts, read_source, source_files, source_name, source_path
from eagle3.planning.estimates import Workload
from eagle3.shards.tokens import is_tool_task
from eagle3.uris import redact

COUNT_ROWS = 2000
SAMPLE_ROWS = 400
# Of the answers that a target is still to write nothing is known but their limit.
ANSWER_SHARE = 0.5


@dataclass(frozen=True)
class SourceSurvey:
    """What one source brings. basis: how it is known: counted, estimated, or at_least, where the number of rows is unknown.

    rows, tokens, supervised: kept ones. answers: that the target is to write; rows then end where the first of them is to begin,
    and what users say after it is not counted. 0 where rows keep their own. tool_tasks: rows that wait and offer tools.
    """

    name: str
    basis: str
    rows: int
    tokens: int
    supervised: int
    answers: int
    tool_tasks: int
    dropped_share: float


def survey(
    sources: Sequence[SourceConfig],
    heldout: SourceConfig,
    tokenizer_dir: str | Path,
    cfg: DataConfig,
    regenerate: bool,
) -> tuple[list[SourceSurvey], int]:
    """Look at every source.

    Returns:
        one survey a source, weights not yet applied, and the number of held-out prompts.

    Raises:
        ValueError: if a source cannot be read, or loses more than data.max_dropped_share of what was looked at.
    """
    tokenizer = load_chat_tokenizer(tokenizer_dir)
    keys: set[str] = set()
    num_heldout = 0
    task = Task("heldout", heldout.preset, heldout.thinking, "last_prompt")
    for outcome in RowEncoder(tokenizer, cfg).encode_all(islice(read_source(heldout), COUNT_ROWS), task):
        keys.update(
            [outcome.opening] if outcome.opening else [], (tokens_key(row.token_ids) for row in outcome.rows)
        )
        num_heldout += bool(outcome.rows)
    if not num_heldout:
        raise ValueError(
            f"{redact(source_path(heldout))}: no held-out prompt is left; raise data.max_prompt_tokens or add shorter prompts"
        )
    encoder = RowEncoder(tokenizer, cfg, frozenset(keys))
    seen: set[str] = set()
    return [_survey_source(source, encoder, cfg, regenerate, seen) for source in sources], num_heldout


def _survey_source(
    source: SourceConfig, encoder: RowEncoder, cfg: DataConfig, regenerate: bool, seen: set[str]
) -> SourceSurvey:
    records = list(islice(read_source(source), COUNT_ROWS + 1))
    is_whole = len(records) <= COUNT_ROWS
    looked_at = records if is_whole else records[:SAMPLE_ROWS]
    waits = regenerate and source.regenerate
    task = Task(source_name(source), source.preset, source.thinking, "script" if waits else "answers")
    read = kept = tokens = supervised = rows = answers = tool_tasks = 0
    for outcome in encoder.encode_all(looked_at, task):
        read += 1
        if not outcome.rows or outcome.rows[0].sample_id in seen:
            continue
        seen.add(outcome.rows[0].sample_id)
        kept += 1
        rows += len(outcome.rows)
        tokens += sum(len(row.token_ids) for row in outcome.rows)
        supervised += sum(sum(row.loss_mask) for row in outcome.rows)
        answers += max(1, outcome.turns) if waits else 0
        tool_tasks += is_tool_task(outcome.rows[0].script)
        if is_whole and kept == source.max_rows:
            break
    dropped = 1 - kept / read if read else 1.0
    if dropped > cfg.max_dropped_share and kept != source.max_rows:
        raise ValueError(
            f"{redact(source_path(source))}: {read - kept} of the first {read} rows cannot be used, more than "
            f"data.max_dropped_share = {cfg.max_dropped_share}; mend the source, raise data.max_prompt_tokens, or raise the share"
        )
    if is_whole or not kept:
        return SourceSurvey(task.source, "counted", rows, tokens, supervised, answers, tool_tasks, dropped)
    total = _count_rows(source, records)
    basis = "estimated" if total else "at_least"
    usable = (total or len(records)) * kept / len(looked_at)
    scale = (min(usable, source.max_rows) if source.max_rows else usable) / kept
    if source.max_rows and usable >= source.max_rows:
        basis = "estimated"
    figures = (rows, tokens, supervised, answers, tool_tasks)
    rows, tokens, supervised, answers, tool_tasks = (round(number * scale) for number in figures)
    return SourceSurvey(task.source, basis, rows, tokens, supervised, answers, tool_tasks, dropped)


def _count_rows(source: SourceConfig, records: Sequence[Record]) -> int:
    """Rows of a source by footers, bytes or the hub's own count; 0 where none of these tells."""
    parts = hub_parts(source_path(source))
    if parts:
        return _hub_rows(*parts, source.revision)
    filesystem, files = source_files(source)
    sizes = [record.size for record in records if record.size]
    total = 0.0
    for file in files:
        if redact(file).endswith(COMPRESSIONS):
            return 0
        if file_format(file) == "parquet":
            import pyarrow.parquet as pq

            with filesystem.open(file, "rb") as f:
                total += pq.ParquetFile(f).metadata.num_rows
        else:
            total += filesystem.size(file) * len(sizes) / max(1, sum(sizes))
    return round(total)


def _hub_rows(repository: str, subset: str, split: str, revision: str) -> int:
    import datasets

    try:
        splits = (
            datasets.load_dataset_builder(repository, subset or None, revision=revision or None).info.splits
            or {}
        )
    except (OSError, ValueError, datasets.exceptions.DatasetsError):
        return 0
    return int(splits[split].num_examples or 0) if split in splits else 0


def workload(
    surveys: Sequence[SourceSurvey],
    weights: Sequence[float],
    cfg: DataConfig,
    regenerate: RegenerateConfig,
    max_model_len: int,
) -> Workload:
    """Put the sources together as prepare mixes them, and add the answers that the target is to write.

    Args:
        surveys, weights: of the sources, in order; all weights are 0 or none is.
        max_model_len: no finished row is longer.
    """
    shares = _taken_shares(surveys, weights)
    rows = [round(s.rows * share) for s, share in zip(surveys, shares, strict=True)]
    tasks = [round(s.tool_tasks * share) for s, share in zip(surveys, shares, strict=True)]
    apart = [n - t for n, t in zip(rows, tasks, strict=True)] + tasks  # tool tasks fill shards of their own
    mixed = [sum(rows) - sum(tasks), sum(tasks)]
    shards = sum(ceil(n / cfg.rows_per_shard) for n in (mixed if any(weights) else apart))
    tokens = round(sum(s.tokens * share for s, share in zip(surveys, shares, strict=True)))
    supervised = round(sum(s.supervised * share for s, share in zip(surveys, shares, strict=True)))
    waiting = sum(n for n, s in zip(rows, surveys, strict=True) if s.answers)
    prompts = round(sum(s.tokens * share for s, share in zip(surveys, shares, strict=True) if s.answers))
    longest = round(
        sum(
            s.answers * share * regenerate.sampling(s.name)[2]
            for s, share in zip(surveys, shares, strict=True)
        )
    )
    expected = round(longest * ANSWER_SHARE)
    return Workload(
        rows=sum(rows),
        shards=shards,
        waiting_rows=waiting,
        prompt_tokens=prompts,
        new_tokens=expected,
        tokens=tokens + expected,
        supervised=supervised + expected,
        max_tokens=min(tokens + longest, sum(rows) * max_model_len),
        max_supervised=supervised + longest,
    )


def _taken_shares(surveys: Sequence[SourceSurvey], weights: Sequence[float]) -> list[float]:
    """Share of each source's rows that is taken: all, or by weight until the first source is used up."""
    if not any(weights):
        return [1.0] * len(surveys)
    mixed = min(s.rows / weight for s, weight in zip(surveys, weights, strict=True))
    return [mixed * weight / s.rows if s.rows else 0.0 for s, weight in zip(surveys, weights, strict=True)]
