"""The text of an answer back to a message: content, thoughts and tool calls, in the form that the chat template has for them.

JSON is read strictly; white space between the parts may differ from the template's. A call that was begun but cannot be carried
out is no content: `BadCall` says why.
"""

import json
import re
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NoReturn

from eagle3.data.conversations import BadRow, Message
from eagle3.regenerate.answer_form import CallForm, TurnForm, decode_json, turn_form

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

JSON_TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,), "number": (int, float), "integer": (int, float), "boolean": (bool,), "array": (list,), "object": (dict,),
    "null": (type(None),),
}  # fmt: skip


class BadCall(BadRow):
    """An answer that begins a tool call which cannot be carried out.

    reason: bad_json, bad_form, cut_off, text_behind_calls, no_arguments, unknown_tool, missing_argument or wrong_type.
    """


@dataclass(frozen=True)
class AnswerForm:
    """A template's form of an answer, and the schemas of the functions that one conversation's answers may call."""

    turn: TurnForm
    functions: tuple[dict[str, Any], ...] = ()

    @classmethod
    def of(
        cls,
        tokenizer: "PreTrainedTokenizerBase",
        tools: list[dict[str, Any]] | None = None,
        thinking: bool | None = None,
    ) -> "AnswerForm":
        """The form in which the tokenizer's template writes answers, learnt once.

        Args:
            tokenizer: with a chat template.
            tools: the conversation's, {"type": "function", "function": schema} each; without any, every text is content.
            thinking: as in `conversation_rows`.

        Raises:
            ValueError: if there are tools, but the template writes no calls, or not as JSON; says what to do.
        """
        return cls(
            turn_form(tokenizer, thinking, bool(tools)), tuple(tool["function"] for tool in tools or [])
        )

    def read(self, text: str) -> Message:
        """Take an answer's text apart.

        Args:
            text: what the target wrote behind the generation prompt, special tokens included; its end of turn may be missing.

        Returns:
            the assistant's message; ids of calls only where the text has them. An answer whose thoughts never end has no content.

        Raises:
            BadCall: if a call was begun that cannot be read or does not fit the tools.
        """
        for end in self.turn.ends:
            text = text.removesuffix(end)
        thoughts, rest = self._cut_thoughts(text)
        content, calls = self._cut_calls(rest)
        message = Message(role="assistant", content=content.removeprefix(self.turn.before_content))
        if thoughts.strip():
            message["reasoning_content"] = thoughts
        if calls:
            message["tool_calls"] = calls
        return message

    def _cut_thoughts(self, text: str) -> tuple[str, str]:
        """(thoughts, what is left)."""
        before, behind = self.turn.before_thoughts, self.turn.behind_thoughts
        if before is None:
            return "", text
        if before.strip():
            opening = re.compile(rf"\s*{_source(before)}").match(text)
            if not opening:
                return "", text
            text = _cut_start(text[opening.end() :], before)
        closing = re.compile(_source(behind)).search(text)
        if closing:
            return _cut_end(text[: closing.start()], behind), _cut_start(text[closing.end() :], behind)
        calls = self.turn.calls
        if calls is None or calls.is_bare or calls.first_word not in text:
            return text, ""
        if not before.strip() and text.lstrip().startswith(calls.first_word):
            return "", text
        raise BadCall(
            "bad_form", f"thoughts must end with {behind.strip()!r} before a call, got none in {text[-60:]!r}"
        )

    def _cut_calls(self, text: str) -> tuple[str, list[dict[str, Any]]]:
        """(content, calls)."""
        form = self.turn.calls
        if form is None:
            return text, []
        reader = _CallReader(form, self.functions, text)
        if form.is_bare:
            return ("", reader.read(reader.match(form.opening, 0))) if reader.is_call() else (text, [])
        at = text.find(form.first_word)
        if at < 0:
            return text, []
        leading = form.opening[: -len(form.opening.lstrip())]
        content = text[:at].removesuffix(leading).removesuffix(form.gap)
        return content if content.strip() else "", reader.read(reader.match(form.opening, at))


