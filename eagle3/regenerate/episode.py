"""One conversation in progress: what the target is asked next, and the token rows that its answers become.

The next prompt is what serving would feed: the messages so far, with the target's own answers, as its chat
template writes them. If that text begins with the row so far, the row continues with the rest of the text. If
the template writes earlier turns differently (dropped thoughts, trimmed text), a new row begins with the
whole prompt. No token is trained twice.

    row       <s>user⏎Hi</s>⏎<s>assistant⏎ | Hello!</s> |
    rendered  <s>user⏎Hi</s>⏎<s>assistant⏎   Hello!</s>   ⏎<s>user⏎Bye</s>⏎<s>assistant⏎
    the rest                                              ⏎<s>user⏎Bye</s>⏎<s>assistant⏎
"""

import logging
from collections import Counter
from dataclasses import dataclass
from itertools import pairwise

from eagle3.data.chat import encode_rows, prompt_row
from eagle3.data.conversations import BadRow, Conversation, Message
from eagle3.data.script import Script
from eagle3.data.template import Piece
from eagle3.files import digest_of
from eagle3.regenerate.answers import Answer
from eagle3.regenerate.parsers import AnswerReader
from eagle3.shards.tokens import TokenRow

# The first token of an answer comes from the target's prefill and is never drafted: one token trains nothing.
MIN_ANSWER_TOKENS = 2

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Limits:
    """max_new_tokens: of one answer. max_tool_rounds: consecutive answers with calls."""

    max_model_len: int
    max_new_tokens: int
    max_tool_rounds: int


