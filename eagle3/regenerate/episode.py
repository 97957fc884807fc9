"""One conversation under way: what the target is asked next, and the token rows that its answers become.

The history is the target's own. The next prompt is what serving would feed: the messages so far, the target's among them, as its
chat template writes them. Where that begins with the row so far, the row goes on, token for token, with what the template writes
behind it; where the template writes earlier turns otherwise (dropped thoughts, trimmed text), a new row begins with the whole
prompt. No token is trained twice.

    row       <s>user⏎Hi</s>⏎<s>assistant⏎ | Hello!</s> |
    rendered  <s>user⏎Hi</s>⏎<s>assistant⏎   Hello!</s>   ⏎<s>user⏎Bye</s>⏎<s>assistant⏎
    behind it                                             ⏎<s>user⏎Bye</s>⏎<s>assistant⏎
"""

import logging
from collections import Counter
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from eagle3.data.chat import encode_rows, prompt_row
from eagle3.data.conversations import BadRow, Conversation, Message
from eagle3.data.pieces import Piece
from eagle3.data.script import Script
from eagle3.files import digest_of
from eagle3.regenerate.answer_text import AnswerForm
from eagle3.regenerate.answers import Answer
from eagle3.shards.tokens import TokenRow

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# The first token of an answer comes from the target's own prefill and is never drafted, so shorter answers train nothing.
MIN_ANSWER_TOKENS = 2

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Limits:
    """max_model_len: of the engine. max_new_tokens: of one answer. max_tool_rounds: answers with calls in a row."""

    max_model_len: int
    max_new_tokens: int
    max_tool_rounds: int


