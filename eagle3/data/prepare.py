"""The prepare stage: source rows to token shards, checked as a whole before anything is published.

Every row of both files is read and checked first. Then rows are tokenized in batches into a staging directory, and only when all
counts are right do the shards move to where they belong: a failed run leaves nothing behind. The price is that sources are read
twice; memory holds one shard.
"""

import json
import logging
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from eagle3.config import DataConfig
from eagle3.data.chat import conversation_rows, encode_rows, load_chat_tokenizer, prompt_row, text_spans
from eagle3.data.conversations import (
    BadRow,
    Conversation,
    Message,
    Pretokenized,
    drop_trailing_answer,
    has_answer,
    to_conversation,
)
from eagle3.data.sources import read_rows
from eagle3.data.template import Piece
from eagle3.shards import TokenRow, TokenShardSummary, digest_of, write_token_shard

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

BATCH_ROWS = 512
NUM_SAMPLES = 4
HELDOUT_NAME = "heldout.parquet"
PROGRESS_DELAY_S = 3.0

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class PreparedFile:
    """One token shard on disk with its counts and digest."""

    path: Path
    summary: TokenShardSummary


@dataclass(frozen=True)
class PreparedFiles:
    """Training shards in source order, the held-out prompts, and the report (JSON-ready, free of paths).

    report: rows_read, rows_kept, dropped {reason: rows}, truncated, tokens, supervised_tokens, prompts {train, heldout},
    heldout {rows_read, dropped}, samples [{sample_id, source, tokens, spans [[text, supervised], …]}].
    """

    shards: list[PreparedFile]
    heldout: PreparedFile
    report: dict[str, Any]


@dataclass
class SourceCounts:
    """What became of a source's rows."""

    read: int = 0
    truncated: int = 0
    dropped: Counter[str] = field(default_factory=Counter)


def prepare_shards(
    train_path: str | Path,
    heldout_path: str | Path,
    tokenizer_dir: str | Path,
    cfg: DataConfig,
    regenerate: bool,
    out_dir: str | Path,
) -> PreparedFiles:
    """Turn a training source and a held-out source into token shards.

    Args:
        train_path: JSONL of conversations or prompts.
        heldout_path: JSONL of prompts for evaluation; only what the target is to answer is kept of each row.
        tokenizer_dir: the target's directory, with its chat template.
        cfg: data settings.
        regenerate: rows hold only the prompt of their last assistant turn, with an all-False mask; else whole conversations.
        out_dir: gets shard-00000.parquet … and heldout.parquet, all or none.

    Raises:
        ValueError: on a bad row (file, line, remedy), too many dropped rows, too few shards, or no held-out prompt left.
    """
    tokenizer = load_chat_tokenizer(tokenizer_dir)
    num_rows = sum(1 for _ in _read_conversations(train_path, needs_answer=not regenerate))
    openings = {_opening(c.messages) for _, c in _read_conversations(heldout_path, needs_answer=False)}
    _check_num_shards(train_path, num_rows, num_rows, cfg)

    train, heldout = SourceCounts(), SourceCounts()
    samples: list[dict[str, Any]] = []
    Path(out_dir).mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=out_dir, prefix=".prepare-") as name:
        staging = Path(name)
        rows = _prepare_rows(tokenizer, heldout_path, "heldout", cfg, True, set(), heldout)
        heldout_rows = list(tqdm(rows, "held-out prompts", unit="row", delay=PROGRESS_DELAY_S))
        _check_heldout(heldout_path, heldout_rows, heldout)
        heldout_file = PreparedFile(staging / HELDOUT_NAME, write_token_shard(staging / HELDOUT_NAME, heldout_rows))

        rows = _prepare_rows(tokenizer, train_path, "train", cfg, regenerate, openings, train)
        rows = iter(tqdm(rows, "training rows", total=num_rows, unit="row", delay=PROGRESS_DELAY_S))
        shards: list[PreparedFile] = []
        while shard := list(islice(rows, cfg.rows_per_shard)):
            path = staging / f"shard-{len(shards):05d}.parquet"
            shards.append(PreparedFile(path, write_token_shard(path, shard)))
            samples += [_sample(tokenizer, row) for row in shard[: NUM_SAMPLES - len(samples)]]
        _check_dropped(train_path, train, cfg)
        _check_num_shards(train_path, sum(f.summary.rows for f in shards), train.read, cfg)
        shards = [_publish(f, Path(out_dir)) for f in shards]
        heldout_file = _publish(heldout_file, Path(out_dir))
    report = _report(shards, heldout_file, train, heldout, samples)
    logger.info("prepared %s", {key: value for key, value in report.items() if key != "samples"})
    return PreparedFiles(shards, heldout_file, report)