class _CallReader:
    """Reads the calls of one text."""

    def __init__(self, form: CallForm, functions: tuple[dict[str, Any], ...], text: str) -> None:
        self.form, self.functions, self.text = form, functions, text

    def is_call(self) -> bool:
        """Whether a text without opening words is a call: an object with its keys, or the begin of one with a tool's name."""
        form, names = self.form, [function["name"] for function in self.functions]
        opening = _pattern(form.opening).match(self.text)
        if not opening:
            return False
        rest = self.text[opening.end() :]
        if not form.name_key:
            return any(re.match(rf"{re.escape(name)}\s*{_source(form.middle)}\s*\{{", rest) for name in names)
        try:
            value, _ = decode_json(rest, 0)
        except (ValueError, RecursionError):
            named = re.match(rf'\{{\s*"{re.escape(form.name_key)}"\s*:\s*"([^"]*)"', rest)
            return named is not None and named[1] in names
        if not isinstance(value, dict):
            return False
        return value.get(form.name_key) in names or {form.name_key, form.arguments_key} <= value.keys()

    def match(self, literal: str, at: int) -> int:
        """Where the text goes on behind a literal that must stand there."""
        found = _pattern(literal).match(self.text, at)
        if not found:
            left = "".join(self.text[at:].split())
            cut = "".join(literal.split()).startswith(left)
            self._refuse("cut_off" if cut else "bad_form", f"{literal.strip()!r} must stand here", at)
        return found.end()

    def read(self, at: int) -> list[dict[str, Any]]:
        """The calls from the first one's begin to the end of the text."""
        form, calls = self.form, []
        while True:
            call, at = self._read_object(at) if form.name_key else self._read_apart(at)
            self._check(**call["function"])
            calls.append(call)
            closing = _pattern(form.closing).match(self.text, at)
            if closing and not self.text[closing.end() :].strip():
                return calls
            between = _pattern(form.between).match(self.text, at) if form.between is not None else None
            if not between:
                self._refuse(
                    "text_behind_calls", "nothing may stand behind the calls", self.match(form.closing, at)
                )
            at = between.end()

    def _read_object(self, at: int) -> tuple[dict[str, Any], int]:
        value, end = self._read_json(at)
        name = value.get(self.form.name_key) if isinstance(value, dict) else None
        if not isinstance(name, str):
            self._refuse("bad_form", f"a call must be an object with a text as {self.form.name_key}", at)
        call = self._call(name, value.get(self.form.arguments_key), at)
        number = value.get(self.form.id_key) if self.form.id_key else None
        return {"id": number, **call} if isinstance(number, str) else call, end

    def _read_apart(self, at: int) -> tuple[dict[str, Any], int]:
        begin = r"\s*" if self.form.middle.strip() else r"\s*(?=\{)"
        named = re.compile(rf"\s*(.*?)\s*{_source(self.form.middle)}{begin}", re.DOTALL).match(self.text, at)
        if not named:
            reason = "bad_form" if "{" in self.text[at:] else "cut_off"
            self._refuse(reason, f"{self.form.middle.strip()!r} must stand behind a tool's name", at)
        arguments, end = self._read_json(named.end())
        return self._call(named[1], arguments, at), end

    def _read_json(self, at: int) -> tuple[Any, int]:
        try:
            return decode_json(self.text, at)
        except (ValueError, RecursionError) as e:
            closed = self.form.closing.strip() and re.compile(_source(self.form.closing)).search(
                self.text, at
            )
            at_end = isinstance(e, json.JSONDecodeError) and (
                e.pos >= len(self.text.rstrip()) or "Unterminated" in e.msg
            )
            self._refuse(
                "cut_off" if at_end and not closed else "bad_json", f"a call must be JSON ({e})", at, e
            )

    def _call(self, name: str, arguments: Any, at: int) -> dict[str, Any]:
        try:
            json.dumps([name, arguments], ensure_ascii=False).encode()
        except (UnicodeEncodeError, RecursionError) as e:
            self._refuse("bad_json", f"a call must be JSON that can be written again ({e})", at, e)
        return {"type": "function", "function": {"name": name, "arguments": arguments}}

    def _check(self, name: str, arguments: Any) -> None:
        """Hold a call against its function's schema: required arguments and the types of the first level."""
        function = next((f for f in self.functions if f["name"] == name), None)
        if function is None:
            known = ", ".join(f["name"] for f in self.functions)
            raise BadCall(
                "unknown_tool", f"a call must name one of {known}, got {name!r}; nothing can be replayed"
            )
        if not isinstance(arguments, dict):
            raise BadCall(
                "no_arguments", f"arguments of {name} must be an object, got {type(arguments).__name__}"
            )
        schema = function.get("parameters")
        schema = schema if isinstance(schema, dict) else {}
        required, properties = schema.get("required"), schema.get("properties")
        for key in required if isinstance(required, list) else []:
            if key not in arguments:
                raise BadCall(
                    "missing_argument",
                    f"{name} needs the argument {key}, got {', '.join(arguments) or 'none'}",
                )
        for key, value in arguments.items():
            described = properties.get(key) if isinstance(properties, dict) else None
            if isinstance(described, dict) and not _has_type(value, described.get("type")):
                raise BadCall(
                    "wrong_type", f"{key} of {name} must be {described['type']}, got {json.dumps(value)[:40]}"
                )

    def _refuse(self, reason: str, rule: str, at: int, cause: Exception | None = None) -> NoReturn:
        raise BadCall(
            reason, f"{rule}, got {self.text[at : at + 60]!r} at character {at + 1} of the answer"
        ) from cause


def _has_type(value: Any, wanted: Any) -> bool:
    names = [wanted] if isinstance(wanted, str) else wanted if isinstance(wanted, list) else []
    if not names or any(name not in JSON_TYPES for name in names):
        return True  # no type, or none of JSON Schema's
    for name in names:
        right = isinstance(value, JSON_TYPES[name]) and (name == "boolean" or not isinstance(value, bool))
        if right and (name != "integer" or value == int(value)):
            return True
    return False


def _source(literal: str) -> str:
    """A pattern of the literal's words and signs with any white space between them."""
    return r"\s*".join(map(re.escape, re.findall(r"\w+|[^\w\s]", literal)))


@lru_cache(maxsize=256)
def _pattern(literal: str) -> re.Pattern[str]:
    return re.compile(rf"\s*{_source(literal)}\s*")


def _cut_start(text: str, literal: str) -> str:
    """The text without the white space that the literal before it ends with, or any if it has other."""
    space = literal[len(literal.rstrip()) :]
    return text.removeprefix(space) if text.startswith(space) else text.lstrip()


def _cut_end(text: str, literal: str) -> str:
    space = literal[: len(literal) - len(literal.lstrip())]
    return text.removesuffix(space) if text.endswith(space) else text.rstrip()