class Episode:
    """The conversation of one prompt row.

    `prompt` is what is asked next, None when it is over; `num_answers` were taken. `counts` are JSON-ready: user turns
    `requested` = `answered` + `failed` + `skipped` (behind one that failed); `failed: <reason>`; answers `at_length_limit`;
    `tool_calls`.
    """

    def __init__(
        self, row: TokenRow, limits: Limits, tokenizer: "PreTrainedTokenizerBase | None", end_ids: list[int]
    ) -> None:
        self.row, self.limits, self.end_ids = row, limits, set(end_ids)
        self.prompt: list[int] | None = list(row.token_ids)
        self.num_answers = 0
        self.rows: list[TokenRow] = []
        self.ids, self.mask = list(row.token_ids), list(row.loss_mask)
        self.script = Script.from_json(row.script) if row.script else None
        self.counts = Counter(requested=1 + len(self.script.turns if self.script else []))
        if self.script:
            assert tokenizer is not None
            self.tokenizer = tokenizer
            self.form = AnswerForm.of(tokenizer, self.script.tools, self.script.thinking)
            self.messages = list(self.script.messages)
            self.text = "".join(piece.text for piece in self._render())
            self.turns_left = list(self.script.turns)
            self.rounds_left = limits.max_tool_rounds

    @property
    def num_turns_over(self) -> int:
        """User turns for which nothing more is asked."""
        return self.counts["answered"] + self.counts["failed"] + self.counts["skipped"]

    def take(self, answer: Answer) -> None:
        """Go on behind the target's answer to `prompt`."""
        assert self.prompt is not None
        self.num_answers += 1
        if len(answer.token_ids) < MIN_ANSWER_TOKENS:
            self._end("too_short")
            return
        self.ids += answer.token_ids
        self.mask += [True] * len(answer.token_ids)
        cut = answer.finish_reason == "length"
        self.counts["at_length_limit"] += cut
        if self.script is None or not (self.turns_left or self.script.tools):
            self.counts["answered"] += 1
            self._end("")
        elif cut:
            self._end("at_length_limit")
        else:
            self._go_on(answer)

    def _go_on(self, answer: Answer) -> None:
        """The target's words become a message of the history, and the script says what follows."""
        num_words = len(answer.token_ids) - (answer.token_ids[-1] in self.end_ids)
        before = self.ids[-len(answer.token_ids) - 1]
        try:
            message = self.form.read(self._decode_behind(before, answer.token_ids[:num_words]))
            follow = self._what_follows(message)
            if follow:
                self.messages += [message, *follow]
                self._ask_behind(
                    self.text + self._decode_behind(before, answer.token_ids), answer.token_ids[-1]
                )
        except BadRow as e:
            self._end(e.reason)
        except Exception as e:
            # An answer that a template or a tool's schema trips over must not end the shard: it would do so at every attempt.
            logger.warning("row %s: nothing can follow on an answer (%r)", self.row.sample_id, e)
            self._end("unforeseen")

    def _what_follows(self, message: Message) -> list[Message]:
        """Tool results, or the next user turn; nothing if the conversation is over."""
        assert self.script is not None
        calls = message.get("tool_calls", [])
        for call in calls:
            # Servers give ids to calls that come without one, and some templates want nine characters.
            self.counts["tool_calls"] += 1
            call.setdefault("id", f"call{self.counts['tool_calls']:05d}")
        if not calls or not self.script.recorded.results:
            # A task that records no results asks for the calls alone.
            self.counts["answered"] += 1
            self.rounds_left = self.limits.max_tool_rounds
            if not self.turns_left or calls:
                self._end("")
                return []
            return self.turns_left.pop(0)
        self.rounds_left -= 1
        results = [self.script.recorded.replay(call) for call in calls]
        if None in results or not self.rounds_left:
            self._end("call_not_recorded" if None in results else "too_many_calls")
            return []
        return [
            Message(role="tool", content=str(result), name=call["function"]["name"], tool_call_id=call["id"])
            for call, result in zip(calls, results, strict=True)
        ]

    def _ask_behind(self, text: str, last_id: int) -> None:
        """Ask what stands behind `text`, the row so far with its last token, or begin a new row."""
        pieces = self._render()
        self.text = "".join(piece.text for piece in pieces)
        new_ids = self._ids_behind(pieces, text, last_id) if self.text.startswith(text) else None
        if new_ids is None:
            self._close_row()
            new_ids = encode_rows(self.tokenizer, [pieces])[0].token_ids
        self.ids += new_ids
        self.mask += [False] * len(new_ids)
        self.prompt = list(self.ids)
        if len(self.ids) + self.limits.max_new_tokens > self.limits.max_model_len:
            self._end("no_room")

    def _ids_behind(self, pieces: list[Piece], text: str, last_id: int) -> list[int] | None:
        """Tokens behind `text`; None if its last token does not stand there alone."""
        # That token goes along: some tokenizers put a space behind it. The empty piece stands for the begin of the whole text.
        behind = [Piece("", 0), *_behind(pieces, len(text) - len(self._decode([last_id])))]
        first_id, *new_ids = encode_rows(self.tokenizer, [behind])[0].token_ids
        return new_ids if first_id == last_id else None

    def _end(self, failure: str) -> None:
        """Nothing more is asked. failure: why the user turn under way has no answer, or ""."""
        if failure:
            self.counts.update(["failed", f"failed: {failure}"])
        self.counts["skipped"] = self.counts["requested"] - self.counts["answered"] - self.counts["failed"]
        self.prompt = None
        self._close_row()

    def _close_row(self) -> None:
        """Keep the row up to its last supervised token, if it trains anything."""
        size = len(self.mask) - self.mask[::-1].index(True) if True in self.mask else 0
        mask = self.mask[:size]
        if any(a and b for a, b in pairwise(mask)):
            opening, _, content = self.row.sample_id.partition(":")
            number = len(self.rows)
            sample_id = f"{opening}:{digest_of(content, str(number))}" if number else self.row.sample_id
            self.rows.append(TokenRow(sample_id, self.row.source, self.ids[:size], mask))
        self.ids, self.mask = [], []

    def _render(self) -> list[Piece]:
        assert self.script is not None
        return prompt_row(
            self.tokenizer, Conversation(self.messages, self.script.tools), self.script.thinking
        )

    def _decode_behind(self, before: int, token_ids: list[int]) -> str:
        """The text of tokens as it stands behind another one: alone, SentencePiece tokens would lose a space at their begin."""
        return self._decode([before, *token_ids]).removeprefix(self._decode([before]))

    def _decode(self, token_ids: list[int]) -> str:
        return str(
            self.tokenizer.decode(token_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        )


def _behind(pieces: list[Piece], num_chars: int) -> list[Piece]:
    """The pieces without their first characters."""
    left = []
    for piece in pieces:
        if len(piece.text) > num_chars:
            left.append(Piece(piece.text[num_chars:], 0))
        num_chars = max(0, num_chars - len(piece.text))
    return left
