"""Answers as text become messages again: what the template writes is read back, however it writes calls."""

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerBase

from eagle3.data.conversations import Message
from eagle3.regenerate.answer_text import AnswerForm
from tests.helpers.calls import CALLING, OPENED, OSLO, QWEN_CALL, TOOLS, assistant, call, form_of, written
from tests.helpers.formats import CHATML_TURNS, FORMATS, IM, QWEN3, QWEN_ADDED
from tests.helpers.tiny_tokenizer import train_tokenizer

# Templates that write a single call only, and those that show no content, or no thoughts, beside calls.
SINGLE = {"llama3.1", "gpt-oss"}
CALLS_ALONE = {"llama3.1", "mistral", "mistral-spaced", "mistral-legacy", "gpt-oss", "deepseek-r1"}
NO_THOUGHTS = {"smollm2", "llama3.1", "gemma3", "mistral", "mistral-spaced", "mistral-legacy"}
TRIMMED = {"llama3.1", "gemma3", "mistral", "mistral-spaced", "mistral-legacy"}

LETTERS = st.text(
    st.characters(codec="utf-8", categories=["L", "N", "P", "Zs"], exclude_characters="<>[]{}|▁｜"),
    min_size=1,
    max_size=20,
)
WORDS = st.lists(
    LETTERS | st.sampled_from([" ", "\n", "a: 1", '{"a": 1}', "`x`", "}"]), min_size=1, max_size=4
).map("".join)
TEXTS = WORDS.filter(lambda t: bool(t.strip()))
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**9), 10**9)
    | st.floats(allow_nan=False, allow_infinity=False)
    | WORDS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=3),
    max_leaves=5,
)
CALLS = st.one_of(
    st.fixed_dictionaries(
        {"city": WORDS}, optional={"days": st.integers(), "scale": st.none() | WORDS, "more": VALUES}
    ).map(lambda a: call("weather", **a)),
    st.dictionaries(WORDS, VALUES, max_size=2).map(lambda a: call("get_time", **a)),
    st.fixed_dictionaries({}, optional={"values": st.lists(VALUES, max_size=3), "exact": st.booleans()}).map(
        lambda a: call("math.sum", **a)
    ),
)


@st.composite
def answers(draw: st.DrawFn, name: str) -> Message:
    """Messages that the template writes without loss."""
    thoughts = "" if name in NO_THOUGHTS else draw(TEXTS if name in OPENED else st.just("") | TEXTS)
    # Thoughts and contents lose line breaks, or all white space, at their ends.
    thoughts = thoughts.strip()
    calls = draw(st.lists(CALLS, max_size=1 if name in SINGLE else 3)) if name in CALLING else []
    if name.startswith("mistral"):
        calls = [{"id": f"call{i:05}", **c} for i, c in enumerate(calls)]
    content = draw(TEXTS if not calls else st.just("") if name in CALLS_ALONE else st.just("") | TEXTS)
    content = content.strip() if name in TRIMMED else content.lstrip()
    if calls and name == "deepseek-r1":
        thoughts = ""  # the template shows none beside calls
    return assistant(content, thoughts, tuple(calls))


@pytest.mark.parametrize("name", FORMATS)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_what_the_template_writes_is_read_back(name: str, data: st.DataObject) -> None:
    message = data.draw(answers(name))
    text = written(FORMATS[name].tokenizer(), message)
    form = form_of(name)
    assert form.read(text) == message
    for end in form.turn.ends:
        assert form.read(text.removesuffix(end)) == message


@pytest.mark.parametrize("name", FORMATS)
def test_thinking_off_reads_contents_and_calls(name: str) -> None:
    tokenizer, form = FORMATS[name].tokenizer(), form_of(name, thinking=False)
    messages = (
        [assistant(calls=(call("get_time", "abcdef123" if "mistral" in name else ""),))]
        if name in CALLING
        else []
    )
    # Where the prompt opens thoughts in spite of the switch, an answer has some.
    messages += [] if name in OPENED else [assistant("It rains.")]
    assert [form.read(written(tokenizer, m, thinking=False)) for m in messages] == messages


