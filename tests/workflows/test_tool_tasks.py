"""The shipped tool tasks: every row is readable, short, and answers its own calls."""

import json
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from eagle3.config.engine import RegenerateConfig
from eagle3.data.chat import conversation_rows
from eagle3.data.conversations import Conversation, to_conversation
from eagle3.data.recorded import Recorded
from eagle3.data.script import script_of
from eagle3.regenerate.parsers import AnswerReader
from eagle3.regenerate.tool_calls import FoundCall, checked_call
from tests.helpers.formats import IM
from tests.helpers.tiny_tokenizer import train_tokenizer

RECIPES = Path(__file__).parents[2] / "workflows" / "recipes"
LINES = (RECIPES / "tool_tasks.jsonl").read_text().splitlines()
ROWS: list[dict[str, Any]] = [json.loads(line) for line in LINES]
# Under 500 of SmolLM2's tokens, of which these rows take 3.1 characters each.
MAX_CHARACTERS = 1550


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return train_tokenizer((RECIPES / "tools.jinja").read_text(), IM, eos="<|im_end|>")


def conversation_of(row: dict[str, Any]) -> Conversation:
    conversation = to_conversation(row)
    assert isinstance(conversation, Conversation)
    return conversation


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["id"])
def test_recorded_results_are_found_by_the_rows_own_calls(row: dict[str, Any]) -> None:
    messages = conversation_of(row).messages
    calls = [call for m in messages for call in m.get("tool_calls", [])]
    results = [m["content"] for m in messages if m["role"] == "tool"]
    recorded = Recorded.from_json(Recorded.from_messages(messages).to_json())
    assert calls
    assert [recorded.replay(call) for call in calls] == results
    assert messages[-1]["role"] == "assistant"
    assert "tool_calls" not in messages[-1]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["id"])
def test_calls_fit_the_tools_and_rows_are_short(
    tokenizer: PreTrainedTokenizerFast, row: dict[str, Any]
) -> None:
    conversation = conversation_of(row)
    (pieces,) = conversation_rows(tokenizer, conversation)
    assert sum(len(piece.text) for piece in pieces) <= MAX_CHARACTERS
    calls = [call for m in conversation.messages for call in m.get("tool_calls", [])]
    ids = {m["tool_call_id"] for m in conversation.messages if m["role"] == "tool"}
    assert {call["id"] for call in calls} == ids
    for call in calls:
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        found = FoundCall(name, json.dumps(arguments), call["id"])
        assert checked_call(found, conversation.tools or [], call["id"]) == call


@pytest.mark.engine
def test_vllms_hermes_parser_reads_every_answer_of_the_rows(tokenizer: PreTrainedTokenizerFast) -> None:
    reader = AnswerReader(tokenizer, RegenerateConfig(tool_parser="hermes"))
    for conversation in map(conversation_of, ROWS):
        (pieces,) = conversation_rows(tokenizer, conversation)
        written = [piece.text[: piece.num_answer] for piece in pieces if piece.num_answer]
        answers = [m for m in conversation.messages if m["role"] == "assistant"]
        for call in [call for m in answers for call in m.get("tool_calls", [])]:
            del call["id"]
        script = script_of(conversation, None)
        texts = [text.removesuffix("<|im_end|>\n").removesuffix("<|im_end|>") for text in written]
        assert [reader.read(text, [], script) for text in texts] == answers


def test_rows_are_many_varied_and_kept_apart_from_the_heldout_prompts() -> None:
    assert all(line.isascii() for line in LINES)
    assert len({row["id"] for row in ROWS}) == len(ROWS) == 60
    first = [row["messages"][0]["content"] for row in ROWS]
    other = [
        json.loads(line)["prompt"]
        for name in ("heldout", "prompts")
        for line in (RECIPES / f"{name}.jsonl").open()
    ]
    assert len(set(first)) == len(first)
    assert not set(first) & set(other)
    shapes: Counter[str] = Counter()
    for row in ROWS:
        num_calls = [len(m.get("tool_calls", [])) for m in row["messages"] if m["role"] == "assistant"]
        shapes["parallel"] += max(num_calls) > 1
        shapes["one after another"] += any(a and b for a, b in pairwise(num_calls))
        shapes["second request"] += sum(m["role"] == "user" for m in row["messages"]) > 1
        shapes["a tool that is not needed"] += len(row["tools"]) > len(
            {m["name"] for m in row["messages"] if m["role"] == "tool"}
        )
    assert {"parallel", "one after another", "second request", "a tool that is not needed"} == {
        s for s, n in shapes.items() if n > 2
    }
    assert len({tool["function"]["name"] for row in ROWS for tool in row["tools"]}) > 12
