"""Conversations in the public chat formats, which a test answers in the target's place."""

import json
import re
from itertools import groupby

from eagle3.config.engine import RegenerateConfig
from eagle3.data.chat import EncodedRow, encode_rows, prompt_row
from eagle3.data.conversations import Conversation
from eagle3.data.script import Script, script_of
from eagle3.regenerate.answers import Answer
from eagle3.regenerate.episode import Episode, Limits
from eagle3.regenerate.parsers import AnswerReader, parse_harmony
from eagle3.regenerate.tool_calls import FoundCall, Parsed
from eagle3.shards.tokens import TokenRow
from tests.helpers.formats import FORMATS

LIMITS = Limits(max_model_len=2048, max_new_tokens=64, max_tool_rounds=4)
ENDS = (
    "<|im_end|>",
    "<|eot_id|>",
    "<end_of_turn>",
    "</s>",
    "<|return|>",
    "<|call|>",
    "<｜end▁of▁sentence｜>",
)
# Tool parser and reasoning parser of each format, as `vllm serve` would get them.
PARSERS = {
    "qwen3": ("hermes", "qwen3"),
    "qwen3-thinking": ("hermes", "qwen3"),
    "qwen3-coder": ("qwen3_coder", "qwen3"),
    "llama3.1": ("llama3_json", ""),
    "mistral": ("mistral", ""),
    "gpt-oss": ("openai", "openai_gptoss"),
    "deepseek-r1": ("deepseek_v3", "deepseek_r1"),
}


def parse_tags(text: str, token_ids: list[int], script: Script) -> Parsed:
    """Read thoughts in <think> and JSON calls in <tool_call>, as vLLM's parsers do, which take 8 s to import."""
    thoughts, _, rest = text.rpartition("</think>")
    thoughts = thoughts.removeprefix("<think>")
    blocks = re.findall(r"<tool_call>(.*?)</tool_call>", rest, re.DOTALL)
    try:
        calls = [FoundCall(c["name"], json.dumps(c["arguments"])) for c in map(json.loads, blocks)]
    except (ValueError, KeyError, TypeError, RecursionError):
        calls = []
    content = rest.partition("<tool_call>")[0].strip() if calls else rest.lstrip("\n")
    return Parsed(thoughts, content, calls, "<tool_call>" in rest)


def quick_reader(name: str) -> AnswerReader:
    """A reader that imports no vLLM."""
    reader = AnswerReader(FORMATS[name].tokenizer(), RegenerateConfig())
    reader.parse = parse_harmony if name == "gpt-oss" else parse_tags
    return reader


def vllm_reader(name: str) -> AnswerReader:
    """A reader with the parsers of PARSERS."""
    tool_parser, reasoning_parser = PARSERS.get(name, ("", ""))
    cfg = RegenerateConfig(tool_parser=tool_parser, reasoning_parser=reasoning_parser)
    return AnswerReader(FORMATS[name].tokenizer(), cfg)


def start(
    reader: AnswerReader,
    end_ids: list[int],
    conversation: Conversation,
    thinking: bool | None = None,
    limits: Limits = LIMITS,
) -> Episode:
    """The episode of a conversation without its assistant turns."""
    script = script_of(conversation, thinking)
    pieces = prompt_row(reader.tokenizer, Conversation(script.messages, conversation.tools), thinking)
    ids = encode_rows(reader.tokenizer, [pieces])[0].token_ids
    text = script.to_json() if script.has_more else ""
    row = TokenRow("opening:content", "chats", ids, [False] * len(ids), text)
    return Episode(row, limits, reader, end_ids)


def end_ids(name: str) -> list[int]:
    tokenizer = FORMATS[name].tokenizer()
    return [tokenizer.convert_tokens_to_ids(tag) for tag in ENDS if tag in tokenizer.get_vocab()]


def words(name: str, text: str) -> Answer:
    return Answer(FORMATS[name].tokenizer()(text, add_special_tokens=False)["input_ids"], "stop")


def runs(row: EncodedRow | TokenRow) -> list[list[int]]:
    """The supervised runs of a row: its answers."""
    pairs = zip(row.token_ids, row.loss_mask, strict=True)
    return [[token for token, _ in run] for supervised, run in groupby(pairs, lambda p: p[1]) if supervised]
