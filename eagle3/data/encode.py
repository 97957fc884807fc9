"""Encode source rows as token rows. The result for a row depends only on the row and the settings."""

import json
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, islice, pairwise
from typing import TYPE_CHECKING, Literal, TypeVar

from eagle3.config.data import DataConfig
from eagle3.data.chat import EncodedRow, conversation_rows, encode_rows, prompt_row
from eagle3.data.conversations import (
    BadRow,
    Conversation,
    Pretokenized,
    drop_trailing_answer,
    to_conversation,
)
from eagle3.data.files import MAX_ROW_BYTES, Record
from eagle3.data.presets import PRESETS
from eagle3.data.script import script_of
from eagle3.data.template import Piece
from eagle3.files import digest_of
from eagle3.shards.tokens import TokenRow

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MAX_BATCH_ROWS = 128
MAX_BATCH_BYTES = 8 << 20
MAX_TOKENIZED_CHARS = 1 << 20  # in one call of the tokenizer, which takes about 100 bytes per token

T = TypeVar("T")


@dataclass(frozen=True)
class Task:
    """How to encode the rows of one source.

    source: name of the source in the rows. preset, thinking: as in SourceConfig. keep: what is encoded.
    `answers`: the whole conversation. `script`: the messages up to the first answer, with an all-False mask;
    the later turns go into the row's script. `last_prompt`: the conversation without its last answer.
    """

    source: str
    preset: str
    thinking: bool | None
    keep: Literal["answers", "script", "last_prompt"]


@dataclass(frozen=True)
class Outcome:
    """The result of one source row.

    where: file and line. rows: its token rows, none if it is dropped. reason, message: why it is dropped.
    opening: key of the first user text; the validation split keeps rows with the same opening together.
    content: digest of the conversation. script: as in TokenRow. is_cut: tokens were left out to fit the
    limits. turns: user turns.
    """

    where: str
    rows: list[TokenRow] = field(default_factory=list)
    reason: str = ""
    message: str = ""
    opening: str = ""
    content: str = ""
    script: str = ""
    is_cut: bool = False
    turns: int = 0
    has_tool_calls: bool = False
    format: str = ""

    @property
    def keys(self) -> set[str]:
        """Keys of the first user text and of each row's tokens, to find a held-out row in training data."""
        return {self.opening, *(tokens_key(row.token_ids) for row in self.rows)} - {""}

    def dropped(self, reason: str, message: str) -> "Outcome":
        # Reports are UTF-8, and a message may quote a row with half a surrogate pair.
        quoted = message.encode(errors="backslashreplace").decode()
        return replace(self, rows=[], reason=reason, message=quoted)


