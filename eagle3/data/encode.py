"""Source rows to token rows: the pure function behind every worker, and the processes that run it.

What becomes of a row depends on that row and the settings alone, and outcomes come back in the order of the rows, so nothing
shows how many processes worked or how rows were batched. Processes start only when a source is long enough to repay them: each
costs seconds of imports, which a fork server does once for all.
"""

import json
import multiprocessing
import os
from array import array
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field, replace
from itertools import chain, islice, pairwise
from types import TracebackType
from typing import TYPE_CHECKING, Literal

from eagle3.config.data import DataConfig
from eagle3.data.chat import EncodedRow, conversation_rows, encode_rows, prompt_row
from eagle3.data.conversations import (
    BadRow,
    Conversation,
    Pretokenized,
    drop_trailing_answer,
    has_answer,
    to_conversation,
)
from eagle3.data.files import MAX_ROW_BYTES, Record
from eagle3.data.presets import PRESETS
from eagle3.data.script import script_of
from eagle3.data.template import Piece
from eagle3.errors import WorkerDied
from eagle3.files import digest_of
from eagle3.shards.tokens import TokenRow

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

BATCH_ROWS = 128
BATCH_BYTES = 8 << 20
TOKENIZED_CHARS = 1 << 20  # in one call of the tokenizer, which needs some 100 bytes a token
INLINE_ROWS = 4096  # that this process tokenizes itself before it starts others
MAX_WORKERS = 8


@dataclass(frozen=True)
class Task:
    """What to make of a source's rows.

    source: name written into them. preset, thinking: as in SourceConfig. keep: whole conversations with their answers; what the
    target is asked first, with an all-False mask and the script of what follows; or what it is asked last, behind the row's
    own history.
    """

    source: str
    preset: str
    thinking: bool | None
    keep: Literal["answers", "script", "last_prompt"]


@dataclass(frozen=True)
class Outcome:
    """What became of one source row.

    rows: its token rows; several where the template needs them; none where it was dropped, for `reason` and with `message`.
    opening: key of the conversation's first user text: what opens alike is kept on one side of every split. is_cut: tokens were
    left out to fit the limits. turns: user turns. has_tool_calls: in any assistant turn. format: of the row, as recognised.
    """

    where: str
    rows: list[TokenRow] = field(default_factory=list)
    reason: str = ""
    message: str = ""
    opening: str = ""
    is_cut: bool = False
    turns: int = 0
    has_tool_calls: bool = False
    format: str = ""


@dataclass
class _Draft:
    """A row under way: its pieces by token row, or its tokens, or neither where it was dropped."""

    outcome: Outcome
    content: str = ""
    script: str = ""
    pieces: list[list[Piece]] = field(default_factory=list)
    tokens: list[EncodedRow] = field(default_factory=list)


