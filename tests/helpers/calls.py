"""Tools, calls of them, and answers as messages."""

from typing import Any

from transformers import PreTrainedTokenizerBase

from eagle3.data.chat import encode_rows, prompt_row
from eagle3.data.conversations import Conversation, Message


def tool(name: str, required: tuple[str, ...] = (), **types: Any) -> dict[str, Any]:
    parameters = {
        "type": "object",
        "properties": {k: {"type": t} for k, t in types.items()},
        "required": list(required),
    }
    return {"type": "function", "function": {"name": name, "description": "", "parameters": parameters}}


WEATHER = tool("weather", ("city",), city="string", days="integer", scale=["string", "null"])
TOOLS = [WEATHER, tool("get_time"), tool("math.sum", values="array", exact="boolean", start="number")]


def call(name: str, number: str = "", **arguments: Any) -> dict[str, Any]:
    made: dict[str, Any] = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return {"id": number, **made} if number else made


OSLO = call("weather", city="Oslo")


def assistant(content: str = "", thoughts: str = "", calls: tuple[dict[str, Any], ...] = ()) -> Message:
    message = Message(role="assistant", content=content)
    if thoughts:
        message["reasoning_content"] = thoughts
    if calls:
        message["tool_calls"] = list(calls)
    return message


def render_prompt(tokenizer: PreTrainedTokenizerBase, messages: list[Message]) -> list[int]:
    """Token ids of the messages and the generation prompt."""
    return encode_rows(tokenizer, [prompt_row(tokenizer, Conversation(messages))])[0].token_ids
