"""A chat template's renderings: where answers begin and end in them.

**Boundaries** come from renderings alone. An answer begins where (history + generation prompt) ends inside (history + answer) and
ends with the last control token there. Renderings of made-up turns, once per template, show what it writes behind every
conversation (`closing`) and before an answer without thoughts (`empty_thoughts`); neither is the model's text.

How a rendering is cut then, and tags in contents: eagle3/data/pieces.py.
"""

import json
import logging
import re
from collections.abc import Callable
from datetime import datetime
from functools import lru_cache
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from eagle3.data.conversations import THOUGHT_KEYS, BadRow, Conversation, Message
from eagle3.data.pieces import Answer, Piece, Tags, cut_at_answers, cut_at_marks, escaped, marks_for

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Some templates write today's date, which would give the same rows other digests every day: it stands still.
TODAY = datetime(2025, 1, 1)
# The end of a generation prompt that opens the model's thoughts: <think>, [THINK].
OPENING = re.compile(r"[<\[][\w:]+[>\]](?=\s*$)")

logger = logging.getLogger(__name__)
T = TypeVar("T")


class Shown(NamedTuple):
    """A conversation as the template is shown it, and three characters that are in neither: for tags and two probes."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    mark: str
    words: str
    thoughts: str


def template_of(tokenizer: "PreTrainedTokenizerBase", thinking: bool | None) -> "ChatTemplate":
    """The tokenizer's template, probed once. thinking: on or off, or None to leave it to the template."""
    return _template_of(tokenizer, str(tokenizer.chat_template), thinking)


@lru_cache(maxsize=8)
def _template_of(tokenizer: "PreTrainedTokenizerBase", source: str, thinking: bool | None) -> "ChatTemplate":
    return ChatTemplate(tokenizer, source, thinking)


