"""Conversations that a test answers: the rows are those that the finished conversation gives."""

import json
from itertools import pairwise
from typing import Any

import pytest
from tokenizers import decoders

from eagle3.config.engine import RegenerateConfig
from eagle3.data.chat import conversation_rows, encode_rows, prompt_row
from eagle3.data.conversations import Conversation, Message
from eagle3.data.script import script_of
from eagle3.data.template import TODAY
from eagle3.regenerate.answers import Answer
from eagle3.regenerate.episode import Episode, Limits
from eagle3.regenerate.parsers import AnswerReader
from eagle3.shards.tokens import TokenRow
from tests.helpers import episodes
from tests.helpers.conversations import CALL, CONVERSATIONS, MULTI, TOOLS, WEATHER, assistant, user
from tests.helpers.episodes import LIMITS, end_ids, quick_reader, runs, words
from tests.helpers.formats import FORMATS
from tests.helpers.tiny_tokenizer import train_spaced_tokenizer

# Formats and conversations in which the template's history repeats the model's own words.
FAITHFUL = [
    ("smollm2", "multi"),
    ("qwen3", "thinking"),
    ("qwen3", "thinking_tools"),
    ("qwen3-thinking", "thinking"),
    ("qwen3-thinking", "thinking_tools"),
    ("llama3.1", "multi"),
    ("llama3.1", "system"),
    ("gemma3", "system"),
    ("mistral", "system"),
    ("mistral-spaced", "multi"),
    ("mistral-legacy", "multi"),
    ("gpt-oss", "multi"),
    ("gpt-oss", "tools"),
    ("gpt-oss", "thinking"),
]


def start(
    name: str, conversation: Conversation, thinking: bool | None = None, limits: Limits = LIMITS
) -> Episode:
    return episodes.start(quick_reader(name), end_ids(name), conversation, thinking, limits)


@pytest.mark.parametrize(("name", "case"), FAITHFUL)
def test_an_answered_conversation_gives_the_rows_of_the_written_one(name: str, case: str) -> None:
    conversation, tokenizer = CONVERSATIONS[case], FORMATS[name].tokenizer()
    written = encode_rows(tokenizer, conversation_rows(tokenizer, conversation))
    episode = start(name, conversation)
    prompts = []
    for answer in [run for row in written for run in runs(row)]:
        assert episode.prompt is not None
        prompts.append(episode.prompt)
        episode.take(Answer(answer, "stop"))
    assert episode.prompt is None
    assert [(row.token_ids, row.loss_mask) for row in episode.rows] == [
        (row.token_ids, row.loss_mask) for row in written
    ]
    num_users = sum(m["role"] == "user" for m in conversation.messages)
    assert (episode.counts["requested"], episode.counts["answered"]) == (num_users, num_users)
    assert len(prompts) == sum(m["role"] == "assistant" for m in conversation.messages)


def test_every_prompt_is_what_serving_would_feed() -> None:
    tokenizer = FORMATS["gpt-oss"].tokenizer()
    episode = start("gpt-oss", Conversation(TOOLS, [WEATHER]))
    call_text = ' to=functions.weather<|channel|>commentary json<|message|>{"city": "Tromsø"}<|call|>'
    answers = [call_text, "<|channel|>final<|message|>It rains.<|return|>"]
    history = [TOOLS[0]]
    for text, more in zip(answers, ([assistant(call=CALL), TOOLS[2]], []), strict=True):
        served = tokenizer.apply_chat_template(
            history,
            tools=[WEATHER],
            add_generation_prompt=True,
            return_dict=False,
            strftime_now=TODAY.strftime,
        )
        assert episode.prompt == served
        episode.take(words("gpt-oss", text))
        history += more
    assert episode.prompt is None


