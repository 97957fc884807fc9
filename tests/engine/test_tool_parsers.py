"""Well-formed answers are read as vLLM's own tool parsers read them."""

import json
import subprocess
import sys
from typing import Any

import pytest

from eagle3.regenerate.answer_text import AnswerForm
from tests.helpers.formats import FORMATS

pytestmark = pytest.mark.engine

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
    for name in ("weather", "get_time")
]
OSLO = '{"city": "Oslo", "days": [1, 2.5, null], "odd": "a\\"}</b>\\n[1]; ø"}'
TEXTS = {
    ("hermes", "qwen3"): [
        f'<tool_call>\n{{"name": "weather", "arguments": {OSLO}}}\n</tool_call>',
        f'I look.\n<tool_call>\n{{"name": "weather", "arguments": {OSLO}}}\n</tool_call>',
        f'<tool_call>\n{{"arguments": {OSLO}, "name": "weather"}}\n</tool_call>\n'
        '<tool_call>{"name":"get_time","arguments":{}}</tool_call>',
        "It rains {today}.",
    ],
    ("llama3_json", "llama3.1"): [
        f'{{"name": "weather", "parameters": {OSLO}}}',
        f'{{"parameters": {OSLO},\n"name": "weather"}}',
        '{"name": "get_time", "parameters": {}}',
        "It rains {today}.",
        '{"answer": 3}',
    ],
    ("mistral", "mistral"): [
        f'[TOOL_CALLS] [{{"name": "weather", "arguments": {OSLO}}}]',
        f'[TOOL_CALLS][{{"name": "weather", "arguments": {OSLO}}}, {{"name": "get_time", "arguments": {{}}}}]',
        "It rains [today].",
    ],
}


ASKED = [(*names, text) for names, texts in TEXTS.items() for text in texts]


@pytest.fixture(scope="module")
def theirs() -> list[Any]:
    """Content and calls of every text, read by vLLM."""
    command = [sys.executable, "-m", "tests.helpers.vllm_tool_parsers"]
    given = json.dumps({"tools": TOOLS, "asked": ASKED})
    done = subprocess.run(command, input=given, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    read: list[Any] = json.loads(done.stdout.splitlines()[-1])
    return read


@pytest.mark.parametrize("index", range(len(ASKED)))
def test_calls_are_those_of_vllms_own_parser(theirs: list[Any], index: int) -> None:
    _, format_name, text = ASKED[index]
    message = AnswerForm.of(FORMATS[format_name].tokenizer(), TOOLS).read(text)
    content, calls = theirs[index]
    assert [call["function"] for call in message.get("tool_calls", [])] == calls
    assert bool(calls) == ("name" in text)
    # vLLM leaves the line break before a call in the content.
    assert message["content"] == content.removesuffix("\n")
