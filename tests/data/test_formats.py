"""Masks in the public chat formats: supervised are exactly the assistant's words and the end of turn."""

from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle3.data.chat import EncodedRow, conversation_rows, encode_rows, prompt_row, text_spans
from eagle3.data.conversations import BadRow, Conversation, Message, drop_trailing_answer
from eagle3.data.template import TODAY, template_of
from tests.helpers.conversations import CALL, CONVERSATIONS, SINGLE, TOOLS, assistant, user
from tests.helpers.formats import FORMATS, Format

# Answers of each row. One row unless the template renders earlier turns otherwise.
STABLE = {"single": [1], "multi": [2], "system": [2], "tools": [2]}
ROWS: dict[str, dict[str, list[int]]] = {
    "smollm2": {"single": [1], "multi": [2], "system": [2]},
    "qwen3": {
        "single": [1],
        "multi": [1, 1],
        "system": [1, 1],
        "tools": [1, 1],
        "thinking": [1, 1],
        "thinking_tools": [2],
    },
    "qwen3-thinking": {
        "single": [1],
        "multi": [1, 1],
        "tools": [1, 1],
        "thinking": [1, 1],
        "thinking_tools": [2],
    },
    "llama3.1": STABLE,
    "gemma3": {"single": [1], "multi": [2], "system": [2]},
    "mistral": {"single": [1], "multi": [2], "system": [1, 1], "tools": [2]},
    "mistral-spaced": {"single": [1], "multi": [2], "system": [1, 1], "tools": [2]},
    "mistral-legacy": {"single": [1], "multi": [2], "system": [1, 1], "tools": [2]},
    "gpt-oss": {"single": [1], "multi": [1, 1], "system": [1, 1], "tools": [2], "thinking": [1, 1]},
}
# What the rule does not cut: gpt-oss leaves the thoughts of a call out once a final answer follows, R1 shows
# no thoughts.
NOT_CUT = [("gpt-oss", "thinking_tools"), ("deepseek-r1", "single"), ("deepseek-r1", "thinking")]
ROWS["qwen3-coder"] = ROWS["qwen3"]
CASES = [(name, case) for name, cases in ROWS.items() for case in cases]


@dataclass(frozen=True)
class Case:
    """A conversation in a format, encoded."""

    form: Format
    conversation: Conversation
    rows: list[EncodedRow]


def encoded(name: str, conversation: Conversation, thinking: bool | None = None) -> Case:
    tokenizer = FORMATS[name].tokenizer()
    return Case(
        FORMATS[name],
        conversation,
        encode_rows(tokenizer, conversation_rows(tokenizer, conversation, thinking)),
    )


def supervised(case: Case) -> list[list[str]]:
    return [
        [t for t, m in text_spans(case.form.tokenizer(), row.token_ids, row.loss_mask) if m]
        for row in case.rows
    ]


def decoded(case: Case, ids: list[int]) -> str:
    return str(
        case.form.tokenizer().decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    )


def rendered(form: Format, conversation: Conversation, num_messages: int, prompt: bool) -> str:
    """What a server writes."""
    messages: list[dict[str, Any]] = [dict(m) for m in conversation.messages[:num_messages]]
    for m in messages:
        m |= {"thinking": m["reasoning_content"]} if "reasoning_content" in m else {}
    text = form.tokenizer().apply_chat_template(
        messages,
        tools=conversation.tools,
        tokenize=False,
        add_generation_prompt=prompt,
        strftime_now=TODAY.strftime,
    )
    return str(text)


@pytest.mark.parametrize(("name", "case"), CASES)
def test_the_supervised_text_is_the_assistants_words_and_end_of_turn(name: str, case: str) -> None:
    found = encoded(name, CONVERSATIONS[case])
    written = [found.form.written(m) for m in found.conversation.messages if m["role"] == "assistant"]
    assert [text for row in supervised(found) for text in row] == written
    assert [len(row) for row in supervised(found)] == ROWS[name][case]
    assert {(r.num_cut, r.reason) for r in found.rows} == {(0, "")}