def test_gpt_oss_thinks_before_its_call_and_every_token_id_is_kept() -> None:
    episode = start("gpt-oss", Conversation(TOOLS, [WEATHER]))
    thoughts = "<|channel|>analysis<|message|>Look.<|end|><|start|>assistant"
    call_text = ' to=functions.weather<|channel|>commentary json<|message|>{"city": "Tromsø"}<|call|>'
    answers = [f"{thoughts}{call_text}", f"{thoughts}<|channel|>final<|message|>It rains.<|return|>"]
    token_ids = [words("gpt-oss", text).token_ids for text in answers]
    for answer in token_ids:
        episode.take(Answer(answer, "stop"))
    assert episode.messages[1] == assistant(thoughts="Look.", call=CALL | {"id": "call00001"})
    assert [run for row in episode.rows for run in runs(row)] == token_ids
    assert (episode.counts["answered"], episode.counts["tool_calls"]) == (1, 1)


def test_the_next_prompt_has_the_targets_own_answer() -> None:
    episode = start("smollm2", Conversation(MULTI))
    episode.take(words("smollm2", "Good day to you!<|im_end|>"))
    tokenizer = FORMATS["smollm2"].tokenizer()
    asked = Conversation([user("Hi"), assistant("Good day to you!"), user("Bye")])
    assert episode.prompt == encode_rows(tokenizer, [prompt_row(tokenizer, asked)])[0].token_ids


def test_token_ids_that_no_tokenizer_would_write_are_kept() -> None:
    tokenizer = FORMATS["smollm2"].tokenizer()
    letters = [tokenizer.convert_tokens_to_ids(c) for c in "Hello"] + tokenizer.convert_tokens_to_ids(
        ["<|im_end|>"]
    )
    assert letters != words("smollm2", "Hello<|im_end|>").token_ids
    episode = start("smollm2", Conversation(MULTI))
    first = list(episode.prompt or [])
    episode.take(Answer(letters, "stop"))
    assert (episode.prompt or [])[: len(first) + 6] == first + letters
    episode.take(words("smollm2", "See you!<|im_end|>"))
    (row,) = episode.rows
    assert [token for token, m in zip(row.token_ids, row.loss_mask, strict=True) if m][:6] == letters


def test_after_an_answer_that_the_template_trims_a_new_row_begins() -> None:
    episode = start("llama3.1", Conversation(MULTI))
    answers = [words("llama3.1", "Hello!  <|eot_id|>"), words("llama3.1", "See you!<|eot_id|>")]
    for answer in answers:
        episode.take(answer)
    assert [[t for t, m in zip(r.token_ids, r.loss_mask, strict=True) if m] for r in episode.rows] == [
        a.token_ids for a in answers
    ]
    tokenizer = FORMATS["llama3.1"].tokenizer()
    second = encode_rows(tokenizer, [prompt_row(tokenizer, Conversation(MULTI[:3]))])[0].token_ids
    assert episode.rows[1].token_ids == second + answers[1].token_ids
    assert [r.sample_id.partition(":")[0] for r in episode.rows] == ["opening", "opening"]
    assert len({r.sample_id for r in episode.rows}) == 2


def qwen_call(*cities: str) -> str:
    blocks = [
        f'<tool_call>\n{{"name": "weather", "arguments": {{"city": "{city}"}}}}\n</tool_call>'
        for city in cities
    ]
    return "\n".join(blocks) + "<|im_end|>"


def parallel(*cities: str) -> Conversation:
    calls = [
        {"type": "function", "function": {"name": "weather", "arguments": {"city": city}}} for city in cities
    ]
    results = [Message(role="tool", content=f"rain in {city}") for city in cities]
    asked = Message(role="assistant", content="", tool_calls=calls)
    return Conversation(
        [user("Where?"), asked, *results, assistant("There."), user("Thanks"), assistant("Bye")], [WEATHER]
    )


