"""to_conversation: the row formats, and what is refused by reason."""

import contextlib
import json
import pickle
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle3.data.conversations import (
    ROLE_OF,
    BadRow,
    Conversation,
    Pretokenized,
    drop_trailing_answer,
    to_conversation,
)

USER = {"role": "user", "content": "Hi"}
ASSISTANT = {"role": "assistant", "content": "Hello!"}
SYSTEM = {"role": "system", "content": "Be brief."}
SCHEMA = {"name": "weather", "parameters": {"type": "object"}}
TOOL = {"type": "function", "function": SCHEMA}
CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Oslo"}}}
CALLED = {"role": "assistant", "content": "", "tool_calls": [CALL]}
RESULT = {"role": "tool", "content": "rain"}


def read(row: dict[str, Any]) -> Conversation:
    conversation = to_conversation(row)
    assert isinstance(conversation, Conversation)
    return conversation


def human(text: str) -> dict[str, str]:
    return {"from": "human", "value": text}


def test_messages_are_taken_as_they_are_and_other_keys_are_ignored() -> None:
    row = {
        "id": "1",
        "prompt": "Hi",
        "messages": [SYSTEM, {**USER, "weight": 1, "tool_calls": None}, ASSISTANT],
    }
    assert read(row) == Conversation([SYSTEM, USER, ASSISTANT], None, "openai_messages")


def test_white_space_around_the_words_is_kept() -> None:
    assert read({"prompt": " \nHi\t"}).messages == [{"role": "user", "content": " \nHi\t"}]


@pytest.mark.parametrize("name", ROLE_OF)
def test_every_role_name_is_known_in_either_spelling(name: str) -> None:
    value = json.dumps(CALL["function"]) if ROLE_OF[name] == "calls" else "x"
    expected = CALLED if ROLE_OF[name] == "calls" else {"role": ROLE_OF[name], "content": "x"}
    for turn in ({"from": name.title(), "value": value}, {"role": name, "content": value}):
        assert read({"conversations": [USER, turn]}).messages[1:] == [expected]


def test_sharegpt_rows_may_name_the_list_either_way_and_write_it_as_json() -> None:
    turns = [human("Hi"), {"from": "gpt", "value": "Hello!"}]
    expected = Conversation([SYSTEM, USER, ASSISTANT], [TOOL], "sharegpt")
    for key in ("conversations", "conversation", "messages"):
        assert read({key: turns, "system": "Be brief.", "tools": json.dumps([SCHEMA])}) == expected
        assert read({key: json.dumps(turns), "system": "Be brief.", "tools": [TOOL]}) == expected


def test_an_empty_system_prompt_is_none() -> None:
    assert read(
        {"conversations": [{"from": "system", "value": " "}, human("Hi")], "system": ""}
    ).messages == [USER]
    assert read({"messages": [SYSTEM, USER], "system": "other"}).messages == [SYSTEM, USER]


@pytest.mark.parametrize(
    ("row", "form"),
    [
        ({"prompt": "Hi", "response": "Hello!", "kind": "x"}, "prompt_response"),
        ({"prompt": "Hi", "completion": "Hello!"}, "prompt_response"),
        ({"prompt": [USER], "completion": [ASSISTANT]}, "prompt_response"),
        ({"instruction": "Hi", "input": "", "output": "Hello!"}, "prompt_response"),
        ({"question": "Hi", "answer": "Hello!"}, "prompt_response"),
        ({"query": "Hi", "response": "Hello!"}, "prompt_response"),
        ({"problem": "Hi", "solution": "Hello!", "answer": "5"}, "prompt_response"),
        ({"input": "Hi", "output": "Hello!"}, "prompt_response"),
        ({"prompt": "Hi", "response": None}, "prompt_only"),
        ({"instruction": "Hi"}, "prompt_only"),
    ],
)
def test_columns_are_one_exchange(row: dict[str, Any], form: str) -> None:
    assert read(row) == Conversation([USER, ASSISTANT][: 2 if form == "prompt_response" else 1], None, form)


def test_the_input_of_an_instruction_follows_it() -> None:
    row = {"instruction": "Translate.", "input": "Hei", "output": "Hi", "system_prompt": "Be brief."}
    assert read(row).messages == [
        SYSTEM,
        {"role": "user", "content": "Translate.\n\nHei"},
        {"role": "assistant", "content": "Hi"},
    ]


