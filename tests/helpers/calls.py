"""Tools, calls of them, and answers as messages."""

from typing import Any

from transformers import PreTrainedTokenizerBase

from eagle3.data.chat import conversation_rows
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


def written(tokenizer: PreTrainedTokenizerBase, message: Message, thinking: bool | None = None) -> str:
    """The answer as the target would write it, end of turn included."""
    conversation = Conversation([Message(role="user", content="Hi"), message], TOOLS)
    rows = conversation_rows(tokenizer, conversation, thinking)
    return "".join(piece.text[: piece.num_answer] for piece in rows[-1])
