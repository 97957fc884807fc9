"""Any conversation, any answers: rows keep every answer once and unchanged, and prompts are the template's."""

import json
from typing import Any

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from eagle3.data.chat import encode_rows, prompt_row
from eagle3.data.conversations import BadRow, Conversation, Message
from eagle3.data.script import script_of
from eagle3.regenerate.answers import Answer
from eagle3.regenerate.episode import Episode, Limits
from eagle3.shards.tokens import TokenRow
from tests.helpers.conversations import WEATHER
from tests.helpers.episodes import end_ids, quick_reader
from tests.helpers.formats import FORMATS

WORDS = [
    "Hi",
    " ",
    "\n",
    "é中",
    "🙂",
    "\ue000",
    "�",
    "<|im_end|>",
    "</s>",
    "<think>",
    "</think>\n\n",
    "[/INST]",
    "<tool_call>\n",
]
CALLS = [
    '{"name": "weather", "arguments": {"city": "Oslo"}}',
    '<tool_call>{"name": "weather", "arguments": {}}</tool_call>',
    " to=functions.weather<|channel|>commentary json<|message|>{}",
]
WITH_TOOLS = ("qwen3", "qwen3-thinking", "llama3.1", "mistral", "mistral-spaced", "mistral-legacy", "gpt-oss")

texts = st.lists(st.sampled_from(WORDS), min_size=1, max_size=4).map("".join).filter(str.strip)
written = st.lists(st.sampled_from([*WORDS, *CALLS, "\n</tool_call>"]), max_size=5).map("".join)
calls = st.dictionaries(st.just("city"), st.sampled_from(["Oslo", " Oslo", 2, 2.0, None, [{}]])).map(
    lambda arguments: {"type": "function", "function": {"name": "weather", "arguments": arguments}}
)


@st.composite
def conversations(draw: st.DrawFn, with_tools: bool) -> Conversation:
    messages: list[Message] = []
    for _ in range(draw(st.integers(1, 4))):
        messages += [Message(role="system", content=draw(texts))] * (not messages and draw(st.booleans()))
        messages += [Message(role="user", content=draw(texts))] * draw(st.sampled_from([1, 1, 1, 2]))
        if with_tools and draw(st.booleans()):
            made = draw(st.lists(calls, min_size=1, max_size=2))
            results = [Message(role="tool", content=draw(written)) for _ in range(draw(st.integers(0, 3)))]
            messages += [Message(role="assistant", content="", tool_calls=made), *results]
        messages.append(Message(role="assistant", content=draw(texts)))
    return Conversation(messages, [WEATHER] if with_tools else None)


@settings(max_examples=150, deadline=None)
@given(data=st.data(), name=st.sampled_from(sorted(FORMATS)), thinking=st.sampled_from([None, True, False]))
def test_rows_hold_each_answer_once_after_its_prompt_and_the_counts_add_up(
    data: Any, name: str, thinking: bool | None
) -> None:
    tokenizer, ends = FORMATS[name].tokenizer(), end_ids(name)
    conversation = data.draw(conversations(name in WITH_TOOLS and data.draw(st.booleans())))
    script = script_of(conversation, thinking)
    try:
        pieces = prompt_row(tokenizer, Conversation(script.messages, conversation.tools), thinking)
    except BadRow:
        assume(False)
    ids = encode_rows(tokenizer, [pieces])[0].token_ids
    limits = Limits(data.draw(st.sampled_from([300, 2000])), 30, data.draw(st.integers(1, 3)))
    row = TokenRow("o:c", "s", ids, [False] * len(ids), script.to_json() if script.has_more else "")
    episode = Episode(row, limits, quick_reader(name), ends)
    trained: list[tuple[list[int], list[int]]] = []
    while episode.prompt is not None:
        prompt = list(episode.prompt)
        if episode.script:
            history = Conversation(episode.messages, conversation.tools)
            rendered = encode_rows(tokenizer, [prompt_row(tokenizer, history, thinking)])[0].token_ids
            assert tokenizer.decode(prompt) == tokenizer.decode(rendered)
        answer = tokenizer(data.draw(written), add_special_tokens=False)["input_ids"]
        # Bytes of half a character, control tokens anywhere, ids of none of the tokenizer's tokens.
        answer += data.draw(st.lists(st.integers(0, len(tokenizer) + 1), max_size=3))
        answer += data.draw(st.lists(st.sampled_from(ends), max_size=1))
        episode.take(Answer(answer, data.draw(st.sampled_from(["stop", "stop", "stop", "length"]))))
        trained += [(prompt, answer)] if len(answer) > 1 else []
    for made in episode.rows:
        end = 0
        while True in made.loss_mask[end:]:
            prompt, answer = trained.pop(0)
            begin, end = made.loss_mask.index(True, end), len(prompt) + len(answer)
            assert (made.token_ids[:begin], made.token_ids[begin:end]) == (prompt, answer)
            assert all(made.loss_mask[begin:end])
        assert end == len(made.token_ids)
    assert trained == []
    assert len({made.sample_id for made in episode.rows}) == len(episode.rows)
    counts = episode.counts
    assert (
        counts["requested"]
        == counts["answered"] + counts["failed"] + counts["skipped"]
        == 1 + len(script.turns)
    )
    assert min(counts.values()) >= 0, json.dumps(counts)
