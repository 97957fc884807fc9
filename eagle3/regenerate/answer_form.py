"""How a chat template writes an assistant's turn, learnt by rendering made-up answers once per template.

What stands around the parts of the made-up answers is the form:

    <think>⏎ T ⏎</think>⏎⏎ C ⏎<tool_call>⏎ {"name": N, "arguments": A} ⏎</tool_call>⏎<tool_call>⏎ {…} ⏎</tool_call>
    before   behind thoughts | opening                                between                       closing
                             gap
     to=functions. N <|channel|>commentary json<|message|> A
    opening          middle
"""

import json
import math
import re
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from eagle3.data.chat import conversation_rows, prompt_row
from eagle3.data.conversations import BadRow, Conversation, Message
from eagle3.data.template import template_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

THOUGHTS, CONTENT, NAME = "Probing thoughts.", "Probed content.", "probe_tool"
# A template that writes arguments one by one, or as Python does, writes no JSON of these.
ARGUMENTS = {"probe_text": "a 'b'", "probe_flag": True}
# Some templates want ids of nine letters and digits.
IDS = ("probe0001", "probe0002")
PROPERTIES = {
    "probe_text": {"type": "string", "description": "Text."},
    "probe_flag": {"type": "boolean", "description": "Flag."},
}
SCHEMA = {"type": "object", "properties": PROPERTIES, "required": ["probe_text"]}
TOOL = {"type": "function", "function": {"name": NAME, "description": "Probe.", "parameters": SCHEMA}}


@dataclass(frozen=True)
class CallForm:
    """How tool calls are written.

    between: None where the template writes a single call only. gap: what stands between content and opening.
    name_key, arguments_key, id_key: keys of the call's JSON object; "" where the name stands before the arguments' object, with
    `middle` between the two, and an empty id_key where no id is written there.
    """

    opening: str
    between: str | None
    closing: str
    gap: str
    middle: str = ""
    name_key: str = ""
    arguments_key: str = ""
    id_key: str = ""

    @property
    def is_bare(self) -> bool:
        """Whether no word announces a call, so that only a whole text can be one."""
        return not re.search(r"\w", self.opening)

    @property
    def first_word(self) -> str:
        """The opening's first tag or word: where it stands, a call was begun."""
        first = re.match(r"\s*(<[^<>\s]+>|\[[^\[\]\s]+\]|\S+)", self.opening)
        return first[1] if first else ""


@dataclass(frozen=True)
class TurnForm:
    """How an answer is written.

    before_thoughts: "" where the generation prompt opens them, None where the template shows none. ends: what ends a turn.
    calls: None if they were not asked for.
    """

    before_content: str
    before_thoughts: str | None
    behind_thoughts: str
    ends: tuple[str, ...]
    calls: CallForm | None


class FoundCall(NamedTuple):
    """A probed call in a rendering: text[begin:end], and its part of a CallForm."""

    begin: int
    end: int
    form: dict[str, str]


def turn_form(tokenizer: "PreTrainedTokenizerBase", thinking: bool | None, with_calls: bool) -> TurnForm:
    """Learn the form, once for each template and setting.

    Args:
        tokenizer: with a chat template.
        thinking: as in `conversation_rows`.
        with_calls: how calls are written must be found, too.

    Raises:
        ValueError: if the template writes no answers, or no calls, or calls without JSON; says what to do.
    """
    return _turn_form(tokenizer, str(tokenizer.chat_template), thinking, with_calls)


def decode_json(text: str, at: int) -> tuple[Any, int]:
    """One strict JSON value behind white space, and where it ends; ValueError or RecursionError if there is none."""
    return DECODER.raw_decode(text, len(text) - len(text[at:].lstrip()))


def _finite(number: str) -> float:
    if math.isfinite(value := float(number)):
        return value
    raise ValueError(f"{number} is no number in JSON")


DECODER = json.JSONDecoder(parse_constant=_finite, parse_float=_finite)


@lru_cache(maxsize=32)
def _turn_form(
    tokenizer: "PreTrainedTokenizerBase", source: str, thinking: bool | None, with_calls: bool
) -> TurnForm:
    probes = _Probes(tokenizer, thinking, [TOOL] if with_calls else None)
    plain = probes.written(CONTENT)
    if CONTENT not in plain:
        _refuse("writes no answer behind a user's turn", "choose a chat model")
    before_content, _, end = plain.partition(CONTENT)
    before, behind = _thought_form(probes, before_content)
    if not with_calls:
        return TurnForm(before_content, before, behind, (end,), None)
    calls, call_end = _call_form(probes, end)
    return TurnForm(before_content, before, behind, tuple(dict.fromkeys((end, call_end))), calls)