@pytest.mark.parametrize(("name", "case"), CASES)
def test_an_answer_follows_what_serving_feeds(name: str, case: str) -> None:
    found = encoded(name, CONVERSATIONS[case])
    rows = conversation_rows(found.form.tokenizer(), found.conversation)
    before = ["".join(p.text for p in row[:i]) for row in rows for i in range(len(row)) if row[i].num_answer]
    asked = [i for i, m in enumerate(found.conversation.messages) if m["role"] == "assistant"]
    prompts = [rendered(found.form, found.conversation, i, prompt=True) for i in asked]
    empty = "<think>\n\n</think>\n\n"
    inserted = {"qwen3": empty, "qwen3-coder": empty, "qwen3-thinking": "\n</think>\n\n"}.get(name, "")
    assert before == [p if "thinking" in case else p + inserted for p in prompts]


@pytest.mark.parametrize(("name", "case"), NOT_CUT)
def test_an_answer_that_the_template_writes_elsewhere_is_refused(name: str, case: str) -> None:
    with pytest.raises(BadRow, match="between its generation prompt and a control token") as e:
        encoded(name, CONVERSATIONS[case])
    assert e.value.reason == "answer_not_cut"


@pytest.mark.parametrize("name", ROWS)
def test_token_ids_are_those_of_the_whole_rendered_text(name: str) -> None:
    form, tokenizer = FORMATS[name], FORMATS[name].tokenizer()
    for case in ROWS[name]:
        conversation = CONVERSATIONS[case]
        found = encoded(name, conversation)
        texts = ["".join(piece.text for piece in row) for row in conversation_rows(tokenizer, conversation)]
        wholes = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
        assert [row.token_ids for row in found.rows] == wholes
        asked = Conversation(drop_trailing_answer(conversation.messages), conversation.tools)
        (prompt,) = encode_rows(tokenizer, [prompt_row(tokenizer, asked)])
        text = rendered(form, asked, len(asked.messages), prompt=True)
        assert prompt.token_ids == tokenizer(text, add_special_tokens=False)["input_ids"]
        assert not any(prompt.loss_mask)


ADDED = sorted({tag for f in FORMATS.values() for tag in f.added if tag.strip()})
SPECIAL = sorted({tag for f in FORMATS.values() for tag in f.special})
PIECES = [tag[:k] for tag in [*SPECIAL, *ADDED] for k in (1, -1)] + [tag[1:] for tag in SPECIAL]
WORDS = st.text(st.characters(exclude_categories=["Cs"]), max_size=12) | st.sampled_from(
    [" ", "\n", "Hello", "[INST"]
)


def contents(form: Format, tags: tuple[str, ...]) -> st.SearchStrategy[str]:
    parts = WORDS | st.sampled_from(PIECES) | st.sampled_from(("", *tags))
    texts = st.lists(parts, min_size=1, max_size=5).map("".join).filter(str.strip)
    # These tokenizers write a space as ▁, so they cannot tell the two apart.
    return texts.map(lambda t: t.replace("▁", "_")) if form.spaced else texts


