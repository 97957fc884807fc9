"""Calls that cannot be read, or do not fit the schema of their tool, are refused by reason."""

import json
from typing import Any

import pytest

from eagle3.regenerate.answer_text import AnswerForm, BadCall
from tests.helpers.calls import QWEN_CALL, assistant, call, form_of
from tests.helpers.formats import FORMATS


def hermes(inner: str) -> str:
    return f"<tool_call>\n{inner}\n</tool_call>"


@pytest.mark.parametrize(
    ("name", "text", "reason"),
    [
        ("qwen3", "<tool_call>", "cut_off"),
        ("qwen3", '<tool_call>\n{"name": "wea', "cut_off"),
        ("qwen3", '<tool_call>\n{"name": "weather", "arguments": {"city":', "cut_off"),
        ("qwen3", QWEN_CALL.removesuffix("</tool_call>"), "cut_off"),
        ("qwen3", QWEN_CALL.removesuffix("call>"), "cut_off"),
        ("qwen3", f"{QWEN_CALL}\n<tool_call>\n", "cut_off"),
        ("qwen3", f"{QWEN_CALL}\nDone.", "text_behind_calls"),
        ("qwen3", hermes("weather(Oslo)"), "bad_json"),
        ("qwen3", hermes("{'name': 'weather'}"), "bad_json"),
        ("qwen3", hermes('{"name": "weather", "arguments": {"city": "Oslo",}}'), "bad_json"),
        ("qwen3", hermes('{"name": "weather", "arguments": {"city": "Oslo"}'), "bad_json"),
        ("qwen3", hermes('{"name": "weather", "arguments": {"city": NaN}}'), "bad_json"),
        ("qwen3", hermes('{"name": "weather", "arguments": {"city": 1e999}}'), "bad_json"),
        ("qwen3", hermes('{"name": "weather", "arguments": {"city": "\\ud800"}}'), "bad_json"),
        ("qwen3", hermes('{"a": ' * 100_000), "bad_json"),
        ("qwen3", hermes('["weather"]'), "bad_form"),
        ("qwen3", hermes('{"name": 1, "arguments": {}}'), "bad_form"),
        ("qwen3", hermes('{"name": "weather", "arguments": {"city": "Oslo"}}}'), "bad_form"),
        ("qwen3", hermes('{"name": "climate", "arguments": {}}'), "unknown_tool"),
        ("qwen3", hermes('{"name": "get_time"}'), "no_arguments"),
        ("qwen3", hermes('{"name": "get_time", "arguments": "{}"}'), "no_arguments"),
        ("qwen3", hermes('{"name": "weather", "arguments": {"days": 3}}'), "missing_argument"),
        ("llama3.1", '{"name": "weather", "parameters": {"ci', "cut_off"),
        ("llama3.1", '{"name": "weather", "parameters": {"city": Oslo}}', "bad_json"),
        ("llama3.1", '{"name": "climate", "parameters": {}}', "unknown_tool"),
        ("llama3.1", '{"name": "get_time", "arguments": {}}', "no_arguments"),
        (
            "llama3.1",
            '{"name": "get_time", "parameters": {}}; {"name": "get_time", "parameters": {}}',
            "text_behind_calls",
        ),
        ("mistral", '[TOOL_CALLS] {"name": "get_time", "arguments": {}}', "bad_form"),
        ("mistral", '[TOOL_CALLS] [{"name": "get_time", "arguments": {}}', "cut_off"),
        ("mistral", '[TOOL_CALLS] [{"name": "get_time", "arguments": {}}, ', "cut_off"),
        ("gpt-oss", " to=functions.weather<|channel|>commen", "cut_off"),
        ("gpt-oss", ' to=functions.weather<|message|>{"city": "Oslo"}', "bad_form"),
        (
            "gpt-oss",
            ' to=functions.climate<|channel|>commentary json<|message|>{"city": "Oslo"}',
            "unknown_tool",
        ),
        ("gpt-oss", " to=functions.weather<|channel|>commentary json<|message|>[1]", "no_arguments"),
        ("deepseek-r1", "<｜tool▁calls▁begin｜>weather", "bad_form"),
        ("qwen3", f"<think>\nI look.\n{QWEN_CALL}", "bad_form"),
        ("qwen3-thinking", f"I look.\n{QWEN_CALL}", "bad_form"),
    ],
)
def test_a_call_that_cannot_be_read_is_refused_by_reason(name: str, text: str, reason: str) -> None:
    with pytest.raises(BadCall) as e:
        form_of(name).read(text)
    assert e.value.reason == reason


@pytest.mark.parametrize(
    ("name", "arguments", "right"),
    [
        ("weather", {"city": "Oslo", "days": 3, "scale": None}, True),
        ("weather", {"city": "Oslo", "days": 3.0, "scale": "C", "more": [1]}, True),
        ("weather", {"city": "Oslo", "days": 3.5}, False),
        ("weather", {"city": "Oslo", "days": True}, False),
        ("weather", {"city": "Oslo", "days": "3"}, False),
        ("weather", {"city": "Oslo", "scale": 1}, False),
        ("weather", {"city": None}, False),
        ("math.sum", {"values": [1], "exact": True, "start": 1}, True),
        ("math.sum", {"start": 1.5}, True),
        ("math.sum", {"start": False}, False),
        ("math.sum", {"values": {"a": 1}}, False),
        ("math.sum", {"exact": 1}, False),
    ],
)
def test_arguments_must_have_the_types_of_the_schema(
    name: str, arguments: dict[str, Any], right: bool
) -> None:
    text = hermes(json.dumps({"name": name, "arguments": arguments}))
    if right:
        assert form_of("qwen3").read(text) == assistant(calls=(call(name, **arguments),))
        return
    with pytest.raises(BadCall, match="must be") as e:
        form_of("qwen3").read(text)
    assert e.value.reason == "wrong_type"


@pytest.mark.parametrize(
    "parameters",
    [None, [], {}, {"properties": None, "required": None}, {"properties": {"a": {"type": "dict"}}}],
)
def test_a_schema_that_says_nothing_checks_nothing(parameters: Any) -> None:
    tools = [
        {"type": "function", "function": {"name": "f", "parameters": parameters}},
        {"type": "function", "function": {"name": "g"}},
    ]
    form = AnswerForm.of(FORMATS["qwen3"].tokenizer(), tools)
    for name in "fg":
        assert form.read(hermes(f'{{"name": "{name}", "arguments": {{"a": 1}}}}')) == assistant(
            calls=(call(name, a=1),)
        )