def test_text_parts_are_joined_by_line_breaks() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert read({"messages": [{"role": "user", "content": parts}]}).messages[0]["content"] == "a\nb"


@pytest.mark.parametrize(
    "turn",
    [
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {
            "role": "assistant",
            "tool_calls": [{"function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}],
        },
        {"role": "assistant", "tool_calls": json.dumps([CALL])},
        {"role": "assistant", "tool_calls": [{"name": "weather", "parameters": {"city": "Oslo"}}]},
        {"role": "assistant", "function_call": {"name": "weather", "arguments": '{"city": "Oslo"}'}},
        {"from": "function_call", "value": '{"name": "weather", "arguments": {"city": "Oslo"}}'},
    ],
)
def test_tool_calls_are_read_from_every_usual_shape(turn: dict[str, Any]) -> None:
    assert read({"messages": [USER, turn, RESULT], "tools": [TOOL]}) == Conversation(
        [USER, CALLED, RESULT], [TOOL], "openai_messages"
    )


def test_ids_names_thoughts_and_objects_of_tool_turns_are_kept() -> None:
    result = {"role": "tool", "content": {"sky": "grå"}, "tool_call_id": "1", "name": "weather"}
    messages = [USER, {**CALLED, "tool_calls": [{"id": "1", **CALL}], "reasoning": "Look."}, result]
    called, kept = read({"messages": messages, "functions": [SCHEMA]}).messages[1:]
    assert called == {**CALLED, "tool_calls": [{"id": "1", **CALL}], "reasoning_content": "Look."}
    assert kept == {**result, "content": '{"sky": "grå"}'}
    assert read({"messages": [USER, RESULT], "functions": [SCHEMA]}).tools == [TOOL]
    assert read({"messages": [USER, {**RESULT, "content": ""}]}).messages[1]["content"] == ""


@pytest.mark.parametrize(
    ("row", "reason", "message"),
    [
        (
            {"text": "Hi"},
            "no_conversation",
            "no conversation, only the keys ['text']; name it messages, or prompt",
        ),
        ({"messages": None, "prompt": None}, "no_conversation", "only the keys ['messages', 'prompt']"),
        (
            {"messages": []},
            "bad_turn",
            "messages must be a list with at least one turn, got an empty list; fill it",
        ),
        ({"messages": "Hi"}, "bad_json", "messages is a string that is not JSON (Expecting value"),
        ({"messages": '{"a": 1}'}, "bad_turn", "got dict; fill it"),
        ({"messages": ["Hi"]}, "bad_turn", 'turn 1 of messages must be an object, got str; write {"role"'),
        ({"messages": [[USER]]}, "bad_turn", "turn 1 of messages must be an object, got list"),
        ({"messages": [{"role": "system", "content": ""}]}, "empty_text", "messages has no text; fill it"),
        (
            {"messages": [USER, {"role": "robot", "content": "x"}]},
            "bad_role",
            "unknown role 'robot'; use one of system, dev",
        ),
        (
            {"messages": [{"content": "x"}]},
            "bad_role",
            "turn 1 of messages has the unknown role None; use one of",
        ),
        (
            {"messages": [{"role": ["user"], "content": "x"}]},
            "bad_role",
            "has the unknown role ['user']; use one of",
        ),
        ({"messages": [SYSTEM, ASSISTANT]}, "no_user", "no user text; add a message with the role user"),
        ({"messages": [USER, {**ASSISTANT, "content": ""}]}, "empty_text", "turn 2 of messages is empty"),
        ({"messages": [USER, {**ASSISTANT, "content": None}]}, "empty_text", "turn 2 of messages is empty"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "not_text",
            "must be text, got list; write",
        ),
        (
            {"messages": [{"role": "user", "content": float("nan")}]},
            "not_text",
            "must be text, got float; write a string",
        ),
        (
            {"messages": [USER, {**ASSISTANT, "tool_calls": [1]}]},
            "bad_tool_call",
            "a tool call in turn 2 of messages has no name",
        ),
        (
            {"messages": [USER, {**ASSISTANT, "function_call": "f(x)"}]},
            "bad_tool_call",
            "is a string that is not JSON",
        ),
        (
            {"messages": [USER, {**ASSISTANT, "tool_calls": [{"name": "f", "arguments": "[1]"}]}]},
            "bad_tool_call",
            "arguments of f in turn 2 of messages must be an object, got list; correct",
        ),
        (
            {"messages": [USER], "tools": [{}]},
            "bad_tools",
            "tools must be JSON schemas with names, got dict; write",
        ),
        ({"messages": [USER], "tools": "weather"}, "bad_tools", "tools is a string that is not JSON"),
        ({"prompt": " \n"}, "empty_text", "prompt is empty; fill it or remove the row"),
        ({"prompt": 7}, "not_text", "prompt must be text, got int"),
        ({"prompt": "Hi", "response": ""}, "empty_text", "response is empty; fill it"),
        ({"prompt": "Hi \ud800"}, "bad_unicode", "message 1 has half a surrogate pair after"),
        (
            {"messages": [USER], "tools": [{"name": "\ud800"}]},
            "bad_unicode",
            "tools has half a surrogate pair",
        ),
        ({"input_ids": [1, 2]}, "bad_token_ids", "input_ids and loss_mask must be lists of one length"),
        ({"input_ids": [1, 2], "loss_mask": [1]}, "bad_token_ids", "must be lists of one length, at least 1"),
        ({"input_ids": [], "loss_mask": []}, "bad_token_ids", "must be lists of one length, at least 1"),
        ({"input_ids": [[1]], "loss_mask": [[1]]}, "bad_token_ids", "input_ids must be token ids from 0"),
        ({"input_ids": [-1], "loss_mask": [1]}, "bad_token_ids", "input_ids must be token ids from 0"),
        ({"input_ids": [1], "loss_mask": [float("nan")]}, "bad_token_ids", "loss_mask must be 0 or 1"),
    ],
)
def test_a_bad_row_is_named_with_its_reason_and_remedy(
    row: dict[str, Any], reason: str, message: str
) -> None:
    with pytest.raises(BadRow, match=re.escape(message)) as e:
        to_conversation(row)
    assert e.value.reason == reason


def test_tokens_are_taken_as_they_are() -> None:
    assert to_conversation({"input_ids": [5, 0, 7], "loss_mask": [0, True, 1]}) == Pretokenized(
        [5, 0, 7], [False, True, True]
    )


def test_a_bad_row_comes_whole_out_of_another_process() -> None:
    back = pickle.loads(pickle.dumps(BadRow("bad_role", "no such role; use user")))
    assert (back.reason, str(back)) == ("bad_role", "no such role; use user")


JUNK = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-2, 2)
    | st.floats()
    | st.sampled_from(["", "user", "assistant", "system", "[]", "x"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                ["role", "from", "content", "value", "tool_calls", "function", "name", "arguments", "text"]
            ),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)
KEYS = st.sampled_from(
    ["messages", "conversations", "prompt", "response", "system", "tools", "input_ids", "loss_mask"]
)


@settings(max_examples=60, deadline=None)
@given(st.dictionaries(KEYS, JUNK, max_size=4))
def test_junk_is_a_bad_row_and_never_a_crash(row: dict[str, Any]) -> None:
    with contextlib.suppress(BadRow):
        found = to_conversation(row)
        if isinstance(found, Conversation):
            assert all(isinstance(m["content"], str) for m in found.messages)
            assert any(m["role"] == "user" for m in found.messages)


def test_an_object_too_deep_to_walk_is_a_bad_row() -> None:
    deep: dict[str, Any] = {}
    for _ in range(3000):
        deep = {"a": deep}
    tools = [{"name": "f", "parameters": deep}]
    for row in ({"messages": [USER], "tools": tools}, {"messages": [USER, {**RESULT, "content": deep}]}):
        with pytest.raises(BadRow, match="nested too deep") as e:
            to_conversation(row)
        assert e.value.reason == "too_deep"


def test_only_a_trailing_answer_is_dropped() -> None:
    turns = read({"messages": [SYSTEM, USER, ASSISTANT, USER, ASSISTANT]}).messages
    assert drop_trailing_answer(turns) == turns[:4]
    assert drop_trailing_answer(turns[:4]) == turns[:4]