@pytest.mark.parametrize("name", ROWS)
@settings(max_examples=12, deadline=None)
@given(data=st.data())
def test_any_content_is_refused_or_leaves_control_tokens_and_mask_as_they_are(
    name: str, data: st.DataObject
) -> None:
    form, tokenizer = FORMATS[name], FORMATS[name].tokenizer()
    control = template_of(tokenizer, None).control
    asked = contents(form, (*form.special, *form.added))
    # The model's own tokens, such as <think>, are its own to write.
    answered = contents(form, form.special).filter(lambda text: not any(tag in text for tag in form.added))
    exchanges = data.draw(st.lists(st.tuples(asked, answered), min_size=1, max_size=3))
    if data.draw(st.booleans()):
        exchanges = [*exchanges, exchanges[0]]
    messages = [m for a, b in exchanges for m in (user(a), assistant(b))]
    plain = [Message(role=m["role"], content="x") for m in messages]
    if any(control.search(m["content"]) for m in messages):
        with pytest.raises(BadRow, match="spells the control token"):
            encoded(name, Conversation(messages))
        return
    found, expected = (encoded(name, Conversation(m)) for m in (messages, plain))
    written = [form.written(m) for m in messages if m["role"] == "assistant"]
    assert [text for row in supervised(found) for text in row] == written
    tokens = {tokenizer.convert_tokens_to_ids(t) for t in form.special}
    kept = [[[t for t in row.token_ids if t in tokens] for row in case.rows] for case in (found, expected)]
    assert kept[0] == kept[1]
    text = decoded(found, found.rows[-1].token_ids)
    assert all(m["content"].strip() in text for m in messages if m["role"] == "user")


def test_thoughts_and_calls_may_be_spelled_in_the_assistants_own_content() -> None:
    inline = encoded("qwen3", Conversation([user("Hi"), assistant("<think>\nGreet.\n</think>\n\nHello!")]))
    given = encoded("qwen3", Conversation([user("Hi"), assistant("Hello!", "Greet.")]))
    assert inline.rows == given.rows
    call = encoded("qwen3", Conversation([user("Hi"), assistant("<tool_call>\n{}\n</tool_call>")]))
    assert call.form.tokenizer().convert_tokens_to_ids("<tool_call>") in call.rows[0].token_ids


@pytest.mark.parametrize("thoughts", ["", "Greet."])
def test_thinking_off_shows_the_empty_block_and_no_thoughts(thoughts: str) -> None:
    found = encoded("qwen3", Conversation([user("Hi"), assistant("Hello!", thoughts)]), thinking=False)
    assert supervised(found) == [["Hello!<|im_end|>"]]
    (prompt,) = encode_rows(
        found.form.tokenizer(), [prompt_row(found.form.tokenizer(), Conversation([user("Hi")]), False)]
    )
    assert decoded(found, prompt.token_ids).endswith("assistant\n<think>\n\n</think>\n\n")
    assert found.rows[0].token_ids[: len(prompt.token_ids)] == prompt.token_ids


@pytest.mark.parametrize(
    ("name", "messages", "reason"),
    [
        ("gemma3", [user("a"), user("b"), assistant("c")], "template_refuses"),
        ("smollm2", TOOLS, "tool_calls_not_rendered"),
        ("deepseek-r1", TOOLS, "tool_calls_not_rendered"),
        ("mistral", [user("a"), assistant(call={**CALL, "id": "1"})], "template_refuses"),
    ],
)
def test_messages_that_the_template_cannot_write_are_refused_by_reason(
    name: str, messages: list[Message], reason: str
) -> None:
    with pytest.raises(BadRow, match="the chat template") as e:
        encoded(name, Conversation(messages))
    assert e.value.reason == reason


def test_a_prompt_does_not_lose_earlier_tool_calls() -> None:
    with pytest.raises(BadRow, match="does not write the call of weather"):
        prompt_row(FORMATS["smollm2"].tokenizer(), Conversation(TOOLS[:3]))


def test_todays_date_does_not_change_a_row() -> None:
    found = encoded("llama3.1", Conversation(SINGLE))
    assert "Today Date: 01 Jan 2025" in decoded(found, found.rows[0].token_ids)


def test_arguments_too_deep_to_write_are_refused() -> None:
    deep: dict[str, Any] = {}
    for _ in range(3000):
        deep = {"a": deep}
    call = {**CALL, "function": {"name": "weather", "arguments": deep}}
    with pytest.raises(BadRow, match="nested too deep"):
        encoded("qwen3", Conversation([user("Hi"), assistant(call=call)]))