class ChatTemplate:
    """A template with what has to be known to find the model's text in its renderings."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", source: str, thinking: bool | None) -> None:
        self.tokenizer, self.source, self.thinking = tokenizer, source, thinking
        self.closing = self.empty_thoughts = ""
        self.warned = False
        added = list(tokenizer.added_tokens_decoder.values())
        special = {t.content for t in added if t.special}
        # Some tokenizers do not flag all their turn markers as special, so what the template itself writes counts too.
        control = Tags(special | {t.content for t in added if t.content.strip() and t.content in source})
        self.control = control.pattern
        turns = self._try_render(["user", "assistant", "user"], prompt=False)
        # System and assistant may use tokens that end no turn, such as <think> or <tool_call>.
        trusted = Tags(special | set(self.control.findall(turns)))
        self.tags = {"system": trusted, "assistant": trusted, "user": control, "tool": control}
        asked, prompt = (self._try_render(["user"], prompt) for prompt in (False, True))
        self.closing = asked[self._parting(asked, prompt) :] if prompt else ""
        self.empty_thoughts = self._find_empty_thoughts()

    def rows(self, conversation: Conversation) -> list[list[Piece]]:
        """The conversation up to its last answer; a new row begins where the template renders earlier turns otherwise.

        Each answer behind the first user turn is the model's text in exactly one row.
        """
        return self._in_some_style(conversation, self._rows)

    def prompt(self, conversation: Conversation) -> list[Piece]:
        """The conversation and the generation prompt: what the target answers."""
        return self._in_some_style(conversation, self._prompt)

    def _in_some_style(self, conversation: Conversation, cut: Callable[[Shown], T]) -> T:
        """Templates differ in how they want a tool call: with an empty or no content, arguments as an object or as JSON."""
        calls = any("tool_calls" in m for m in conversation.messages)
        refused: list[BadRow] = []
        for style in (_as_it_is, _without_content, _arguments_as_text) if calls else (_as_it_is,):
            try:
                shown = self._show(conversation)
                return cut(shown._replace(messages=[style(m) for m in shown.messages]))
            except BadRow as e:
                refused.append(e)
            except RecursionError as e:
                raise BadRow(
                    "too_deep", "a tool or its call is nested too deep to be written; remove the row"
                ) from e
        raise refused[0]

    def _prompt(self, shown: Shown) -> list[Piece]:
        text = self._render(shown, shown.messages, True, self.thinking)
        for message in shown.messages:
            _check_calls(message, text)
        return list(cut_at_marks(text, 0, shown.mark))

    def _rows(self, shown: Shown) -> list[list[Piece]]:
        rows: list[list[Answer]] = []
        asked = False
        for i, message in enumerate(shown.messages):
            asked = asked or message["role"] == "user"
            if message["role"] != "assistant" or not asked:
                continue
            answer = self._answer(shown, i)
            if rows and answer.text.startswith(rows[-1][-1].text[: rows[-1][-1].end], 0, answer.begin):
                rows[-1].append(answer)
            else:
                rows.append([answer])
        return [list(cut_at_answers(answers, shown.mark)) for answers in rows]

    def _answer(self, shown: Shown, index: int) -> Answer:
        history, message = shown.messages[:index], shown.messages[index]
        prompt = self._render(shown, history, True, self.thinking)
        whole = self._whole(shown, [*history, message])
        if whole.startswith(prompt):
            begin = len(prompt)
        else:
            whole, begin = self._answer_elsewhere(shown, history, message, prompt, whole)
        if self.empty_thoughts and "thinking" not in message and whole.startswith(self.empty_thoughts, begin):
            begin += len(self.empty_thoughts)
        text = whole[begin:]
        _check_calls(message, text)
        tags = list(self.control.finditer(text))
        closed = bool(tags) and not text[tags[-1].end() :].strip()
        num_words = tags[-1].start() if closed else len(text)
        if num_words == 0:
            raise BadRow(
                "answer_not_rendered",
                f"the chat template does not write message {index + 1} (assistant); enable regeneration or remove the row",
            )
        return Answer(whole, begin, begin + (tags[-1].end() if closed else num_words), closed)

    def _answer_elsewhere(
        self, shown: Shown, history: list[dict[str, Any]], message: dict[str, Any], prompt: str, whole: str
    ) -> tuple[str, int]:
        """Rendering and begin of an answer that is not written behind its generation prompt, as where that opens thoughts."""
        plain = {k: v for k, v in message.items() if k not in THOUGHT_KEYS}
        probe = self._whole(shown, [*history, {**plain, "content": shown.words}])
        _, found, behind = probe.rpartition(shown.words)
        thoughts = _thoughts_behind(prompt, message)
        if found and thoughts is not None and "tool_calls" not in message:
            return prompt + thoughts + behind, len(prompt)
        parting = self._parting(whole, probe if found else prompt)
        header = prompt.removeprefix(self._whole(shown, history))
        header_at = whole.rfind(header, 0, parting) if header and header != prompt else -1
        if header_at >= 0:
            return prompt + whole[header_at + len(header) :], len(prompt)
        others = [
            self._render(shown, history, True, thinking) for thinking in {None, False, True} - {self.thinking}
        ]
        if any(map(whole.startswith, others)):
            return whole, max(len(other) for other in others if whole.startswith(other))
        if not self.warned:
            logger.warning(
                "the chat template writes answers elsewhere than behind its generation prompt; taken as they are"
            )
            self.warned = True
        return whole, parting

    def _parting(self, a: str, b: str) -> int:
        """Where two texts part, but not inside a control token of either."""
        low, high = 0, min(len(a), len(b))
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if a.startswith(b[:middle]) else (low, middle - 1)
        return min(
            [
                low,
                *(
                    m.start()
                    for text in (a, b)
                    for m in self.control.finditer(text)
                    if m.start() < low < m.end()
                ),
            ]
        )

    def _find_empty_thoughts(self) -> str:
        """What stands before an answer without thoughts, if thoughts would add to the rendering nothing but themselves."""
        shown = self._show(Conversation([Message(role="user", content="x")]))
        answer = {"role": "assistant", "content": shown.words}
        shown.messages.append(answer)
        try:
            found = self._answer(shown, 1)
            thinking = self._whole(
                shown, [shown.messages[0], answer | dict.fromkeys(THOUGHT_KEYS, shown.thoughts)]
            )
        except BadRow:
            return ""
        if shown.thoughts not in thinking or thinking.replace(shown.thoughts, "") != found.text:
            return ""
        return found.text[found.begin :].partition(shown.words)[0]

    def _show(self, conversation: Conversation) -> Shown:
        """Break tags, and give thoughts under every name that templates use; leave them out where thinking is off."""
        everything = f"{conversation.messages}{conversation.tools}{self.source}"
        characters = tuple(islice(marks_for(everything), 3))
        if len(characters) < 3:
            raise BadRow("bad_unicode", "the conversation uses every private-use character; remove the row")
        messages = []
        for message in conversation.messages:
            shown = self.tags[message["role"]].broken(dict(message), characters[0]) | {
                "role": message["role"]
            }
            thoughts = shown.pop("reasoning_content", None)
            if thoughts and self.thinking is not False:
                shown |= dict.fromkeys(THOUGHT_KEYS, thoughts)
            messages.append(shown)
        return Shown(messages, self.tags["user"].broken(conversation.tools, characters[0]), *characters)

    def _whole(self, shown: Shown, messages: list[dict[str, Any]]) -> str:
        return self._render(shown, messages, False, self.thinking).removesuffix(self.closing)

    def _render(
        self, shown: Shown, messages: list[dict[str, Any]], prompt: bool, thinking: bool | None
    ) -> str:
        import jinja2

        switches = {} if thinking is None else {"enable_thinking": thinking, "thinking": thinking}
        try:
            text: str = self.tokenizer.apply_chat_template(
                messages,
                tools=shown.tools,
                tokenize=False,
                add_generation_prompt=prompt,
                strftime_now=TODAY.strftime,
                **switches,
            )
        except (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError) as e:
            raise BadRow(
                "template_refuses",
                f"the chat template refuses the conversation ({e}); change the row to turns that it allows",
            ) from e
        if escaped(shown.mark) in text:
            raise BadRow(
                "tag_in_text",
                "the chat template escapes a text that spells one of its tags; remove the tag or the row",
            )
        return text

    def _try_render(self, roles: list[str], prompt: bool) -> str:
        turns = [{"role": role, "content": "x"} for role in roles]
        try:
            return self._render(Shown(turns, None, next(marks_for("")), "", ""), turns, prompt, self.thinking)
        except BadRow:
            return ""


def _as_it_is(message: dict[str, Any]) -> dict[str, Any]:
    return message


def _without_content(message: dict[str, Any]) -> dict[str, Any]:
    return message if message.get("content") or "tool_calls" not in message else {**message, "content": None}


def _arguments_as_text(message: dict[str, Any]) -> dict[str, Any]:
    if "tool_calls" not in message:
        return message
    calls = [dict(call) for call in message["tool_calls"]]
    for call in calls:
        arguments = json.dumps(call["function"]["arguments"], ensure_ascii=False)
        call["function"] = {**call["function"], "arguments": arguments}
    return _without_content({**message, "tool_calls": calls})


def _check_calls(message: dict[str, Any], text: str) -> None:
    for call in message.get("tool_calls", []):
        name = call["function"]["name"]
        if name not in text:
            raise BadRow(
                "tool_calls_not_rendered",
                f"the chat template does not write the call of {name}; choose a target that calls tools or remove the row",
            )


def _thoughts_behind(prompt: str, message: dict[str, Any]) -> str | None:
    """Thoughts and answer as a model writes them behind a prompt that opens its thoughts; None if either has none."""
    opening = OPENING.search(prompt)
    if not opening:
        return None
    tag, gap = opening.group(), prompt[opening.end() :]
    closing = f"{tag[0]}/{tag[1:]}"
    content = (message["content"] or "").lstrip()
    if "thinking" in message:
        return f"{message['thinking'].strip()}{gap}{closing}{gap}{gap}{content}"
    if content.startswith(tag):
        return content.removeprefix(tag).removeprefix(gap)
    return content if closing in content else None