def test_results_follow_the_order_of_parallel_calls() -> None:
    episode = start("qwen3", parallel("Oslo", "Rome"), thinking=False)
    episode.take(words("qwen3", qwen_call("Rome", "Oslo")))
    text = FORMATS["qwen3"].tokenizer().decode(episode.prompt or [])
    assert (
        "<tool_response>\nrain in Rome\n</tool_response>\n<tool_response>\nrain in Oslo\n</tool_response>"
        in text
    )
    for text in ("There.<|im_end|>", "Bye<|im_end|>"):
        episode.take(words("qwen3", text))
    assert episode.prompt is None
    assert episode.counts == {
        "requested": 2,
        "answered": 2,
        "skipped": 0,
        "tool_calls": 2,
        "at_length_limit": 0,
    }


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (qwen_call("Paris"), "call_not_recorded"),
        (qwen_call("Oslo").replace('"arguments": {', '"arguments": '), "bad_form"),
        (qwen_call("Oslo").replace('{"city": "Oslo"}', "[1]"), "no_arguments"),
        (qwen_call("Oslo").replace("weather", "wether"), "unknown_tool"),
        (qwen_call("Oslo")[:30], "bad_form"),
    ],
)
def test_a_call_that_cannot_be_carried_out_ends_the_conversation_and_is_trained(
    text: str, reason: str
) -> None:
    episode = start("qwen3", parallel("Oslo"), thinking=False)
    answer = words("qwen3", text)
    prompt = list(episode.prompt or [])
    episode.take(answer)
    assert episode.prompt is None
    counts = {
        name: episode.counts[name]
        for name in ("requested", "answered", "failed", "skipped", f"failed: {reason}")
    }
    assert counts == {"requested": 2, "answered": 0, "failed": 1, "skipped": 1, f"failed: {reason}": 1}
    (row,) = episode.rows
    assert row.token_ids == prompt + answer.token_ids
    assert row.loss_mask == [False] * len(prompt) + [True] * len(answer.token_ids)


def test_a_conversation_that_only_calls_tools_is_ended() -> None:
    episode = start("qwen3", parallel("Oslo"), thinking=False, limits=Limits(2048, 64, max_tool_rounds=3))
    for _ in range(3):
        episode.take(words("qwen3", qwen_call("Oslo")))
    assert episode.prompt is None
    assert episode.counts["failed: too_many_calls"] == 1
    assert len(episode.rows[-1].loss_mask) > 0


def test_a_task_without_recorded_results_ends_with_the_call() -> None:
    episode = start("qwen3", Conversation([user("How is Oslo?")], [WEATHER]), thinking=False)
    episode.take(words("qwen3", qwen_call("Oslo")))
    assert episode.prompt is None
    assert (episode.counts["answered"], episode.counts["failed"]) == (1, 0)


def test_an_answer_at_the_length_limit_ends_a_conversation_but_is_an_answer_where_nothing_follows() -> None:
    for conversation, answered in ((Conversation(MULTI), 0), (Conversation(MULTI[:1]), 1)):
        episode = start("smollm2", conversation)
        episode.take(Answer(words("smollm2", "Hello and").token_ids, "length"))
        assert episode.prompt is None
        assert (episode.counts["answered"], episode.counts["at_length_limit"], len(episode.rows)) == (
            answered,
            1,
            1,
        )
        assert (
            episode.counts["requested"]
            == episode.counts["answered"] + episode.counts["failed"] + episode.counts["skipped"]
        )


def test_an_answer_of_one_token_trains_nothing_and_earlier_answers_stay() -> None:
    end = words("smollm2", "<|im_end|>")
    episode = start("smollm2", Conversation(MULTI[:1]))
    episode.take(end)
    assert (episode.rows, episode.counts["failed: too_short"]) == ([], 1)
    episode = start("smollm2", Conversation(MULTI))
    prompt, answer = list(episode.prompt or []), words("smollm2", "Hello!<|im_end|>")
    episode.take(answer)
    episode.take(end)
    assert [row.token_ids for row in episode.rows] == [prompt + answer.token_ids]
    assert (episode.counts["answered"], episode.counts["failed"]) == (1, 1)