class _Probes:
    """Writes made-up answers."""

    def __init__(
        self, tokenizer: "PreTrainedTokenizerBase", thinking: bool | None, tools: list[dict[str, Any]] | None
    ) -> None:
        self.tokenizer, self.thinking, self.tools = tokenizer, thinking, tools

    def written(self, content: str, num_calls: int = 0, thoughts: str = "") -> str:
        """The model's text of an answer; "" where the template refuses it."""
        answer = Message(role="assistant", content=content)
        if thoughts:
            answer["reasoning_content"] = thoughts
        if num_calls:
            function = {"name": NAME, "arguments": ARGUMENTS}
            answer["tool_calls"] = [
                {"id": i, "type": "function", "function": function} for i in IDS[:num_calls]
            ]
        messages = [Message(role="user", content="Probe."), answer]
        try:
            rows = conversation_rows(self.tokenizer, Conversation(messages, self.tools), self.thinking)
        except BadRow:
            return ""
        return "".join(piece.text[: piece.num_answer] for piece in rows[-1])

    def prompt(self) -> str:
        """What stands before an answer."""
        pieces = prompt_row(
            self.tokenizer, Conversation([Message(role="user", content="Probe.")], self.tools), self.thinking
        )
        return "".join(piece.text for piece in pieces)


def _thought_form(probes: _Probes, before_content: str) -> tuple[str | None, str]:
    """What stands before and behind thoughts."""
    if probes.thinking is False:
        # Thoughts are not shown then, but may be written: always where the prompt opens them in spite of the switch.
        shown = _Probes(probes.tokenizer, None, probes.tools)
        before, behind = _thought_form(shown, before_content)
        return (before, behind) if before or shown.prompt() == probes.prompt() else (None, "")
    text = probes.written(CONTENT, thoughts=THOUGHTS)
    before, _, rest = text.partition(THOUGHTS)
    behind = rest.partition(CONTENT)[0].removesuffix(before_content)
    return (before, behind) if behind.strip() and CONTENT in rest else (None, "")


def _call_form(probes: _Probes, end: str) -> tuple[CallForm, str]:
    """The form of calls, and what ends an answer with calls."""
    remedy = "choose a target that calls tools in JSON, or give target.chat_template, such as workflows/recipes/tools.jinja"
    one = probes.written("", 1)
    if NAME not in one:
        _refuse("writes no tool calls", remedy)
    found = _find_calls(one)
    if not found:
        _refuse("writes tool calls otherwise than as a name and a JSON object of arguments behind it", remedy)
    opening, tail = one[: found[0].begin], one[found[0].end :]
    call_end = end
    if not end or not tail.endswith(end):
        tags = list(template_of(probes.tokenizer, probes.thinking).control.finditer(tail))
        call_end = tail[tags[-1].start() :] if tags and not tail[tags[-1].end() :].strip() else ""
    two = probes.written("", 2)
    pair = _find_calls(two)
    between = two[pair[0].end : pair[1].begin] if len(pair) == 2 else None
    behind_content = probes.written(CONTENT, 1).partition(CONTENT)[2]
    calls = _find_calls(behind_content)
    before_call = behind_content[: calls[0].begin] if calls else ""
    gap = before_call.removesuffix(opening) if before_call.endswith(opening) else ""
    return CallForm(opening, between, tail.removesuffix(call_end), gap, **found[0].form), call_end


def _find_calls(text: str) -> list[FoundCall]:
    found: list[FoundCall] = []
    last = 0
    for match in re.finditer(r"\{", text):
        begin = match.start()
        if begin < last:
            continue
        try:
            value, end = decode_json(text, begin)
        except ValueError:
            continue
        key_of = {str(v): k for k, v in value.items()}
        if value == ARGUMENTS:
            name_at = text.rfind(NAME, last, begin)
            if name_at < 0:
                continue
            begin, form = name_at, {"middle": text[name_at + len(NAME) : begin]}
        elif ARGUMENTS in value.values() and NAME in value.values():
            form = {"name_key": key_of[NAME], "arguments_key": key_of[str(ARGUMENTS)]}
            form["id_key"] = next((key_of[i] for i in IDS if i in key_of), "")
        else:
            continue
        found.append(FoundCall(begin, end, form))
        last = end
    return found


def _refuse(what: str, remedy: str) -> NoReturn:
    raise ValueError(f"the target's chat template {what}, so that its answers cannot be read; {remedy}")