@pytest.mark.parametrize("name", ["qwen3-thinking", "deepseek-r1"])
def test_thoughts_that_the_prompt_opens_end_where_they_are_closed(name: str) -> None:
    for thinking in (None, True, False):
        form = form_of(name, thinking)
        assert form.read("Greet.\n</think>\n\nHello!") == assistant("Hello!", "Greet.")
        assert form.read("\n</think>\n\nHello!") == assistant("Hello!")
        assert form.read("Greet. But how") == assistant("", "Greet. But how")
    assert form_of("qwen3-thinking").read(QWEN_CALL) == assistant(calls=(OSLO,))


def test_thoughts_that_the_prompt_opens_unless_they_are_off_are_not_looked_for_then() -> None:
    opened = (
        "{{- '<|im_start|>assistant\\n<think>\\n' }}"
        "{%- if enable_thinking is defined and not enable_thinking %}{{- '\\n</think>\\n\\n' }}{%- endif %}"
    )
    template = (
        QWEN3[: QWEN3.rindex("{%- if add_generation_prompt")]
        + "{%- if add_generation_prompt %}"
        + opened
        + "{%- endif %}"
    )
    tokenizer = train_tokenizer(template, IM, QWEN_ADDED, eos="<|im_end|>")
    assert AnswerForm.of(tokenizer, TOOLS, None).read("Greet.\n</think>\n\nHello!") == assistant(
        "Hello!", "Greet."
    )
    off = AnswerForm.of(tokenizer, TOOLS, False)
    assert off.read("Hello!") == assistant("Hello!")
    assert off.read(QWEN_CALL) == assistant(calls=(OSLO,))


def test_thoughts_that_the_answer_opens_may_be_empty_or_missing() -> None:
    form = form_of("qwen3")
    assert form.read("<think>\nGreet.\n</think>\n\nHello!") == assistant("Hello!", "Greet.")
    assert form.read("<think>Greet.</think>Hello!") == assistant("Hello!", "Greet.")
    assert form.read("<think>\n\n</think>\n\nHello!<|im_end|>") == assistant("Hello!")
    assert form.read("Hello! 1 < 2") == assistant("Hello! 1 < 2")
    assert form.read("<think>\nGreet. But") == assistant("", "Greet. But")


def test_a_call_named_in_thoughts_is_none() -> None:
    text = "<think>\nUse <tool_call>?\n</think>\n\nNo."
    assert form_of("qwen3").read(text) == assistant("No.", "Use <tool_call>?")


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        (
            "qwen3",
            '<tool_call>{"arguments":{"city":"Oslo"},"name":"weather"}</tool_call>\n',
            assistant(calls=(OSLO,)),
        ),
        ("qwen3", f"{QWEN_CALL}\n\n\n{QWEN_CALL}", assistant(calls=(OSLO, OSLO))),
        ("qwen3", f"I look.{QWEN_CALL}", assistant("I look.", calls=(OSLO,))),
        ("qwen3", f"I look.\n{QWEN_CALL}", assistant("I look.", calls=(OSLO,))),
        ("qwen3", f"I look.\n\n{QWEN_CALL}", assistant("I look.\n", calls=(OSLO,))),
        ("qwen3", f"\n\n{QWEN_CALL}", assistant(calls=(OSLO,))),
        ("llama3.1", ' {"name":"weather",\n"parameters":{"city":"Oslo"}} ', assistant(calls=(OSLO,))),
        ("llama3.1", '{"parameters": {"city": "Oslo"}, "name": "weather"}', assistant(calls=(OSLO,))),
        ("llama3.1", '{"name": "Bob", "age": 3}', assistant('{"name": "Bob", "age": 3}')),
        ("llama3.1", '{"name": "Bob", "ag', assistant('{"name": "Bob", "ag')),
        ("llama3.1", '{"age": ', assistant('{"age": ')),
        ("llama3.1", "weather is bad", assistant("weather is bad")),
        ("llama3.1", 'Call {"name": "weather"}', assistant('Call {"name": "weather"}')),
        (
            "mistral",
            '[TOOL_CALLS][{"name":"weather","arguments":{"city":"Oslo"}}]</s>',
            assistant(calls=(OSLO,)),
        ),
        (
            "mistral",
            '[TOOL_CALLS] [{"name":"weather","arguments":{"city":"Oslo"},"id":"q"},\n{"name":"get_time","arguments":{}}]',
            assistant(calls=({"id": "q", **OSLO}, call("get_time"))),
        ),
        ("mistral", "It rains [1].", assistant("It rains [1].")),
        (
            "gpt-oss",
            'to=functions.weather <|channel|>commentary json <|message|>{"city": "Oslo"}',
            assistant(calls=(OSLO,)),
        ),
    ],
)
def test_white_space_and_the_order_of_keys_may_differ(name: str, text: str, message: Message) -> None:
    assert form_of(name).read(text) == message