class RowEncoder:
    """Rows to outcomes in this process, with one tokenizer and the keys of the conversations that must not come in."""

    def __init__(
        self, tokenizer: "PreTrainedTokenizerBase", cfg: DataConfig, excluded: frozenset[str] = frozenset()
    ) -> None:
        self.tokenizer, self.cfg, self.excluded = tokenizer, cfg, excluded
        self.num_tokens = len(tokenizer)

    def encode_all(self, records: Iterable[Record], task: Task) -> Iterator[Outcome]:
        """One outcome a record, in order."""
        for batch in _batches(records):
            yield from self.encode(batch, task)

    def encode(self, records: Sequence[Record], task: Task) -> list[Outcome]:
        """The same for one batch."""
        drafts = [self._draft(record, task) for record in records]
        encoded = iter(self._tokenize([pieces for draft in drafts for pieces in draft.pieces], task))
        return [
            self._finish(draft, draft.tokens or list(islice(encoded, len(draft.pieces))), task)
            for draft in drafts
        ]

    def _draft(self, record: Record, task: Task) -> _Draft:
        outcome = Outcome(record.where)
        if record.row is None:
            return _dropped(outcome, record.reason, record.message)
        try:
            conversation = to_conversation(
                PRESETS[task.preset].map_row(record.row) if task.preset else record.row
            )
            if isinstance(conversation, Pretokenized):
                return self._take_tokens(outcome, conversation, task)
            return self._render(outcome, conversation, task)
        except BadRow as e:
            return _dropped(outcome, e.reason, str(e))
        except (
            Exception
        ) as e:  # one of ten million rows that a mapping or a template trips over must not end the run
            return _dropped(outcome, "failed", f"{type(e).__name__}: {e}")

    def _render(self, outcome: Outcome, conversation: Conversation, task: Task) -> _Draft:
        messages = conversation.messages
        keys = [opening_key(m["content"]) for m in messages if m["role"] == "user"]
        calls = any("tool_calls" in m for m in messages)
        outcome = replace(
            outcome, opening=keys[0], turns=len(keys), has_tool_calls=calls, format=conversation.format
        )
        if not self.excluded.isdisjoint(keys):
            return _dropped(outcome, "in_heldout", "a user turn is a prompt of an evaluation set")
        if sum(len(m["content"]) for m in messages) > MAX_ROW_BYTES:
            return _dropped(outcome, "row_too_large", f"more than {MAX_ROW_BYTES:,} characters; cut the row")
        if task.keep == "answers":
            if not has_answer(messages):
                return _dropped(
                    outcome,
                    "no_answer",
                    "no assistant text to train on; add an answer or set regenerate.enabled to true",
                )
            return _Draft(
                outcome,
                _content(conversation),
                pieces=conversation_rows(self.tokenizer, conversation, task.thinking),
            )
        text = ""
        kept = replace(conversation, messages=drop_trailing_answer(messages))
        if task.keep == "script":
            script = script_of(conversation, task.thinking)
            kept = replace(conversation, messages=script.messages)
            text = script.to_json() if script.goes_on else ""
        return _Draft(outcome, _content(kept, text), text, [prompt_row(self.tokenizer, kept, task.thinking)])

    def _take_tokens(self, outcome: Outcome, row: Pretokenized, task: Task) -> _Draft:
        """A row that comes as tokens: its prompt is what stands before the first supervised one."""
        ids, mask = row.token_ids, row.loss_mask
        if max(ids) >= self.num_tokens:
            return _dropped(
                outcome, "bad_token_ids", f"token id {max(ids)} is none of the target's {self.num_tokens}"
            )
        outcome = replace(
            outcome,
            opening=tokens_key(ids[: _num_prompt(mask)]),
            turns=_num_answers(mask),
            format="pretokenized",
        )
        if outcome.opening in self.excluded:
            return _dropped(outcome, "in_heldout", "it is a prompt of an evaluation set")
        if task.keep != "answers":
            end = _last_answer(mask)
            kept = EncodedRow(ids[:end], [False] * end, 0, "")
        else:
            end = min(len(ids), self.cfg.max_tokens)
            trains = any(a and b for a, b in pairwise(mask[:end]))
            kept = EncodedRow(ids[:end], mask[:end], len(ids) - end, "" if trains else "empty_mask")
        return _Draft(outcome, digest_of(array("i", ids).tobytes(), bytes(mask)), tokens=[kept])

    def _tokenize(self, rows: list[list[Piece]], task: Task) -> Iterator[EncodedRow]:
        limit = self.cfg.max_tokens if task.keep == "answers" else None
        batch: list[list[Piece]] = []
        num_chars = 0
        for pieces in rows:
            batch.append(pieces)
            num_chars += sum(len(piece.text) for piece in pieces)
            if num_chars >= TOKENIZED_CHARS:
                yield from encode_rows(self.tokenizer, batch, limit)
                batch, num_chars = [], 0
        yield from encode_rows(self.tokenizer, batch, limit)

    def _finish(self, draft: _Draft, encoded: list[EncodedRow], task: Task) -> Outcome:
        outcome, rows, fault = draft.outcome, [], ("", "")
        for i, row in enumerate(encoded):
            num_prompt = _num_prompt(row.loss_mask)
            if num_prompt > self.cfg.max_prompt_tokens:
                fault = (
                    "prompt_too_long",
                    f"{num_prompt} tokens, more than data.max_prompt_tokens {self.cfg.max_prompt_tokens}",
                )
            elif row.reason:
                fault = row.reason, f"nothing can be made of its first {self.cfg.max_tokens} tokens"
            else:
                content = draft.content if i == 0 else digest_of(draft.content, str(i))
                rows.append(
                    TokenRow(
                        f"{outcome.opening}:{content}",
                        task.source,
                        row.token_ids,
                        row.loss_mask,
                        draft.script,
                    )
                )
        if encoded and not rows:
            return _dropped(outcome, *fault).outcome
        return replace(
            outcome, rows=rows, is_cut=len(rows) < len(encoded) or any(row.num_cut for row in encoded)
        )


