"""Reads answers with vLLM's own tool parsers in a process of its own, which costs an import of vLLM; starts no engine.

In, as JSON: {"tools": […], "asked": [[parser, name of a format, text], …]}. Out: [[content, [{"name": …, …}, …]], …].
"""

import json
import sys
from typing import Any

from tests.helpers.formats import FORMATS


def read(
    parser_name: str, format_name: str, text: str, tools: list[dict[str, Any]]
) -> tuple[str, list[dict[str, Any]]]:
    """Content and calls of a text."""
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.tool_parsers import ToolParserManager

    request = ChatCompletionRequest(messages=[{"role": "user", "content": "Hi"}], model="any", tools=tools)
    parser = ToolParserManager.get_tool_parser(parser_name)(FORMATS[format_name].tokenizer(), request.tools)
    found = parser.extract_tool_calls(text, request)
    return found.content or "", [
        {"name": c.function.name, "arguments": json.loads(c.function.arguments)} for c in found.tool_calls
    ]


if __name__ == "__main__":
    given = json.load(sys.stdin)
    answers = [read(*asked, given["tools"]) for asked in given["asked"]]
    sys.stdout.write("\n" + json.dumps(answers))