class Episode:
    """The conversation of one prompt row.

    `prompt` is asked next, None when the conversation is over. `counts`: user turns `requested` = `answered`
    + `failed` + `skipped` (after a failed one); `failed: <reason>`; answers `at_length_limit`; `tool_calls`.

    Args:
        row: the prompt, with a script if anything can follow the first answer.
        limits: of the engine and the settings.
        reader: reads the answers of a row with a script.
        end_ids: tokens that end an answer.
    """

    def __init__(
        self, row: TokenRow, limits: Limits, reader: AnswerReader | None, end_ids: list[int]
    ) -> None:
        self.row = row
        self.limits = limits
        self.end_ids = set(end_ids)
        self.prompt: list[int] | None = list(row.token_ids)
        self.num_answers = 0
        self.rows: list[TokenRow] = []
        self.ids = list(row.token_ids)
        self.mask = list(row.loss_mask)
        self.script = Script.from_json(row.script) if row.script else None
        self.counts = Counter(requested=1 + len(self.script.turns if self.script else []))
        if self.script:
            assert reader is not None
            self.reader = reader
            self.messages = list(self.script.messages)
            self.text = "".join(piece.text for piece in self._render())
            self.turns_left = list(self.script.turns)
            self.rounds_left = limits.max_tool_rounds

    @property
    def num_turns_done(self) -> int:
        """User turns that need no more answers."""
        return self.counts["answered"] + self.counts["failed"] + self.counts["skipped"]

    def take(self, answer: Answer) -> None:
        """Add the target's answer to `prompt`, and find the next prompt."""
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
            self._end()
        elif cut:
            self._end("at_length_limit")
        else:
            self._continue(self.script, answer.token_ids)

    def _continue(self, script: Script, answer: list[int]) -> None:
        """Read the answer as a message of the history, and ask what the script has next."""
        words = answer[:-1] if answer[-1] in self.end_ids else answer
        before = self.ids[-len(answer) - 1]
        try:
            text = self._decode_after(before, words)
            message = self.reader.read(text, words, script)
            next_messages = self._next_messages(script, message)
            if next_messages:
                self.messages += [message, *next_messages]
                self._ask(self.text + self._decode_after(before, answer), answer[-1])
        except BadRow as e:
            self._end(e.reason)
        except Exception as e:
            # A template or schema that fails on an answer must not end the shard: it would at every attempt.
            logger.warning("row %s: nothing can follow on an answer (%r)", self.row.sample_id, e)
            self._end("unforeseen")

    def _next_messages(self, script: Script, message: Message) -> list[Message]:
        """Tool results, or the next user turn; empty if the conversation is over."""
        calls = message.get("tool_calls", [])
        for call in calls:
            # Servers give ids to calls that come without one, and some templates want nine characters.
            self.counts["tool_calls"] += 1
            call.setdefault("id", f"call{self.counts['tool_calls']:05d}")
        # A task without recorded results asks for the calls alone.
        if not calls or not script.recorded.results:
            self.counts["answered"] += 1
            self.rounds_left = self.limits.max_tool_rounds
            if self.turns_left and not calls:
                return self.turns_left.pop(0)
            self._end()
            return []
        self.rounds_left -= 1
        results = [script.recorded.replay(call) for call in calls]
        if None in results or not self.rounds_left:
            self._end("call_not_recorded" if None in results else "too_many_calls")
            return []
        return [
            Message(role="tool", content=str(result), name=call["function"]["name"], tool_call_id=call["id"])
            for call, result in zip(calls, results, strict=True)
        ]

    def _ask(self, text: str, last_id: int) -> None:
        """Ask the messages so far: after `text`, the row so far with its last token, or in a new row."""
        pieces = self._render()
        self.text = "".join(piece.text for piece in pieces)
        new_ids = self._ids_after(text, last_id, pieces) if self.text.startswith(text) else None
        if new_ids is None:
            self._close_row()
            new_ids = encode_rows(self.reader.tokenizer, [pieces])[0].token_ids
        self.ids += new_ids
        self.mask += [False] * len(new_ids)
        self.prompt = list(self.ids)
        if len(self.ids) + self.limits.max_new_tokens > self.limits.max_model_len:
            self._end("no_room")

    def _ids_after(self, text: str, last_id: int, pieces: list[Piece]) -> list[int] | None:
        """Tokens of the pieces after `text`; None if its last token merges with what follows."""
        # The last token is encoded with the rest: some tokenizers put a space after it. The empty piece is
        # in place of the text before them.
        rest = [Piece("", 0), *_drop_chars(pieces, len(text) - len(self._decode([last_id])))]
        first_id, *new_ids = encode_rows(self.reader.tokenizer, [rest])[0].token_ids
        return new_ids if first_id == last_id else None

    def _end(self, failure: str | None = None) -> None:
        """Ask nothing more. failure: why the current user turn has no answer, if it has none."""
        if failure:
            self.counts.update(["failed", f"failed: {failure}"])
        self.counts["skipped"] = self.counts["requested"] - self.counts["answered"] - self.counts["failed"]
        self.prompt = None
        self._close_row()

    def _close_row(self) -> None:
        """Keep the row up to its last supervised token, if it trains anything."""
        size = max((i + 1 for i, supervised in enumerate(self.mask) if supervised), default=0)
        mask = self.mask[:size]
        if any(a and b for a, b in pairwise(mask)):
            opening, _, content = self.row.sample_id.partition(":")
            number = len(self.rows)
            sample_id = f"{opening}:{digest_of(content, str(number))}" if number else self.row.sample_id
            self.rows.append(TokenRow(sample_id, self.row.source, self.ids[:size], mask))
        self.ids = []
        self.mask = []

    def _render(self) -> list[Piece]:
        assert self.script is not None
        conversation = Conversation(self.messages, self.script.tools)
        return prompt_row(self.reader.tokenizer, conversation, self.script.thinking)

    def _decode_after(self, before: int, token_ids: list[int]) -> str:
        """The text of tokens after another one: alone, SentencePiece would drop a space at their begin."""
        return self._decode([before, *token_ids]).removeprefix(self._decode([before]))

    def _decode(self, token_ids: list[int]) -> str:
        return str(self.reader.tokenizer.decode(token_ids, clean_up_tokenization_spaces=False))


def _drop_chars(pieces: list[Piece], num_chars: int) -> list[Piece]:
    """The pieces without their first characters."""
    left = []
    for piece in pieces:
        if len(piece.text) > num_chars:
            left.append(Piece(piece.text[num_chars:], 0))
        num_chars = max(0, num_chars - len(piece.text))
    return left
