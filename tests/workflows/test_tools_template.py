"""The tools template: without tools it writes what SmolLM2's own does, with tools calls that a parser
reads."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from eagle3.config.engine import RegenerateConfig
from eagle3.data.chat import conversation_rows, encode_rows, text_spans
from eagle3.data.conversations import Conversation, Message
from eagle3.data.script import script_of
from eagle3.regenerate.parsers import AnswerReader
from tests.helpers.formats import IM
from tests.helpers.tiny_tokenizer import train_tokenizer

TEMPLATE = (Path(__file__).parents[2] / "workflows" / "recipes" / "tools.jinja").read_text()
# As the model's tokenizer has it.
SMOLLM2 = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


@pytest.fixture(scope="module")
def ours() -> PreTrainedTokenizerFast:
    return train_tokenizer(TEMPLATE, IM, eos="<|im_end|>")


@pytest.fixture(scope="module")
def smollm2() -> PreTrainedTokenizerFast:
    return train_tokenizer(SMOLLM2, IM, eos="<|im_end|>")


TURNS = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["system", "user", "assistant"]), "content": st.text(max_size=9)}
    ),
    max_size=5,
)


@settings(max_examples=60, deadline=None)
@given(turns=TURNS, prompt=st.booleans(), tools=st.sampled_from([None, []]))
def test_without_tools_it_writes_what_smollm2s_own_does(
    ours: Any, smollm2: Any, turns: list[dict[str, str]], prompt: bool, tools: list[Any] | None
) -> None:
    ours_text, own_text = (
        tokenizer.apply_chat_template(turns, tools=tools, tokenize=False, add_generation_prompt=prompt)
        if turns
        else ""
        for tokenizer in (ours, smollm2)
    )
    assert ours_text == own_text


def call(city: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "weather", "arguments": {"city": city}}}


@pytest.mark.parametrize("system", [True, False])
def test_tools_calls_and_results_are_written_as_hermes_models_expect(
    ours: PreTrainedTokenizerFast, system: bool
) -> None:
    messages = [
        *([Message(role="system", content="Be brief.")] if system else []),
        Message(role="user", content="Warm?"),
        Message(role="assistant", content="I look.", tool_calls=[call("Rome"), call("Oslo")]),
        Message(role="tool", content="30"),
        Message(role="tool", content="-3"),
        Message(role="assistant", content="Rome is."),
    ]
    text = ours.apply_chat_template(messages, tools=[WEATHER], tokenize=False)
    opening = (
        "Be brief." if system else "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
    )
    assert isinstance(text, str)
    head, _, rest = text.partition("<|im_end|>\n")
    assert head.startswith(f"<|im_start|>system\n{opening}\n\n")
    assert '<tools>\n{"name": "weather", "parameters": {"type": "object"' in head
    assert rest == (
        "<|im_start|>user\nCall weather for Rome.<|im_end|>\n"
        '<|im_start|>assistant\n<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\nWarm?<|im_end|>\n"
        '<|im_start|>assistant\nI look.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\n<tool_response>\n30\n</tool_response>\n<tool_response>\n-3\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\nRome is.<|im_end|>\n"
    )


@pytest.mark.engine
def test_its_calls_are_read_back_by_vllms_hermes_parser_and_all_answers_share_one_row(
    ours: PreTrainedTokenizerFast,
) -> None:
    answers = [
        Message(role="assistant", content="", tool_calls=[call('R"ome'), call("Oslo\n")]),
        Message(role="assistant", content="Rome is."),
    ]
    messages = [
        Message(role="user", content="Warm?"),
        answers[0],
        Message(role="tool", content="30"),
        answers[1],
    ]
    conversation = Conversation(messages, [WEATHER])
    rows = encode_rows(ours, conversation_rows(ours, conversation))
    assert [row.reason for row in rows] == [""]
    texts = [
        text for text, supervised in text_spans(ours, rows[0].token_ids, rows[0].loss_mask) if supervised
    ]
    reader, script = AnswerReader(ours, RegenerateConfig(tool_parser="hermes")), script_of(conversation, None)
    assert [reader.read(text.removesuffix("<|im_end|>"), [], script) for text in texts] == answers