def test_a_prompt_that_does_not_fit_the_engine_is_not_asked() -> None:
    size = len(start("smollm2", Conversation(MULTI)).prompt or [])
    episode = start("smollm2", Conversation(MULTI), limits=Limits(size + 40, 30, 4))
    answer = words("smollm2", "Hello! " * 2 + "<|im_end|>")
    episode.take(answer)
    assert episode.prompt is None
    assert episode.counts["failed: no_room"] == 1
    assert [row.token_ids[-1] for row in episode.rows] == [answer.token_ids[-1]]


def test_rows_never_train_a_token_twice_and_end_supervised() -> None:
    for name, case in FAITHFUL:
        conversation, tokenizer = CONVERSATIONS[case], FORMATS[name].tokenizer()
        answers: list[Any] = [
            run
            for row in encode_rows(tokenizer, conversation_rows(tokenizer, conversation))
            for run in runs(row)
        ]
        episode = start(name, conversation)
        for answer in answers:
            episode.take(Answer(answer, "stop"))
        assert sum(sum(row.loss_mask) for row in episode.rows) == sum(map(len, answers))
        assert all(
            row.loss_mask[-1] and any(a and b for a, b in pairwise(row.loss_mask)) for row in episode.rows
        )


@pytest.mark.parametrize("legacy", [False, True])
def test_a_leading_space_that_decoding_drops_begins_no_new_row(legacy: bool) -> None:
    template = (
        "{% for m in messages %}{% if m.role == 'user' %}{{ bos_token + '[INST] ' + m.content + ' [/INST]' }}"
        "{% else %}{{ ' ' + m.content | trim + ' ' + eos_token }}{% endif %}{% endfor %}"
    )
    tokenizer = train_spaced_tokenizer(template, ("<s>", "</s>"), "</s>", "<s>", legacy)
    # As in Llama 2's own tokenizer.json.
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.backend_tokenizer.decoder = decoders.Sequence(parts)
    script = script_of(Conversation(MULTI), None)
    ids = encode_rows(tokenizer, [prompt_row(tokenizer, Conversation(script.messages))])[0].token_ids
    begun, written = tokenizer(
        ["<s>[INST] Hi [/INST]", "<s>[INST] Hi [/INST] Hello! </s>"], add_special_tokens=False
    )["input_ids"]
    assert tokenizer.decode(written[len(begun) :]).startswith("Hello")
    end_id = written[-1]
    row = TokenRow("o:c", "chats", ids, [False] * len(ids), script.to_json())
    episode = Episode(row, LIMITS, AnswerReader(tokenizer, RegenerateConfig()), [end_id])
    episode.take(Answer(written[len(begun) :], "stop"))
    assert (episode.rows, episode.messages[1]["content"]) == ([], " Hello! ")
    assert (episode.prompt or [])[: len(ids)] == ids
    episode.take(Answer([*written[len(begun) : -1], end_id], "stop"))
    assert len(episode.rows) == 1


@pytest.mark.parametrize(
    ("arguments", "schema"),
    [
        ('{"city": ' + "[" * 600 + "]" * 600 + "}", {"type": "object"}),
        ('{"city": "Oslo"}', {"type": "object", "required": [["city"]]}),
        ('{"city": "Oslo"}', {"type": "object", "properties": {"city": "string"}}),
    ],
)
def test_an_unforeseen_error_fails_one_conversation_and_keeps_its_answer(
    arguments: str, schema: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    tool = {"type": "function", "function": {"name": "weather", "parameters": schema}}
    episode = start("qwen3", Conversation(parallel("Oslo").messages, [tool]), thinking=False)
    answer = words("qwen3", qwen_call("Oslo").replace(json.dumps({"city": "Oslo"}), arguments))
    episode.take(answer)
    assert episode.prompt is None
    assert (episode.counts["failed: unforeseen"], episode.counts["skipped"], episode.counts["answered"]) == (
        1,
        1,
        0,
    )
    assert [sum(row.loss_mask) for row in episode.rows] == [len(answer.token_ids)]
    assert "opening:content: nothing can follow on an answer" in caplog.text
