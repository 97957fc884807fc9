"""Answers read by vLLM's own parsers, in public chat formats on tiny tokenizers; no engine starts."""

import pytest

from eagle3.config.engine import RegenerateConfig
from eagle3.data.chat import conversation_rows, encode_rows, prompt_row
from eagle3.data.conversations import Conversation, Message
from eagle3.data.recorded import Recorded
from eagle3.data.script import Script
from eagle3.regenerate.answers import Answer
from eagle3.regenerate.parsers import AnswerReader
from eagle3.regenerate.tool_calls import BadCall
from tests.helpers.calls import OSLO, TOOLS, WEATHER, assistant, call
from tests.helpers.conversations import CONVERSATIONS
from tests.helpers.episodes import PARSERS, end_ids, runs, start, vllm_reader, words
from tests.helpers.formats import FORMATS

pytestmark = pytest.mark.engine

ODD = call("weather", city='a"}</b>\n[1]; ø', days=2)
HERMES = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
HERMES_ODD = (
    '<tool_call>{"arguments": {"city": "a\\"}</b>\\n[1]; ø", "days": 2}, "name": "weather"}</tool_call>'
)
LLAMA = '{"name": "weather", "parameters": {"city": "Oslo"}}'
MISTRAL = '[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Oslo"}, "id": "abcdef123"}'
XML = "<tool_call>\n<function=weather>\n<parameter=city>\nOslo\n</parameter>\n</function>\n</tool_call>"
XML_DAYS = XML.replace("</function>", "<parameter=days>\n3\n</parameter>\n</function>")
SORTED = (OSLO, call("get_time"))


def read(name: str, text: str, thinking: bool | None = None) -> Message:
    return vllm_reader(name).read(
        text, words(name, text).token_ids, Script([], [], TOOLS, thinking, Recorded({}))
    )


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("qwen3", f"<think>\nHm.\n</think>\n\n{HERMES}", assistant("", "\nHm.\n", (OSLO,))),
        ("qwen3", f"<think>\nHm.\n</think>\n\n{HERMES_ODD}\n{HERMES}", assistant("", "\nHm.\n", (ODD, OSLO))),
        ("qwen3", "<think>\n\n</think>\n\nHello! 1 < 2", assistant("\n\nHello! 1 < 2")),
        ("qwen3", "<think>\nGreet. But", assistant("", "\nGreet. But")),
        ("qwen3-thinking", "Greet.\n</think>\n\nHello!", assistant("\n\nHello!", "Greet.\n")),
        ("qwen3-coder", f"<think>\nHm.\n</think>\n\n{XML}", assistant("", "\nHm.\n", (OSLO,))),
        ("qwen3-coder", XML_DAYS, assistant(calls=(call("weather", city="Oslo", days=3),))),
        ("qwen3-coder", f"{XML}\n{XML_DAYS}", assistant(calls=(OSLO, call("weather", city="Oslo", days=3)))),
        ("llama3.1", LLAMA, assistant(calls=(OSLO,))),
        ("llama3.1", '{"name": "Bob", "age": 3}', assistant('{"name": "Bob", "age": 3}')),
        ("llama3.1", f'{LLAMA}; {{"name": "get_time", "parameters": {{}}}}', assistant(calls=SORTED)),
        ("mistral", f"{MISTRAL}]", assistant(calls=(OSLO,))),
        ("mistral", f'{MISTRAL}, {{"name": "get_time", "arguments": {{}}}}]', assistant(calls=SORTED)),
        ("mistral", " It rains [1].", assistant(" It rains [1].")),
        ("deepseek-r1", "Greet.\n</think>\n\nHello!", assistant("\n\nHello!", "Greet.\n")),
    ],
)
def test_thoughts_content_and_calls_are_read(name: str, text: str, message: Message) -> None:
    assert read(name, text) == message


def test_where_thinking_is_off_an_answer_is_content_and_calls() -> None:
    assert read("qwen3", "Hello!", thinking=False) == assistant("Hello!")
    assert read("qwen3", f"I look.\n{HERMES}", thinking=False) == assistant("I look.\n", "", (OSLO,))
    assert read("qwen3-coder", f"I look.\n{XML}", thinking=False) == assistant("I look.", "", (OSLO,))