def _prepare_rows(
    tokenizer: "PreTrainedTokenizerBase",
    path: str | Path,
    source: str,
    cfg: DataConfig,
    prompt_only: bool,
    excluded_openings: set[str],
    counts: SourceCounts,
) -> Iterator[TokenRow]:
    """Yield the rows of a source that are kept, in source order; `counts` is complete when they are used up."""
    seen: set[str] = set()
    batch: list[tuple[str, list[Piece]]] = []
    for line, conversation in _read_conversations(path, needs_answer=not prompt_only):
        counts.read += 1
        messages = conversation.messages
        kept = replace(conversation, messages=drop_trailing_answer(messages) if prompt_only else messages)
        sample_id = digest_of(json.dumps([kept.messages, kept.tools], sort_keys=True))
        if sample_id in seen:
            counts.dropped["duplicate"] += 1
            continue
        seen.add(sample_id)
        if _opening(messages) in excluded_openings:
            counts.dropped["in_heldout"] += 1
            continue
        try:
            rows = [prompt_row(tokenizer, kept)] if prompt_only else conversation_rows(tokenizer, kept)
        except BadRow as e:
            raise ValueError(f"{path}, line {line}: {e}") from e
        batch += [(f"{sample_id}-{i}" if i else sample_id, pieces) for i, pieces in enumerate(rows)]
        if len(batch) >= BATCH_ROWS:
            yield from _encode_batch(tokenizer, batch, source, cfg, prompt_only, counts)
            batch = []
    yield from _encode_batch(tokenizer, batch, source, cfg, prompt_only, counts)


def _encode_batch(
    tokenizer: "PreTrainedTokenizerBase",
    batch: list[tuple[str, list[Piece]]],
    source: str,
    cfg: DataConfig,
    prompt_only: bool,
    counts: SourceCounts,
) -> Iterator[TokenRow]:
    encoded = encode_rows(tokenizer, [pieces for _, pieces in batch], None if prompt_only else cfg.max_tokens)
    for (sample_id, _), row in zip(batch, encoded, strict=True):
        num_prompt = row.loss_mask.index(True) if True in row.loss_mask else len(row.loss_mask)
        if num_prompt > cfg.max_prompt_tokens:
            counts.dropped["prompt_too_long"] += 1
            continue
        if row.reason:
            counts.dropped[row.reason] += 1
            continue
        counts.truncated += row.num_cut > 0
        yield TokenRow(sample_id, source, row.token_ids, row.loss_mask)


def _read_conversations(path: str | Path, needs_answer: bool) -> Iterator[tuple[int, Conversation]]:
    for line, row in read_rows(path):
        try:
            conversation = to_conversation(row)
        except BadRow as e:
            raise ValueError(f"{path}, line {line}: {e}") from e
        if isinstance(conversation, Pretokenized):
            raise ValueError(f"{path}, line {line}: input_ids are not read here; give messages")
        if needs_answer and not has_answer(conversation.messages):
            raise ValueError(
                f"{path}, line {line}: no assistant text to train on; add an answer or set regenerate.enabled to true"
            )
        yield line, conversation


def _opening(messages: list[Message]) -> str:
    """The first user text: conversations that open alike are the same to the held-out check, whatever follows."""
    return next(m["content"].strip() for m in messages if m["role"] == "user")


def _check_dropped(path: str | Path, counts: SourceCounts, cfg: DataConfig) -> None:
    num_dropped = counts.dropped.total()
    if num_dropped > cfg.max_dropped_share * counts.read:
        reasons = ", ".join(f"{reason} {rows}" for reason, rows in counts.dropped.most_common())
        raise ValueError(
            f"{path}: {num_dropped} of {counts.read} rows dropped ({reasons}), more than data.max_dropped_share = "
            f"{cfg.max_dropped_share}; mend the source, raise data.max_prompt_tokens, or raise the share"
        )


def _check_num_shards(path: str | Path, num_rows: int, num_read: int, cfg: DataConfig) -> None:
    num_shards = -(-num_rows // cfg.rows_per_shard)
    if num_rows and num_shards >= cfg.min_shards:
        return
    fitting = num_rows // cfg.min_shards
    remedy = f"lower data.rows_per_shard to {fitting} or data.min_shards" if fitting else "lower data.min_shards"
    raise ValueError(
        f"{path}: {num_rows} usable rows of {num_read} fill {num_shards} shards of data.rows_per_shard = {cfg.rows_per_shard}, "
        f"data.min_shards = {cfg.min_shards} are required; add rows or {remedy}"
    )


def _check_heldout(path: str | Path, rows: list[TokenRow], counts: SourceCounts) -> None:
    if not rows:
        raise ValueError(
            f"{path}: none of {counts.read} held-out prompts is left, dropped {dict(counts.dropped)}; "
            "raise data.max_prompt_tokens or add shorter prompts"
        )


def _publish(file: PreparedFile, out_dir: Path) -> PreparedFile:
    return PreparedFile(file.path.replace(out_dir / file.path.name), file.summary)


def _report(
    shards: list[PreparedFile],
    heldout_file: PreparedFile,
    train: SourceCounts,
    heldout: SourceCounts,
    samples: list[dict[str, Any]],
) -> dict[str, Any]:
    num_kept = sum(f.summary.rows for f in shards)
    return {
        "rows_read": train.read,
        "rows_kept": num_kept,
        "dropped": dict(train.dropped),
        "truncated": train.truncated,
        "tokens": sum(f.summary.tokens for f in shards),
        "supervised_tokens": sum(f.summary.supervised_tokens for f in shards),
        "prompts": {"train": num_kept, "heldout": heldout_file.summary.rows},
        "heldout": {"rows_read": heldout.read, "dropped": dict(heldout.dropped)},
        "samples": samples,
    }


def _sample(tokenizer: "PreTrainedTokenizerBase", row: TokenRow) -> dict[str, Any]:
    spans = [list(span) for span in text_spans(tokenizer, row.token_ids, row.loss_mask)]
    return {"sample_id": row.sample_id, "source": row.source, "tokens": len(row.token_ids), "spans": spans}