class RowEncoder:
    """Encodes rows in this process. excluded: keys of user texts; a row with one of them is dropped."""

    def __init__(
        self, tokenizer: "PreTrainedTokenizerBase", cfg: DataConfig, excluded: frozenset[str] = frozenset()
    ) -> None:
        self.tokenizer = tokenizer
        self.cfg = cfg
        self.excluded = excluded
        self.num_tokens = len(tokenizer)

    def encode_all(self, records: Iterable[Record], task: Task) -> Iterator[Outcome]:
        """Yield one outcome for each record, in order."""
        for batch in in_batches(records):
            yield from self.encode(batch, task)

    def encode(self, records: Sequence[Record], task: Task) -> list[Outcome]:
        """Return one outcome for each record of a batch."""
        read = [self._read(record, task) for record in records]
        limit = self.cfg.max_tokens if task.keep == "answers" else None
        batches = _batches((pieces for _, rows in read for pieces in rows), _num_chars, MAX_TOKENIZED_CHARS)
        encoded = chain.from_iterable(encode_rows(self.tokenizer, batch, limit) for batch in batches)
        return [
            self._add_rows(outcome, list(islice(encoded, len(rows))), task) if rows else outcome
            for outcome, rows in read
        ]

    def _read(self, record: Record, task: Task) -> tuple[Outcome, list[list[Piece]]]:
        """The outcome so far, and the pieces that must still be tokenized."""
        outcome = Outcome(record.where)
        if record.row is None:
            return outcome.dropped(record.reason, record.message), []
        try:
            row = PRESETS[task.preset].map_row(record.row) if task.preset else record.row
            conversation = to_conversation(row)
            if isinstance(conversation, Pretokenized):
                return self._take_tokens(outcome, conversation, task), []
            return self._render(outcome, conversation, task)
        except BadRow as e:
            return outcome.dropped(e.reason, str(e)), []
        # A preset or a template that fails on one row of ten million must not end the run.
        except Exception as e:
            return outcome.dropped("failed", f"{type(e).__name__}: {e}"), []

    def _render(
        self, outcome: Outcome, conversation: Conversation, task: Task
    ) -> tuple[Outcome, list[list[Piece]]]:
        messages = conversation.messages
        keys = [opening_key(m["content"]) for m in messages if m["role"] == "user"]
        if not self.excluded.isdisjoint(keys):
            raise BadRow("in_heldout", "a user turn is a prompt of an evaluation set")
        outcome = replace(
            outcome,
            opening=keys[0],
            turns=len(keys),
            has_tool_calls=any("tool_calls" in m for m in messages),
            format=conversation.format,
        )
        if sum(len(m["content"]) for m in messages) > MAX_ROW_BYTES:
            message = f"more than {MAX_ROW_BYTES:,} characters; cut the row"
            return outcome.dropped("row_too_large", message), []
        if task.keep == "answers":
            rows = conversation_rows(self.tokenizer, conversation, task.thinking)
            if not rows:
                remedy = "add an answer or set regenerate.enabled to true"
                raise BadRow("no_answer", f"no assistant text to train on; {remedy}")
            return replace(outcome, content=_content(conversation)), rows
        text = ""
        kept = replace(conversation, messages=drop_trailing_answer(messages))
        if task.keep == "script":
            script = script_of(conversation, task.thinking)
            kept = replace(conversation, messages=script.messages)
            text = script.to_json() if script.has_more else ""
        pieces = prompt_row(self.tokenizer, kept, task.thinking)
        return replace(outcome, content=_content(kept, text), script=text), [pieces]

    def _take_tokens(self, outcome: Outcome, row: Pretokenized, task: Task) -> Outcome:
        """Use a pretokenized row. Its prompt ends before the first supervised token."""
        ids = row.token_ids
        mask = row.loss_mask
        if max(ids) >= self.num_tokens:
            raise BadRow("bad_token_ids", f"token id {max(ids)} must be below the target's {self.num_tokens}")
        opening = tokens_key(ids[: _num_prompt(mask)])
        if opening in self.excluded:
            raise BadRow("in_heldout", "it is a prompt of an evaluation set")
        content = digest_of(array("i", ids).tobytes(), bytes(mask))
        pairs = enumerate(pairwise([False, *mask]))
        begins = [i for i, (before, now) in pairs if now and not before]  # first token of each answer
        outcome = replace(outcome, opening=opening, content=content, turns=len(begins), format="pretokenized")
        if task.keep == "answers":
            end = min(len(ids), self.cfg.max_tokens)
            trains = any(a and b for a, b in pairwise(mask[:end]))
            kept = EncodedRow(ids[:end], mask[:end], len(ids) - end, "" if trains else "empty_mask")
        else:
            end = begins[-1] if begins else len(ids)
            kept = EncodedRow(ids[:end], [False] * end, 0, "")
        return self._add_rows(outcome, [kept], task)

    def _add_rows(self, outcome: Outcome, encoded: list[EncodedRow], task: Task) -> Outcome:
        """Add the token rows that can be used; drop the source row if there is none."""
        reason = message = ""
        rows = []
        for i, row in enumerate(encoded):
            num_prompt = _num_prompt(row.loss_mask)
            if num_prompt > self.cfg.max_prompt_tokens:
                reason = "prompt_too_long"
                limit = self.cfg.max_prompt_tokens
                message = f"{num_prompt} tokens, more than data.max_prompt_tokens {limit}"
            elif row.reason:
                reason = row.reason
                message = f"its first {self.cfg.max_tokens} tokens cannot be used"
            else:
                content = digest_of(outcome.content, str(i)) if i else outcome.content
                name = f"{outcome.opening}:{content}"
                rows.append(TokenRow(name, task.source, row.token_ids, row.loss_mask, outcome.script))
        if not rows:
            return outcome.dropped(reason, message)
        is_cut = len(rows) < len(encoded) or any(row.num_cut for row in encoded)
        return replace(outcome, rows=rows, is_cut=is_cut)


def opening_key(text: str) -> str:
    """Key of a user text: 12 hex digits; case and white space do not change it."""
    return digest_of(" ".join(text.casefold().split()))[:12]


def tokens_key(token_ids: Sequence[int]) -> str:
    """Key of a pretokenized prompt: 12 hex digits."""
    return digest_of(array("i", token_ids).tobytes())[:12]


def _content(conversation: Conversation, script: str = "") -> str:
    return digest_of(json.dumps([conversation.messages, conversation.tools], sort_keys=True), script)


def _num_prompt(loss_mask: list[bool]) -> int:
    return loss_mask.index(True) if True in loss_mask else len(loss_mask)


def _num_chars(pieces: list[Piece]) -> int:
    return sum(len(piece.text) for piece in pieces)


def in_batches(records: Iterable[Record]) -> Iterator[list[Record]]:
    """Group records into batches of bounded size."""
    return _batches(records, lambda record: record.size, MAX_BATCH_BYTES)


def _batches(items: Iterable[T], size_of: Callable[[T], int], max_size: int) -> Iterator[list[T]]:
    batch: list[T] = []
    size = 0
    for item in items:
        batch.append(item)
        size += size_of(item)
        if len(batch) == MAX_BATCH_ROWS or size >= max_size:
            yield batch
            batch = []
            size = 0
    if batch:
        yield batch