@pytest.mark.parametrize(
    ("name", "text", "reason"),
    [
        ("qwen3", HERMES[:30], "bad_form"),
        ("qwen3", HERMES.replace("arguments", "args"), "bad_form"),
        ("qwen3", "<tool_call>\nweather(Oslo)\n</tool_call>", "bad_form"),
        ("qwen3", f"<think>\nHm.\n</think>\n\n{HERMES[:-20]}", "bad_form"),
        ("qwen3", HERMES.replace('"Oslo"', "NaN"), "wrong_type"),
        ("qwen3", HERMES.replace("weather", "climate"), "unknown_tool"),
        ("qwen3-coder", "I look. <tool_call>Oslo</tool_call>", "bad_form"),
        ("qwen3-coder", "<think>\nHm.\n</think>\n\n<tool_call>", "bad_form"),
        ("qwen3-coder", XML.replace("city", "town"), "missing_argument"),
        ("qwen3-coder", XML_DAYS.replace("\n3\n", "\nthree\n"), "wrong_type"),
        ("llama3.1", LLAMA[:30], "bad_form"),
        ("llama3.1", LLAMA.replace("weather", "climate"), "unknown_tool"),
        ("mistral", MISTRAL, "bad_form"),
        ("mistral", "[TOOL_CALLS] [1]", "bad_form"),
    ],
)
def test_a_call_that_cannot_be_read_or_carried_out_is_refused(name: str, text: str, reason: str) -> None:
    with pytest.raises(BadCall) as e:
        read(name, text, thinking=False if "think" not in text else None)
    assert e.value.reason == reason


@pytest.mark.parametrize(
    ("name", "case"),
    [
        ("qwen3", "thinking_tools"),
        ("qwen3-thinking", "thinking_tools"),
        ("qwen3-coder", "thinking_tools"),
        ("llama3.1", "tools"),
        ("gpt-oss", "tools"),
    ],
)
def test_an_answered_task_gives_the_rows_of_the_written_one(name: str, case: str) -> None:
    conversation, reader = CONVERSATIONS[case], vllm_reader(name)
    written = encode_rows(reader.tokenizer, conversation_rows(reader.tokenizer, conversation))
    episode = start(reader, end_ids(name), conversation)
    for answer in [run for row in written for run in runs(row)]:
        episode.take(Answer(answer, "stop"))
    assert episode.prompt is None
    assert [(row.token_ids, row.loss_mask) for row in episode.rows] == [
        (row.token_ids, row.loss_mask) for row in written
    ]
    assert (episode.counts["requested"], episode.counts["answered"], episode.counts["tool_calls"]) == (
        1,
        1,
        1,
    )


@pytest.mark.parametrize(("name", "call_text"), [("qwen3", HERMES), ("qwen3-coder", XML)])
def test_parallel_calls_get_their_results_and_answers_keep_their_token_ids(name: str, call_text: str) -> None:
    calls = [call("weather", city=city) for city in ("Oslo", "Rome")]
    results = [Message(role="tool", content=f"rain in {city}") for city in ("Oslo", "Rome")]
    task = [
        Message(role="user", content="Where?"),
        assistant("", "", tuple(calls)),
        *results,
        assistant("There."),
    ]
    reader = vllm_reader(name)
    episode = start(reader, end_ids(name), Conversation(task, [WEATHER]), thinking=False)
    # One token a character, as no tokenizer would write it.
    spelled = [words(name, c).token_ids for c in call_text.replace("Oslo", "Rome") + "\n" + call_text]
    answers = [
        [token for ids in spelled for token in ids] + words(name, "<|im_end|>").token_ids,
        words(name, "There.<|im_end|>").token_ids,
    ]
    for answer in answers:
        episode.take(Answer(answer, "stop"))
    assert [run for row in episode.rows for run in runs(row)] == answers
    text = reader.tokenizer.decode(episode.rows[-1].token_ids)
    assert text.index("<tool_response>\nrain in Rome") < text.index("<tool_response>\nrain in Oslo")
    assert (episode.counts["answered"], episode.counts["failed"], episode.counts["tool_calls"]) == (1, 0, 2)


def test_an_id_that_vllm_drops_begins_a_row_and_every_answer_is_kept() -> None:
    conversation, reader = CONVERSATIONS["tools"], vllm_reader("mistral")
    episode = start(reader, end_ids("mistral"), conversation)
    texts = [f"{MISTRAL.replace('Oslo', 'Tromsø')}]</s>", " It rains.</s>"]
    answers = [words("mistral", text).token_ids for text in texts]
    for answer in answers:
        episode.take(Answer(answer, "stop"))
    assert [[run] for run in answers] == [runs(row) for row in episode.rows]
    assert '"id": "call00001"' in reader.tokenizer.decode(episode.rows[1].token_ids)


def test_the_next_prompt_holds_the_message_as_a_server_returns_it() -> None:
    reader = vllm_reader("qwen3")
    episode = start(reader, end_ids("qwen3"), CONVERSATIONS["thinking"])
    episode.take(words("qwen3", "<think>\nGreet.\n</think>\n\nHello!<|im_end|>"))
    history = [
        Message(role="user", content="Hi"),
        assistant("\n\nHello!"),
        Message(role="user", content="Bye"),
    ]
    asked = encode_rows(reader.tokenizer, [prompt_row(reader.tokenizer, Conversation(history))])[0]
    assert episode.prompt == asked.token_ids


def test_a_parser_that_does_not_fit_the_tokenizer_is_refused() -> None:
    cfg = RegenerateConfig(tool_parser=PARSERS["mistral"][0])
    with pytest.raises(
        ValueError, match=r"regenerate's parsers must fit the target: --tool-call-parser mistral"
    ):
        AnswerReader(FORMATS["qwen3"].tokenizer(), cfg)
