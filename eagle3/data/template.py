"""Render a conversation with the chat template, find the model's text in it, and cut it into pieces.

An answer begins where the rendering of (history + generation prompt) ends, and ends with the last control
token of the rendering of (history + answer). A row that the template writes in another way is refused. A row
whose text spells a control token is refused, too: the engine would read it as one. Messages have the form
that vLLM gives to templates: the arguments of a call are an object, the content next to it is "".
"""

import re
from collections.abc import Iterator
from datetime import datetime
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

from eagle3.data.conversations import REASONING_KEYS, BadRow, Conversation, check_unicode

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TODAY = datetime(2025, 1, 1)  # templates that write the date must not change digests
SWITCHES = ("enable_thinking", "thinking")
PROBED_ANSWER = "Probed answer."
PROBED_REASONING = "Probed reasoning."


class Piece(NamedTuple):
    """Text that is tokenized on its own; its first `num_answer` characters are the model's."""

    text: str
    num_answer: int


class Answer(NamedTuple):
    """A rendering that ends with an assistant turn; text[begin:end] is the model's."""

    text: str
    begin: int
    end: int


def template_of(tokenizer: "PreTrainedTokenizerBase", thinking: bool | None) -> "ChatTemplate":
    """The tokenizer's template, probed once. thinking: as in `conversation_rows`."""
    return _probed_template(tokenizer, str(tokenizer.chat_template), thinking)


@lru_cache(maxsize=8)
def _probed_template(
    tokenizer: "PreTrainedTokenizerBase", source: str, thinking: bool | None
) -> "ChatTemplate":
    return ChatTemplate(tokenizer, thinking)


