"""Presets: a row of each data set's shape becomes the conversation that it holds."""

import json
from pathlib import Path
from typing import Any, get_args

import pytest

from eagle3.config.data import PRESETS_WITHOUT_HUB, PresetName, SourceConfig
from eagle3.data.conversations import Conversation, to_conversation
from eagle3.data.presets import PRESETS
from eagle3.data.sources import hub_parts, read_source, source_name

WEATHER = {
    "name": "Get Weather",
    "description": "",
    "parameters": {"type": "dict", "properties": {"city": {"type": "string"}}},
}
TOOLACE = {
    "system": 'You can call functions. Here is a list of them:\n[{"name": "Get Weather", "description": "", '
    '"parameters": {"type": "dict", "properties": {"city": {"type": "string"}}}}]\nPut calls as [f(a=b)].',
    "conversations": [
        {"from": "user", "value": "Is it warm in Rome and in Oslo?"},
        {"from": "assistant", "value": '[Get Weather(city="Rome"), Get Weather(city="Oslo", days=[1, 2])]'},
        {"from": "tool", "value": '[{"name": "Get Weather", "results": {"t": 30}}]'},
        {"from": "assistant", "value": "Yes [both]."},
    ],
}


def conversation_of(preset: str, row: dict[str, Any], tmp_path: Path) -> Conversation:
    """The row as read from Parquet, as `datasets` would give it."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.Table.from_pylist([row]), tmp_path / "sample.parquet")
    (record,) = read_source(SourceConfig(path=str(tmp_path / "sample.parquet")))
    assert record.row is not None
    conversation = to_conversation(PRESETS[preset].map_row(record.row))
    assert isinstance(conversation, Conversation)
    return conversation


@pytest.mark.parametrize(
    ("preset", "row", "message"),
    [
        (
            "sharegpt",
            {
                "id": "x_3",
                "conversations": [
                    {"from": f, "value": v} for f, v in (("gpt", "…tail"), ("human", "Hi"), ("gpt", "Hello"))
                ],
            },
            ["user: Hi", "assistant: Hello"],
        ),
        (
            "ultrachat",
            {
                "prompt": "Hi",
                "prompt_id": "0",
                "messages": [{"content": "Hi", "role": "user"}, {"content": "Hello", "role": "assistant"}],
            },
            ["user: Hi", "assistant: Hello"],
        ),
        (
            "magpie",
            {
                "conversation_id": "0",
                "instruction": "Hi",
                "response": "Hello",
                "conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}],
                "reward": 0.5,
            },
            ["user: Hi", "assistant: Hello"],
        ),
        (
            "open_perfectblend",
            {
                "conversations": [{"from": "human", "value": "1+1"}, {"from": "gpt", "value": "2"}],
                "source": "maths",
            },
            ["user: 1+1", "assistant: 2"],
        ),
    ],
)
def test_rows_of_each_data_set_become_conversations(
    preset: str, row: dict[str, Any], message: list[str], tmp_path: Path
) -> None:
    messages = conversation_of(preset, row, tmp_path).messages
    assert [f"{m['role']}: {m['content']}" for m in messages] == message


def test_toolace_functions_become_tools_and_its_calls_tool_calls(tmp_path: Path) -> None:
    conversation = conversation_of("toolace", TOOLACE, tmp_path)
    assert conversation.tools == [{"type": "function", "function": WEATHER}]
    assert [m["role"] for m in conversation.messages] == ["user", "assistant", "tool", "assistant"]
    calls = [call["function"] for call in conversation.messages[1]["tool_calls"]]
    assert calls == [
        {"name": "Get Weather", "arguments": {"city": "Rome"}},
        {"name": "Get Weather", "arguments": {"city": "Oslo", "days": [1, 2]}},
    ]
    assert conversation.messages[3]["content"] == "Yes [both]."


@pytest.mark.parametrize(
    "text", ["[f(1)]", "[1, 2]", "[f(a=b)]", "[f(a=1), 2]", '[f(a="x), g("]', "[f(a=1)", "See [1] (a)."]
)
def test_toolace_text_that_is_no_list_of_calls_stays_text(text: str) -> None:
    row = {
        "system": "Be brief.",
        "conversations": [{"from": "user", "value": "x"}, {"from": "assistant", "value": text}],
    }
    conversation = to_conversation(PRESETS["toolace"].map_row(row))
    assert isinstance(conversation, Conversation)
    assert [m["content"] for m in conversation.messages] == ["Be brief.", "x", text]
    assert conversation.tools is None


BOOKING = {
    "name": "hotel.book",
    "description": "Book a room.",
    "parameters": {
        "type": "dict",
        "properties": {
            "type": {"type": "string", "description": "Kind of room.", "enum": ["single", "double"]},
            "price": {"type": "float", "default": 80.5},
            "nights": {"type": "integer"},
            "guests": {"type": "array", "items": {"type": "dict", "properties": {"age": {"type": "Long"}}}},
            "dates": {"type": "tuple", "items": {"type": "tuple", "items": {"type": "String"}}},
            "extra": {"type": "any", "description": "Whatever."},
            "prices": {"type": "HashMap", "additionalProperties": {"type": "float"}},
        },
        "required": ["type"],
    },
}
BOOKING_SCHEMA = {
    "type": "object",
    "properties": {
        "type": {"type": "string", "description": "Kind of room.", "enum": ["single", "double"]},
        "price": {"type": "number", "default": 80.5},
        "nights": {"type": "integer"},
        "guests": {"type": "array", "items": {"type": "object", "properties": {"age": {"type": "integer"}}}},
        "dates": {"type": "array", "items": {"type": "array", "items": {"type": "string"}}},
        "extra": {"description": "Whatever."},
        "prices": {"type": "object", "additionalProperties": {"type": "number"}},
    },
    "required": ["type"],
}


def test_bfcl_questions_become_user_turns_and_its_types_those_of_json_schema() -> None:
    question = [
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "A room?"}],
        [{"role": "user", "content": "Two?"}],
    ]
    given = {"id": "simple_0", "question": question, "function": [BOOKING]}
    unchanged = json.dumps(given)
    conversation = to_conversation(PRESETS["bfcl"].map_row(given))
    assert isinstance(conversation, Conversation)
    assert [f"{m['role']}: {m['content']}" for m in conversation.messages] == [
        "system: Be brief.",
        "user: A room?",
        "user: Two?",
    ]
    assert conversation.tools is not None
    assert [tool["function"]["name"] for tool in conversation.tools] == ["hotel.book"]
    assert [tool["function"]["parameters"] for tool in conversation.tools] == [BOOKING_SCHEMA]
    assert json.dumps(given) == unchanged


@pytest.mark.parametrize("missing", ["question", "function"])
def test_bfcl_rows_without_questions_or_functions_are_refused(missing: str) -> None:
    row = {"id": "0", "question": [[{"role": "user", "content": "A room?"}]], "function": [BOOKING]}
    del row[missing]
    with pytest.raises(KeyError, match=missing):
        PRESETS["bfcl"].map_row(row)


def test_every_preset_is_on_the_hub_or_asks_for_a_path() -> None:
    assert set(PRESETS) == set(get_args(PresetName)) - {""}
    for name, preset in PRESETS.items():
        if name in PRESETS_WITHOUT_HUB:
            with pytest.raises(ValueError, match=f"the hub cannot load preset {name}; set path"):
                SourceConfig(preset=name)  # type: ignore[arg-type]
            continue
        assert hub_parts(preset.path)
        assert source_name(SourceConfig(preset=name)) == preset.path  # type: ignore[arg-type]
