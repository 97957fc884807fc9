"""Read an answer as a message: thoughts, content and tool calls, by vLLM's parsers under the names of `vllm
serve`.

The message decides the next prompt and which recorded results answer its calls; the token ids in the rows
stay as the engine wrote them. Importing vLLM's parsers takes eight seconds, so only the worker does it.
gpt-oss is read here: vLLM reads it with openai_harmony, which downloads a vocabulary.
"""

import ast
import logging
import re
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eagle3.config.engine import RegenerateConfig
from eagle3.data.conversations import Message
from eagle3.data.script import Script
from eagle3.regenerate.tool_calls import BadCall, FoundCall, Parsed, checked_call, opens_bare_call

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# vLLM's names of gpt-oss's tool parser and reasoning parser.
HARMONY = {"openai", "openai_gptoss"}
# Attributes in which vLLM's parsers keep the words that open a call.
OPENING_NAMES = ("tool_calls_start_token", "tool_call_start_token", "bot_token", "bot_string", "tc_start")

# Takes the text and the token ids of an answer, both without the end token.
Parse = Callable[[str, list[int], Script], Parsed]


def check_parsers(regenerate: RegenerateConfig, has_tools: bool) -> None:
    """Refuse unknown parsers, and rows with tools without a tool parser; imports no vLLM.

    Args:
        regenerate: settings of the stage.
        has_tools: whether any row has tools.
    """
    for field, package in (("tool_parser", "tool_parsers"), ("reasoning_parser", "reasoning")):
        name, known = getattr(regenerate, field), parser_names(package)
        if name and known and name not in known:
            raise ValueError(f"regenerate.{field} must be one of {', '.join(known)}, got {name}; correct it")
    if regenerate.enabled and has_tools and not regenerate.tool_parser:
        raise ValueError(
            "rows with tools need regenerate.tool_parser, got none; set the target's --tool-call-parser of "
            f"`vllm serve`, one of {', '.join(parser_names('tool_parsers'))}"
        )


def parser_names(package: str) -> list[str]:
    """The parsers that vLLM has, read from its source, without an import; empty where vLLM is not installed.

    Args:
        package: tool_parsers or reasoning.
    """
    spec = find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        return []
    source = Path(spec.submodule_search_locations[0], package, "__init__.py").read_text()
    tables = [node.value for node in ast.parse(source).body if isinstance(node, ast.Assign)]
    keys = [key for table in tables if isinstance(table, ast.Dict) for key in table.keys]
    return sorted(str(key.value) for key in keys if isinstance(key, ast.Constant))


class AnswerReader:
    """Reads a target's answers. Without a parser the whole text is content.

    Args:
        tokenizer: the target's own.
        cfg: names the parsers.

    Raises:
        ValueError: if a parser does not fit the tokenizer.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", cfg: RegenerateConfig) -> None:
        self.tokenizer = tokenizer
        self.parse: Parse = lambda text, token_ids, script: Parsed("", text, [])
        if HARMONY & {cfg.tool_parser, cfg.reasoning_parser}:
            self.parse = parse_harmony
        elif cfg.tool_parser or cfg.reasoning_parser:
            self.parse = VllmParser(tokenizer, cfg).parse

    def read(self, text: str, token_ids: list[int], script: Script) -> Message:
        """Read an answer as the assistant's message. Calls have an id only where the text has it.

        Args:
            text: the answer without its end token, special tokens included.
            token_ids: the same.
            script: has the tools of the conversation.

        Raises:
            BadCall: if a call was begun that cannot be read or does not fit the tools.
        """
        parsed = self.parse(text, token_ids, script)
        message = Message(role="assistant", content=parsed.content)
        if parsed.thoughts.strip():
            message["reasoning_content"] = parsed.thoughts
        if not script.tools:
            return message
        if not parsed.calls and (parsed.opens_call or opens_bare_call(parsed.content, script.tools)):
            got = text[-60:]
            raise BadCall("bad_form", f"a call must have the form of regenerate.tool_parser, got {got!r}")
        if parsed.calls:
            message["tool_calls"] = [checked_call(call, script.tools, text) for call in parsed.calls]
        return message


class VllmParser:
    """vLLM's own parsers, used as its server uses them."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", cfg: RegenerateConfig) -> None:
        try:
            from vllm.parser import ParserManager
            from vllm.parser.engine.events import EventType
            from vllm.tokenizers.hf import get_cached_tokenizer
        except ModuleNotFoundError as e:
            raise ValueError(
                "all parsers but openai need vLLM, got none; install it or drop rows with tools"
            ) from e
        # A call that cannot be read is counted; vLLM would also log a traceback of each.
        logging.getLogger("vllm.tool_parsers").setLevel(logging.CRITICAL)
        self.tokenizer: Any = get_cached_tokenizer(tokenizer)
        names = (cfg.tool_parser or None, cfg.reasoning_parser or None)
        try:
            self.parser_class: Any = ParserManager.get_parser(*names, True, tokenizer=self.tokenizer)
        except TypeError as e:
            raise ValueError(f"regenerate's parsers must fit the target: {e}; correct their names") from e
        parser = self.parser_class(self.tokenizer).tool_parser
        self.openings = {str(getattr(parser, name, "")) for name in OPENING_NAMES} - {""}
        if engine := getattr(parser, "_parser_engine", None):
            config = engine.parser_engine_config
            for (_, terminal), transition in config.transitions.items():
                if EventType.TOOL_CALL_START in transition.events:
                    self.openings.add(config.terminals[terminal])

    def parse(self, text: str, token_ids: list[int], script: Script) -> Parsed:
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

        thinking = script.thinking
        switches = {} if thinking is None else {"enable_thinking": thinking, "thinking": thinking}
        request = ChatCompletionRequest(messages=[], tools=script.tools, chat_template_kwargs=switches)
        parser = self.parser_class(self.tokenizer, request.tools, chat_template_kwargs=switches)
        thoughts, content, found = parser.parse(
            text, request, enable_auto_tools=True, model_output_token_ids=token_ids
        )
        calls = [FoundCall(call.name, call.arguments, call.id) for call in found or []]
        spoken = text.replace(thoughts, "", 1) if thoughts else text
        return Parsed(thoughts or "", content or "", calls, any(word in spoken for word in self.openings))


def parse_harmony(text: str, token_ids: list[int], script: Script) -> Parsed:
    """Read gpt-oss's messages: each has a header with channel and recipient, <|message|>, and a body.

    <|channel|>analysis<|message|>Thoughts.<|end|>
    <|start|>assistant to=functions.name<|channel|>commentary json<|message|>{"key": "value"}<|call|>
    """
    thoughts: list[str] = []
    content: list[str] = []
    calls: list[FoundCall] = []
    opens_call = False
    for message in text.split("<|start|>"):
        header, separator, body = re.sub(r"<\|(end|call|return)\|>$", "", message).partition("<|message|>")
        called = re.search(r"to=functions\.([^\s<]+)", header)
        opens_call = opens_call or called is not None
        if called and separator:
            calls.append(FoundCall(called[1], body))
        elif "<|channel|>analysis" in header:
            thoughts.append(body)
        elif not called:
            content.append(body if separator else header)
    return Parsed("\n".join(thoughts), "\n".join(content), calls, opens_call)