class ChatTemplate:
    """A template and the properties that probe renderings show.

    control: matches control tokens. closes: the template writes a text after every conversation.
    empty_reasoning: the template writes it before an answer without reasoning; the model does not.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", thinking: bool | None) -> None:
        self.tokenizer = tokenizer
        self.thinking = thinking
        added = list(tokenizer.added_tokens_decoder.values())
        # Some tokenizers do not mark turn tokens as special. The model writes <think> and <tool_call> itself.
        turns = self._try_render(["user", "assistant", "user"], prompt=False)
        control = [t.content for t in added if t.special or (t.content.strip() and t.content in turns)]
        longest_first = sorted((re.escape(text) for text in control if len(text) > 1), key=len, reverse=True)
        self.control = re.compile("|".join(longest_first) or "(?!)")
        question = self._try_render(["user"], prompt=False)
        self.closes = not self._try_render(["user"], prompt=True).startswith(question)
        self.empty_reasoning = ""  # while it is looked for
        self.empty_reasoning = self._find_empty_reasoning()

    def rows(self, conversation: Conversation) -> list[list[Piece]]:
        """Rows up to the last answer; a new row begins where the template changes earlier turns."""
        messages = self._messages(conversation)
        rows: list[list[Answer]] = []
        asked = False
        for i, message in enumerate(messages):
            asked = asked or message["role"] == "user"
            if message["role"] != "assistant" or not asked:
                continue
            answer = self._answer(messages, conversation.tools, i)
            last = rows[-1][-1] if rows else None
            if last and answer.text.startswith(last.text[: last.end], 0, answer.begin):
                rows[-1].append(answer)
            else:
                rows.append([answer])
        return [_cut_at_answers(answers) for answers in rows]

    def prompt(self, conversation: Conversation) -> list[Piece]:
        """The conversation and the generation prompt as one piece."""
        messages = self._messages(conversation)
        text = self._render(messages, conversation.tools, prompt=True)
        for message in messages:
            _check_calls(message, text)
        return [Piece(text, 0)]

    def _answer(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, index: int
    ) -> Answer:
        prompt = self._render(messages[:index], tools, prompt=True)
        text = self._render(messages[: index + 1], tools, prompt=False)
        begin = len(prompt)
        if "thinking" not in messages[index] and text.startswith(self.empty_reasoning, begin):
            begin += len(self.empty_reasoning)
        _check_calls(messages[index], text[begin:])
        tokens = list(self.control.finditer(text, begin))
        is_ended = bool(tokens) and tokens[-1].start() > begin and not text[tokens[-1].end() :].strip()
        if self.closes or not text.startswith(prompt) or not is_ended:
            found = f"the chat template does not write message {index + 1} (assistant)"
            rule = "between its generation prompt and a control token"
            raise BadRow("answer_not_cut", f"{found} {rule}; enable regeneration or remove the row")
        return Answer(text, begin, tokens[-1].end())

    def _find_empty_reasoning(self) -> str:
        """The text that the template writes around reasoning, if it also writes it without reasoning."""
        question = {"role": "user", "content": "x"}
        answer = {"role": "assistant", "content": PROBED_ANSWER}
        reasoned = answer | dict.fromkeys(REASONING_KEYS, PROBED_REASONING)
        try:
            found = self._answer([question, answer], None, 1)
            text = self._render([question, reasoned], None, prompt=False)
        except BadRow:
            return ""
        if PROBED_REASONING not in text or text.replace(PROBED_REASONING, "") != found.text:
            return ""
        return found.text[found.begin :].partition(PROBED_ANSWER)[0]

    def _messages(self, conversation: Conversation) -> list[dict[str, Any]]:
        """The template's messages: reasoning under every known key, or none if thinking is off."""
        for text in _texts([conversation.messages, conversation.tools]):
            check_unicode(text, "a text")  # also in calls of the target's own: JSON may escape it
            if token := self.control.search(text):
                rule = f"a text spells the control token {token.group()}"
                raise BadRow("control_token", f"{rule}; remove it from the text, or remove the row")
        messages = []
        for message in conversation.messages:
            written = {key: value for key, value in message.items() if key != "reasoning_content"}
            reasoning = message.get("reasoning_content")
            if reasoning and self.thinking is not False:
                written |= dict.fromkeys(REASONING_KEYS, reasoning)
            messages.append(written)
        return messages

    def _render(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, prompt: bool
    ) -> str:
        import jinja2

        switches = {} if self.thinking is None else dict.fromkeys(SWITCHES, self.thinking)
        try:
            text = self.tokenizer.apply_chat_template(
                messages,
                tools=tools,
                tokenize=False,
                add_generation_prompt=prompt,
                strftime_now=TODAY.strftime,
                **switches,
            )
        except RecursionError as e:
            message = "a tool or its call is nested too deep to be written; remove the row"
            raise BadRow("too_deep", message) from e
        except (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError) as e:
            rule = f"the chat template refuses the conversation ({e})"
            raise BadRow("template_refuses", f"{rule}; change the row to turns that it allows") from e
        return str(text)

    def _try_render(self, roles: list[str], prompt: bool) -> str:
        try:
            return self._render([{"role": role, "content": "x"} for role in roles], None, prompt)
        except BadRow:
            return ""


def _cut_at_answers(answers: list[Answer]) -> list[Piece]:
    """Cut the last rendering before each answer."""
    text = answers[-1].text[: answers[-1].end]
    pieces = [Piece(text[: answers[0].begin], 0)]
    for answer, end in zip(answers, [a.begin for a in answers[1:]] + [len(text)], strict=True):
        pieces.append(Piece(text[answer.begin : end], answer.end - answer.begin))
    return pieces


def _texts(value: Any) -> Iterator[str]:
    """All strings in a nested value, keys of objects included."""
    left = [value]
    while left:
        found = left.pop()
        if isinstance(found, str):
            yield found
        elif isinstance(found, list):
            left += found
        elif isinstance(found, dict):
            left += [*found, *found.values()]


def _check_calls(message: dict[str, Any], text: str) -> None:
    for call in message.get("tool_calls", []):
        name = call["function"]["name"]
        if name not in text:
            rule = f"the chat template does not write the call of {name}"
            remedy = "choose a target that calls tools or remove the row"
            raise BadRow("tool_calls_not_rendered", f"{rule}; {remedy}")
