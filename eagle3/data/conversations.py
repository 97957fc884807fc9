"""Rows to conversations: OpenAI `messages`, or `prompt` with an optional `response`."""

from pathlib import Path
from typing import Any, TypedDict

from eagle3.data.sources import Row

ROLES = ("system", "user", "assistant")
# These carry words of the conversation that no template would be shown here: refused rather than lost.
UNREAD_ROW_KEYS = ("tools", "functions")
UNREAD_MESSAGE_KEYS = ("tool_calls", "function_call", "reasoning_content")


class Message(TypedDict):
    """One turn; role is one of ROLES, content is not blank."""

    role: str
    content: str


def to_messages(row: Row, path: str | Path, line: int, needs_answer: bool = False) -> list[Message]:
    """Read the conversation in a row; keys that say nothing about the words (id, kind, …) are ignored.

    Args:
        row: {"messages": [{"role", "content"}, …]}, or {"prompt": str} with an optional "response".
        path: file of the row, for messages only.
        line: its line from 1, for messages only.
        needs_answer: the row must hold an assistant turn, because nothing regenerates it.

    Raises:
        ValueError: names file, line and remedy.
    """
    where = f"{path}, line {line}"
    if "messages" in row and "prompt" in row:
        raise ValueError(f"{where}: both messages and prompt are given; keep one of them")
    if "messages" in row:
        messages = _read_messages(row, where)
    elif "prompt" in row:
        messages = [Message(role="user", content=_read_text(row["prompt"], "prompt", where))]
        if row.get("response") is not None:
            messages.append(Message(role="assistant", content=_read_text(row["response"], "response", where)))
    else:
        raise ValueError(f"{where}: no conversation, only the keys {sorted(row)}; name it messages or prompt")
    if not any(m["role"] == "user" for m in messages):
        raise ValueError(f"{where}: no user text; add a message with the role user or remove the row")
    if needs_answer and not any(m["role"] == "assistant" for m in messages):
        raise ValueError(f"{where}: no assistant text to train on; add an answer or set regenerate.enabled to true")
    return messages


def drop_trailing_answer(messages: list[Message]) -> list[Message]:
    """The messages before the last assistant turn, when that turn ends the conversation: what the target is to answer."""
    end = len(messages)
    while end and messages[end - 1]["role"] == "assistant":
        end -= 1
    return messages[:end]


def _read_messages(row: Row, where: str) -> list[Message]:
    listed = row["messages"]
    if not isinstance(listed, list) or not listed:
        raise ValueError(
            f"{where}: messages must be a list with at least one message, got {_shown(listed)}; fill it or drop the row"
        )
    for key in UNREAD_ROW_KEYS:
        if row.get(key):
            raise ValueError(f"{where}: {key} are not supported; remove the row, or its tool turns and {key}")
    return [_read_message(m, f"message {i}", where) for i, m in enumerate(listed, 1)]


def _read_message(message: Any, name: str, where: str) -> Message:
    if not isinstance(message, dict):
        raise ValueError(f'{where}: {name} must be an object, got {_shown(message)}; write {{"role": …, "content": …}}')
    role = message.get("role")
    if role not in ROLES:
        raise ValueError(f"{where}: {name} has the unknown role {role!r}; use one of {', '.join(ROLES)}")
    for key in UNREAD_MESSAGE_KEYS:
        if message.get(key):
            raise ValueError(f"{where}: {name} has {key}, which are not supported; remove the row or write them into content")
    return Message(role=role, content=_read_text(message.get("content"), f"content of {name} ({role})", where))


def _read_text(value: Any, name: str, where: str) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{where}: {name} must be a string, got {_shown(value)}; write plain text")
    if not value.strip():
        raise ValueError(f"{where}: {name} is empty; fill it or remove the row")
    try:
        value.encode()
    except UnicodeEncodeError as e:
        raise ValueError(f"{where}: {name} has half a surrogate pair at character {e.start + 1}; correct the escape") from e
    return value


def _shown(value: Any) -> str:
    return "null" if value is None else "an empty list" if value == [] else type(value).__name__
