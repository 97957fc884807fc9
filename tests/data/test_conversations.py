"""to_messages: the two row formats, and what is refused."""

import re
from typing import Any

import pytest

from eagle3.data.conversations import drop_trailing_answer, to_messages

USER = {"role": "user", "content": "Hi"}
ASSISTANT = {"role": "assistant", "content": "Hello!"}
SYSTEM = {"role": "system", "content": "Be brief."}


def test_messages_are_taken_as_they_are_and_other_keys_are_ignored() -> None:
    row = {"id": "1", "messages": [SYSTEM, {**USER, "weight": 1}, ASSISTANT]}
    assert to_messages(row, "f", 1) == [SYSTEM, USER, ASSISTANT]


def test_white_space_around_the_words_is_kept() -> None:
    assert to_messages({"prompt": " \nHi\t"}, "f", 1) == [{"role": "user", "content": " \nHi\t"}]


def test_prompt_with_response_is_two_turns() -> None:
    assert to_messages({"prompt": "Hi", "response": "Hello!", "kind": "x"}, "f", 1) == [USER, ASSISTANT]
    assert to_messages({"prompt": "Hi", "response": None}, "f", 1) == [USER]


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"text": "Hi"}, "no conversation, only the keys ['text']; name it messages or prompt"),
        ({"prompt": "Hi", "messages": [USER]}, "both messages and prompt are given; keep one"),
        ({"messages": []}, "got an empty list; fill it"),
        ({"messages": "Hi"}, "got str; fill it"),
        ({"messages": ["Hi"]}, 'message 1 must be an object, got str; write {"role"'),
        (
            {"messages": [USER, {"role": "robot", "content": "x"}]},
            "message 2 has the unknown role 'robot'; use one of system, user",
        ),
        ({"messages": [USER, {"role": "tool", "content": "x"}]}, "message 2 has the unknown role 'tool'; use one of"),
        ({"messages": [{"content": "x"}]}, "message 1 has the unknown role None; use one of"),
        ({"messages": [{"role": ["user"], "content": "x"}]}, "message 1 has the unknown role ['user']; use one of"),
        ({"messages": [SYSTEM, ASSISTANT]}, "no user text; add a message with the role user"),
        ({"messages": [USER, {"role": "assistant", "content": ""}]}, "content of message 2 (assistant) is empty; fill it"),
        ({"messages": [USER, {"role": "assistant", "content": None}]}, "must be a string, got null; write plain text"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "must be a string, got list; write plain text"),
        ({"messages": [USER, {**ASSISTANT, "tool_calls": [1]}]}, "message 2 has tool_calls, which are not supported; remove"),
        ({"messages": [USER], "tools": [{}]}, "tools are not supported; remove"),
        ({"prompt": " \n"}, "prompt is empty; fill it or remove the row"),
        ({"prompt": 7}, "prompt must be a string, got int"),
        ({"prompt": "Hi", "response": ""}, "response is empty; fill it"),
        ({"prompt": "Hi \ud800"}, "prompt has half a surrogate pair at character 4; correct the escape"),
    ],
)
def test_a_bad_row_is_named_with_its_remedy(row: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=r"^data/rows\.jsonl, line 7: .*" + re.escape(said)):
        to_messages(row, "data/rows.jsonl", 7)


def test_rows_without_an_answer_are_refused_only_where_one_is_needed() -> None:
    assert to_messages({"prompt": "Hi"}, "f", 1, needs_answer=False) == [USER]
    with pytest.raises(
        ValueError, match=r"f\.jsonl, line 3: no assistant text to train on; add an answer or set regenerate\.enabled"
    ):
        to_messages({"prompt": "Hi"}, "f.jsonl", 3, needs_answer=True)


def test_only_a_trailing_answer_is_dropped() -> None:
    turns = to_messages({"messages": [SYSTEM, USER, ASSISTANT, USER, ASSISTANT]}, "f", 1)
    assert drop_trailing_answer(turns) == turns[:4]
    assert drop_trailing_answer(turns[:4]) == turns[:4]
