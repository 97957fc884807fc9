"""The survey: count the rows and tokens of every source in seconds; large sources are sampled.

A source of at most COUNT_ROWS rows is encoded as in prepare, without held-out prompts and duplicates: its
counts are exact. Of a larger source SAMPLE_ROWS rows are encoded; the number of its rows comes from Parquet
footers, its size in bytes, or the hub.
"""

from collections import Counter
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

from eagle3.config.data import DataConfig, SourceConfig
from eagle3.data.chat import load_chat_tokenizer
from eagle3.data.encode import RowEncoder, Task
from eagle3.data.files import COMPRESSIONS, Record, file_format
from eagle3.data.sources import hub_parts, read_source, source_files, source_name, source_path
from eagle3.planning.workload import SourceSurvey
from eagle3.shards.tokens import is_tool_task
from eagle3.targets.hub import connection_errors, is_transient_hub_error
from eagle3.uris import redact

COUNT_ROWS = 2000
SAMPLE_ROWS = 400


def survey(
    sources: Sequence[SourceConfig],
    heldout: SourceConfig,
    tokenizer_dir: str | Path,
    cfg: DataConfig,
    regenerate: bool,
) -> tuple[list[SourceSurvey], int]:
    """Count or sample every source; return their surveys, before weights, and the number of held-out prompts.

    Raises:
        ValueError: if a source loses more than data.max_dropped_share of its rows, or no held-out prompt is
            left.
    """
    tokenizer = load_chat_tokenizer(tokenizer_dir)
    heldout_keys: set[str] = set()
    num_heldout = 0
    task = Task("heldout", heldout.preset, heldout.thinking, "last_prompt")
    for outcome in RowEncoder(tokenizer, cfg).encode_all(islice(read_source(heldout), COUNT_ROWS), task):
        heldout_keys |= outcome.keys
        num_heldout += bool(outcome.rows)
    if not num_heldout:
        raise ValueError(
            f"{redact(source_path(heldout))}: no held-out prompt is left; raise data.max_prompt_tokens or "
            "add shorter prompts"
        )
    encoder = RowEncoder(tokenizer, cfg, frozenset(heldout_keys))
    seen: set[str] = set()
    return [_survey_source(source, encoder, cfg, regenerate, seen) for source in sources], num_heldout


def _survey_source(
    source: SourceConfig, encoder: RowEncoder, cfg: DataConfig, regenerate: bool, seen: set[str]
) -> SourceSurvey:
    records = list(islice(read_source(source), COUNT_ROWS + 1))
    is_counted = len(records) <= COUNT_ROWS
    sample = records if is_counted else records[:SAMPLE_ROWS]
    counts = _count(source, sample, encoder, regenerate, seen, source.max_rows if is_counted else 0)
    num_read = counts["read"]
    num_kept = counts["kept"]
    name = source_name(source)
    found = _scaled(name, counts, "counted")
    is_limit_reached = source.max_rows and num_kept >= source.max_rows
    # prepare applies the limit to all rows, so of a sample only one without a usable row is refused.
    limit = cfg.max_dropped_share if is_counted else max(cfg.max_dropped_share, 1 - 1 / len(sample))
    if found.dropped_share > limit and not is_limit_reached:
        raise ValueError(
            f"{redact(source_path(source))}: {num_read - num_kept} of the first {num_read} rows "
            f"cannot be used, more than data.max_dropped_share = {cfg.max_dropped_share}; correct the "
            "source, raise data.max_prompt_tokens, or raise the share"
        )
    if is_counted or not num_kept:
        return found
    total = _count_rows(source, records)
    usable = (total or len(records)) * num_kept / len(sample)
    if source.max_rows and usable >= source.max_rows:
        return _scaled(name, counts, "estimated", source.max_rows / num_kept)
    return _scaled(name, counts, "estimated" if total else "at_least", usable / num_kept)


def _count(
    source: SourceConfig,
    records: Sequence[Record],
    encoder: RowEncoder,
    regenerate: bool,
    seen: set[str],
    max_rows: int,
) -> Counter[str]:
    """Encode records as prepare does until `max_rows` are kept (0: all), and add the kept ids to `seen`."""
    waits = regenerate and source.regenerate
    task = Task(source_name(source), source.preset, source.thinking, "script" if waits else "answers")
    counts: Counter[str] = Counter()
    for outcome in encoder.encode_all(records, task):
        counts["read"] += 1
        if not outcome.rows or outcome.rows[0].sample_id in seen:
            continue
        seen.add(outcome.rows[0].sample_id)
        counts["kept"] += 1
        counts["rows"] += len(outcome.rows)
        counts["tokens"] += sum(len(row.token_ids) for row in outcome.rows)
        counts["supervised"] += sum(sum(row.loss_mask) for row in outcome.rows)
        counts["answers"] += max(1, outcome.turns) if waits else 0
        counts["tool_tasks"] += is_tool_task(outcome.rows[0].script)
        if counts["kept"] == max_rows:
            break
    return counts


def _scaled(name: str, counts: Counter[str], basis: str, scale: float = 1.0) -> SourceSurvey:
    """The counts times `scale`; the share of dropped rows does not change."""
    keys = ("rows", "tokens", "supervised", "answers", "tool_tasks")
    dropped_share = 1 - counts["kept"] / counts["read"] if counts["read"] else 1.0
    scaled = {key: round(counts[key] * scale) for key in keys}
    return SourceSurvey(name=name, basis=basis, dropped_share=dropped_share, **scaled)


def _count_rows(source: SourceConfig, records: Sequence[Record]) -> int:
    """Number of rows from Parquet footers, file sizes or the hub's metadata; 0 if unknown."""
    if parts := hub_parts(source_path(source)):
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
        builder = datasets.load_dataset_builder(repository, subset or None, revision=revision or None)
    except (OSError, ValueError, datasets.exceptions.DatasetsError, *connection_errors()) as e:
        if is_transient_hub_error(e):
            raise ConnectionError(f"data set {repository}: {type(e).__name__}: {e}; run again") from e
        return 0
    splits = builder.info.splits or {}
    return int(splits[split].num_examples or 0) if split in splits else 0
