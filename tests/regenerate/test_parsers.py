"""The settings of parsers, and gpt-oss's messages; tests/engine/test_tool_parsers.py has vLLM's own parsers."""

import subprocess
import sys

import pytest

from eagle3.config.engine import RegenerateConfig
from eagle3.data.conversations import Message
from eagle3.data.recorded import Recorded
from eagle3.data.script import Script
from eagle3.regenerate.parsers import AnswerReader, check_parsers, parser_names
from eagle3.regenerate.tool_calls import BadCall
from tests.helpers.calls import OSLO, TOOLS, assistant, call
from tests.helpers.formats import FORMATS

SCRIPT = Script([], [], TOOLS, None, Recorded({}))
GPT_OSS = RegenerateConfig(tool_parser="openai", reasoning_parser="openai_gptoss")
ANALYSIS = "<|channel|>analysis<|message|>Look.<|end|>"
CALL = ' to=functions.weather<|channel|>commentary json<|message|>{"city": "Oslo"}'
TIME = call("get_time")
LATER_CALL = (
    "<|start|>assistant<|channel|>commentary to=functions.get_time <|constrain|>json<|message|>{}<|call|>"
)


def read(text: str, cfg: RegenerateConfig = GPT_OSS, script: Script = SCRIPT) -> Message:
    return AnswerReader(FORMATS["gpt-oss"].tokenizer(), cfg).read(text, [], script)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("<|channel|>final<|message|>It rains.", assistant("It rains.")),
        (f"{ANALYSIS}<|start|>assistant<|channel|>final<|message|>No.<|return|>", assistant("No.", "Look.")),
        (CALL, assistant(calls=(OSLO,))),
        (f"{ANALYSIS}<|start|>assistant{CALL}<|call|>", assistant("", "Look.", (OSLO,))),
        (f"{CALL}<|call|>{LATER_CALL}", assistant(calls=(OSLO, TIME))),
        (f"<|channel|>commentary<|message|>I look.<|end|>{LATER_CALL}", assistant("I look.", "", (TIME,))),
        ("<|channel|>analysis<|message|>Look. But", assistant("", "Look. But")),
        ("Hello", assistant("Hello")),
    ],
)  # fmt: skip
def test_gpt_oss_messages_are_read_by_channel_and_recipient(text: str, message: Message) -> None:
    assert read(text) == message


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (" to=functions.weather<|channel|>commen", "bad_form"),
        (CALL.replace("weather", "climate"), "unknown_tool"),
        (CALL.replace("}", ""), "bad_json"),
        (CALL.replace('{"city": "Oslo"}', "[1]"), "no_arguments"),
    ],
)
def test_a_gpt_oss_call_that_cannot_be_read_is_refused_by_reason(text: str, reason: str) -> None:
    with pytest.raises(BadCall) as e:
        read(text)
    assert e.value.reason == reason


def test_without_parsers_every_text_is_content() -> None:
    assert read(CALL, RegenerateConfig()) == assistant(CALL)
    with pytest.raises(BadCall, match=r"regenerate\.tool_parser"):
        read('{"name": "weather", "arguments": {}}', RegenerateConfig())


def test_tools_without_a_parser_and_unknown_parsers_are_refused_with_all_names() -> None:
    check_parsers(RegenerateConfig(), has_tools=False)
    check_parsers(RegenerateConfig(enabled=False), has_tools=True)
    check_parsers(RegenerateConfig(tool_parser="hermes", reasoning_parser="qwen3"), has_tools=True)
    with pytest.raises(ValueError, match=r"regenerate\.tool_parser, got none; .*one of .*hermes.*mistral"):
        check_parsers(RegenerateConfig(reasoning_parser="qwen3"), has_tools=True)
    with pytest.raises(ValueError, match=r"regenerate\.tool_parser must be one of .*hermes.*, got qwen3;"):
        check_parsers(RegenerateConfig(tool_parser="qwen3"), has_tools=False)
    with pytest.raises(
        ValueError, match=r"regenerate\.reasoning_parser must be one of .*qwen3.*, got hermes;"
    ):
        check_parsers(RegenerateConfig(tool_parser="hermes", reasoning_parser="hermes"), has_tools=True)


def test_reading_without_vllms_parsers_and_checking_names_imports_no_vllm() -> None:
    code = (
        "import sys; from eagle3.regenerate import generator, parsers; "
        "from eagle3.config.engine import RegenerateConfig; "
        "parsers.check_parsers(RegenerateConfig(tool_parser='hermes'), True); "
        "assert not {'vllm', 'torch'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.engine
def test_the_names_are_those_that_vllm_registers() -> None:
    from vllm.reasoning import ReasoningParserManager
    from vllm.tool_parsers import ToolParserManager

    assert parser_names("tool_parsers") == ToolParserManager.list_registered()
    assert parser_names("reasoning") == ReasoningParserManager.list_registered()