def test_without_tools_every_text_is_content() -> None:
    for name in FORMATS:
        form = AnswerForm.of(FORMATS[name].tokenizer(), thinking=False)
        if name not in OPENED:
            assert form.read(QWEN_CALL) == assistant(QWEN_CALL)


def chatml(call_text: str) -> PreTrainedTokenizerBase:
    """ChatML whose assistant writes this for each call."""
    calls = "m.content + '<|im_end|>\\n' }}"
    looped = f"m.content }}}}{{%- for call in m.tool_calls or [] %}}{call_text}{{%- endfor %}}{{{{- '<|im_end|>\\n' }}}}"
    return train_tokenizer(CHATML_TURNS.replace(calls, looped), IM, eos="<|im_end|>")


XML = "<f>{{- call.function.name }}{% for k, v in call.function.arguments.items() %}<p={{ k }}>{{ v }}</p>{% endfor %}</f>"
PYTHON = "{{- call.function.name }}({{ call.function.arguments | string }})"
NAME_ONLY = "<call>{{- call.function.name }}</call>"


@pytest.mark.parametrize(
    ("tokenizer", "problem"),
    [
        (FORMATS["smollm2"].tokenizer, "writes no tool calls"),
        (FORMATS["gemma3"].tokenizer, "writes no tool calls"),
        (lambda: chatml(XML), "otherwise than"),
        (lambda: chatml(PYTHON), "otherwise than"),
        (lambda: chatml(NAME_ONLY), "otherwise than"),
    ],
)
def test_templates_without_calls_in_json_are_refused_at_the_start(
    tokenizer: Callable[[], PreTrainedTokenizerBase], problem: str
) -> None:
    with pytest.raises(
        ValueError, match=rf"chat template writes.*{problem.removeprefix('writes')}.*target.chat_template"
    ):
        AnswerForm.of(tokenizer(), TOOLS)
    AnswerForm.of(tokenizer())


@pytest.mark.parametrize(
    "call_text",
    [
        "<f={{- call.function.name }}>{{ call.function.arguments | tojson }}</f>",
        "Action: {{ call.function.name }}\nAction Input: {{ call.function.arguments | tojson }}\n",
        '<call>{"type": "function", "function": {{ call.function | tojson }}}</call>',
        '{{ "[" if loop.first else ", " }}{"arguments": {{ call.function.arguments | tojson }}, "tool": '
        '"{{ call.function.name }}"}{{ "]" if loop.last }}',
        "{{ call.function.name }}\n{{ call.function.arguments | tojson }}\n",
    ],
)
def test_other_ways_to_write_a_call_are_learnt(call_text: str) -> None:
    tokenizer = chatml(call_text)
    form = AnswerForm.of(tokenizer, TOOLS)
    for calls in ([OSLO], [OSLO, call("get_time"), call("math.sum", values=[1, "}"], exact=True)]):
        message = assistant(calls=tuple(calls))
        assert form.read(written(tokenizer, message)) == message
    assert form.read("No {call} [1].") == assistant("No {call} [1].")