def opening_key(text: str) -> str:
    """What a user text is compared by: 12 hex digits that neither case nor white space changes."""
    return digest_of(" ".join(text.casefold().split()))[:12]


def tokens_key(token_ids: Sequence[int]) -> str:
    """What rows that come as token ids are compared by, made of a prompt's tokens."""
    return digest_of(array("i", token_ids).tobytes())[:12]


def _content(conversation: Conversation, script: str = "") -> str:
    return digest_of(json.dumps([conversation.messages, conversation.tools], sort_keys=True), script)


def _num_prompt(loss_mask: list[bool]) -> int:
    return loss_mask.index(True) if True in loss_mask else len(loss_mask)


def _last_answer(loss_mask: list[bool]) -> int:
    """Where the last answer begins; the row's end if there is none."""
    begins = [i for i, mask in enumerate(loss_mask) if mask and (i == 0 or not loss_mask[i - 1])]
    return begins[-1] if begins else len(loss_mask)


def _num_answers(loss_mask: list[bool]) -> int:
    return sum(mask and not before for before, mask in pairwise([False, *loss_mask]))


def _dropped(outcome: Outcome, reason: str, message: str) -> _Draft:
    return _Draft(replace(outcome, reason=reason, message=message))


class EncoderPool:
    """A RowEncoder that hands long sources to processes. Use as a context manager: leaving it ends them."""

    def __init__(self, encoder: RowEncoder) -> None:
        self.encoder = encoder
        self.workers = encoder.cfg.workers or min(len(os.sched_getaffinity(0)), MAX_WORKERS)
        self.inline_rows = INLINE_ROWS
        self.processes: ProcessPoolExecutor | None = None

    def __enter__(self) -> "EncoderPool":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.processes:
            self.processes.shutdown(cancel_futures=True)

    def encode(self, records: Iterable[Record], task: Task) -> Iterator[Outcome]:
        """One outcome a record, in order; some batches ahead of what is asked for."""
        batches = _batches(records)
        for batch in batches:
            if self.workers > 1 and self.inline_rows <= 0:
                yield from self._encode_elsewhere(chain([batch], batches), task)
                return
            self.inline_rows -= len(batch)
            yield from self.encoder.encode(batch, task)

    def _encode_elsewhere(self, batches: Iterator[list[Record]], task: Task) -> Iterator[Outcome]:
        processes = self.processes = self.processes or self._start()
        running: deque[Future[list[Outcome]]] = deque()
        try:
            for batch in islice(batches, 2 * self.workers):
                running.append(processes.submit(_encode, batch, task))
            while running:
                outcomes = running.popleft().result()
                running.extend(processes.submit(_encode, batch, task) for batch in islice(batches, 1))
                yield from outcomes
        except BrokenProcessPool as e:
            raise WorkerDied(
                "a process that tokenizes rows was ended from outside, most likely for want of memory; lower data.workers"
            ) from e
        finally:
            for future in running:
                future.cancel()

    def _start(self) -> ProcessPoolExecutor:
        context = multiprocessing.get_context("forkserver")
        # What every worker needs, imported once. A tokenizer that travels costs half the imports of one that is loaded.
        context.set_forkserver_preload([type(self.encoder.tokenizer).__module__, __name__])
        return ProcessPoolExecutor(self.workers, context, initializer=_start_worker, initargs=(self.encoder,))


def _batches(records: Iterable[Record]) -> Iterator[list[Record]]:
    batch: list[Record] = []
    size = 0
    for record in records:
        batch.append(record)
        size += record.size
        if len(batch) == BATCH_ROWS or size >= BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


_worker: RowEncoder


def _start_worker(encoder: RowEncoder) -> None:
    global _worker
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    _worker = encoder


def _encode(records: list[Record], task: Task) -> list[Outcome]:
    return _worker.encode(records, task)
