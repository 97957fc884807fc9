"""Short conversations with everything that a chat template may write: system text, thoughts, tool calls and results."""

from typing import Any

from eagle3.data.conversations import Conversation, Message

WEATHER = {
    "type": "function",
    "function": {"name": "weather", "description": "Now.", "parameters": {"type": "object"}},
}
CALL = {
    "id": "abcdef123",
    "type": "function",
    "function": {"name": "weather", "arguments": {"city": "Tromsø"}},
}


def user(content: str) -> Message:
    return Message(role="user", content=content)


def assistant(content: str = "", thoughts: str = "", call: dict[str, Any] | None = None) -> Message:
    message = Message(role="assistant", content=content)
    if thoughts:
        message["reasoning_content"] = thoughts
    if call:
        message["tool_calls"] = [call]
    return message


RESULT = Message(role="tool", content="rain", tool_call_id="abcdef123", name="weather")
SYSTEM = Message(role="system", content="Be brief.")
SINGLE = [user("Hi"), assistant("Hello!")]
MULTI = [*SINGLE, user("Bye"), assistant("See you!")]
TOOLS = [user("How is Tromsø?"), assistant(call=CALL), RESULT, assistant("It rains.")]
THINKING = [user("Hi"), assistant("Hello!", "Greet."), user("Bye"), assistant("See you!", "Part.")]
THINKING_TOOLS = [
    user("How?"),
    assistant(thoughts="Look.", call=CALL),
    RESULT,
    assistant("It rains.", "Tell."),
]
CONVERSATIONS = {
    "single": Conversation(SINGLE),
    "multi": Conversation(MULTI),
    "system": Conversation([SYSTEM, *MULTI]),
    "tools": Conversation(TOOLS, [WEATHER]),
    "thinking": Conversation(THINKING),
    "thinking_tools": Conversation(THINKING_TOOLS, [WEATHER]),
}
