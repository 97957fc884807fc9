"""Source rows to token rows: what becomes of a row depends on that row and the settings alone."""

import json
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice, pairwise
from typing import TYPE_CHECKING, Literal

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
MAX_TOKENIZED_CHARS = 1 << 20  # in one call of the tokenizer, which needs some 100 bytes a token


@dataclass(frozen=True)
class Task:
    """What to make of a source's rows.

    source: name written into them. preset, thinking: as in SourceConfig. keep: `answers` for whole
    conversations; `script` for what the target is asked first, with an all-False mask and the script of the
    rest; `last_prompt` for what it is asked last, after the row's own history.
    """

    source: str
    preset: str
    thinking: bool | None
    keep: Literal["answers", "script", "last_prompt"]


@dataclass(frozen=True)
class Outcome:
    """What became of one source row.

    rows: its token rows; several where the template needs them; none if dropped, for `reason` and with
    `message`. opening: key of the first user text: rows with one opening stay on one side of every split.
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

    def dropped(self, reason: str, message: str) -> "Outcome":
        """The same without token rows."""
        return replace(self, rows=[], reason=reason, message=message)


class RowEncoder:
    """Rows to outcomes in this process, with one tokenizer and the keys of the conversations to leave out."""

    def __init__(
        self, tokenizer: "PreTrainedTokenizerBase", cfg: DataConfig, excluded: frozenset[str] = frozenset()
    ) -> None:
        self.tokenizer = tokenizer
        self.cfg = cfg
        self.excluded = excluded
        self.num_tokens = len(tokenizer)

    def encode_all(self, records: Iterable[Record], task: Task) -> Iterator[Outcome]:
        """One outcome a record, in order."""
        for batch in in_batches(records):
            yield from self.encode(batch, task)

    def encode(self, records: Sequence[Record], task: Task) -> list[Outcome]:
        """The same for one batch."""
        read = [self._read(record, task) for record in records]
        encoded = iter(self._tokenize([pieces for _, rows in read for pieces in rows], task))
        return [
            self._add_rows(outcome, list(islice(encoded, len(rows))), task) if rows else outcome
            for outcome, rows in read
        ]

    def _read(self, record: Record, task: Task) -> tuple[Outcome, list[list[Piece]]]:
        """The outcome so far, and the pieces of the rows that are still to be tokenized."""
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
        # One of ten million rows that a mapping or a template fails on must not end the run.
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
        """A row that comes as tokens: its prompt ends at the first supervised one."""
        ids, mask = row.token_ids, row.loss_mask
        if max(ids) >= self.num_tokens:
            raise BadRow("bad_token_ids", f"token id {max(ids)} is none of the target's {self.num_tokens}")
        opening = tokens_key(ids[: _num_prompt(mask)])
        if opening in self.excluded:
            raise BadRow("in_heldout", "it is a prompt of an evaluation set")
        content = digest_of(array("i", ids).tobytes(), bytes(mask))
        turns = sum(mask and not before for before, mask in pairwise([False, *mask]))
        outcome = replace(outcome, opening=opening, content=content, turns=turns, format="pretokenized")
        if task.keep == "answers":
            end = min(len(ids), self.cfg.max_tokens)
            trains = any(a and b for a, b in pairwise(mask[:end]))
            kept = EncodedRow(ids[:end], mask[:end], len(ids) - end, "" if trains else "empty_mask")
        else:
            end = _last_answer(mask)
            kept = EncodedRow(ids[:end], [False] * end, 0, "")
        return self._add_rows(outcome, [kept], task)

    def _tokenize(self, rows: list[list[Piece]], task: Task) -> Iterator[EncodedRow]:
        limit = self.cfg.max_tokens if task.keep == "answers" else None
        batch: list[list[Piece]] = []
        num_chars = 0
        for pieces in rows:
            batch.append(pieces)
            num_chars += sum(len(piece.text) for piece in pieces)
            if num_chars >= MAX_TOKENIZED_CHARS:
                yield from encode_rows(self.tokenizer, batch, limit)
                batch = []
                num_chars = 0
        yield from encode_rows(self.tokenizer, batch, limit)

    def _add_rows(self, outcome: Outcome, encoded: list[EncodedRow], task: Task) -> Outcome:
        """Add the token rows that can be used; without any the source row is dropped."""
        reason = message = ""
        rows = []
        for i, row in enumerate(encoded):
            num_prompt = _num_prompt(row.loss_mask)
            if num_prompt > self.cfg.max_prompt_tokens:
                reason = "prompt_too_long"
                message = (
                    f"{num_prompt} tokens, more than data.max_prompt_tokens {self.cfg.max_prompt_tokens}"
                )
            elif row.reason:
                reason = row.reason
                message = f"nothing can be made of its first {self.cfg.max_tokens} tokens"
            else:
                content = digest_of(outcome.content, str(i)) if i else outcome.content
                name = f"{outcome.opening}:{content}"
                rows.append(TokenRow(name, task.source, row.token_ids, row.loss_mask, outcome.script))
        if not rows:
            return outcome.dropped(reason, message)
        is_cut = len(rows) < len(encoded) or any(row.num_cut for row in encoded)
        return replace(outcome, rows=rows, is_cut=is_cut)


def opening_key(text: str) -> str:
    """Key of a user text: 12 hex digits that neither case nor white space changes."""
    return digest_of(" ".join(text.casefold().split()))[:12]


def tokens_key(token_ids: Sequence[int]) -> str:
    """Key of a prompt that comes as token ids: 12 hex digits."""
    return digest_of(array("i", token_ids).tobytes())[:12]


def _content(conversation: Conversation, script: str = "") -> str:
    return digest_of(json.dumps([conversation.messages, conversation.tools], sort_keys=True), script)


def _num_prompt(loss_mask: list[bool]) -> int:
    return loss_mask.index(True) if True in loss_mask else len(loss_mask)


def _last_answer(loss_mask: list[bool]) -> int:
    """Index of the last answer's first token; the row's length if there is no answer."""
    begins = [i for i, mask in enumerate(loss_mask) if mask and (i == 0 or not loss_mask[i - 1])]
    return begins[-1] if begins else len(loss_mask)


def in_batches(records: Iterable[Record]) -> Iterator[list[Record]]:
    """Records in order, in lists that are small enough to be encoded at once."""
    batch: list[Record] = []
    size = 0
    for record in records:
        batch.append(record)
        size += record.size
        if len(batch) == MAX_BATCH_ROWS or size >= MAX_BATCH_BYTES:
            yield batch
            batch = []
            size = 0
    if batch:
        yield batch
