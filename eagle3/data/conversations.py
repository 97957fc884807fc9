"""Read a row as a conversation. The keys of the row give its format; the first match wins:

    pretokenized      input_ids and loss_mask
    openai_messages   messages | conversations | conversation: turns of {role, content}
    sharegpt          the same keys: turns of {from, value}
    prompt_response   one of PROMPT_KEYS and one of RESPONSE_KEYS; `input` is appended
    prompt_only       one of PROMPT_KEYS

Every format but pretokenized may add one of SYSTEM_KEYS, and tools or functions. Lists may be JSON in a
string. Other keys (id, source, …) are ignored.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypedDict

ROLE_NAMES = {
    "system": ("system", "developer"),
    "user": ("user", "human", "prompter"),
    "assistant": ("assistant", "gpt", "chatgpt", "bing", "bard", "claude", "model", "bot", "ai"),
    "tool": ("tool", "function", "observation", "tool_response", "function_response", "ipython"),
    "calls": ("function_call", "tool_call", "tool_calls"),
}
ROLE_OF = {name: role for role, names in ROLE_NAMES.items() for name in names}
TURN_KEYS = ("messages", "conversations", "conversation")
PROMPT_KEYS = ("prompt", "instruction", "question", "query", "problem", "input")
RESPONSE_KEYS = ("response", "completion", "output", "solution", "answer")
SYSTEM_KEYS = ("system", "system_prompt")
REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")


class Message(TypedDict, total=False):
    """One turn. role: system, user, assistant or tool. content: "" if the turn has no text, only calls.

    tool_calls: [{"id"?, "type": "function", "function": {"name": str, "arguments": dict}}].
    """

    role: str
    content: str
    reasoning_content: str
    tool_calls: list[dict[str, Any]]
    tool_call_id: str
    name: str


@dataclass(frozen=True)
class Conversation:
    """Turns, the tools of the assistant (JSON schemas), and the name of the row's format."""

    messages: list[Message]
    tools: list[dict[str, Any]] | None = None
    format: str = ""


@dataclass(frozen=True)
class Pretokenized:
    """A row of target token ids. loss_mask: True where the target wrote the token."""

    token_ids: list[int]
    loss_mask: list[bool]


class BadRow(ValueError):
    """A row that cannot be used. reason: a short code for the report's counts."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(reason, message)
        self.reason = reason

    def __str__(self) -> str:
        return str(self.args[1])


def to_conversation(row: Mapping[str, Any]) -> Conversation | Pretokenized:
    """Read a row; BadRow if it has no conversation that can be used."""
    if row.get("input_ids") is not None:
        return _read_pretokenized(row)
    try:
        return _read_conversation(row)
    except RecursionError as e:
        message = "an object is nested too deep to be read; flatten it or remove the row"
        raise BadRow("too_deep", message) from e


def drop_trailing_answer(messages: list[Message]) -> list[Message]:
    """The messages without the assistant turns at the end, for the target to answer."""
    end = len(messages)
    while end and messages[end - 1]["role"] == "assistant":
        end -= 1
    return messages[:end]


def check_unicode(text: str, where: str) -> None:
    """Refuse half a surrogate pair: neither a tokenizer nor a file takes it."""
    try:
        text.encode()
    except UnicodeEncodeError as e:
        found = f"half a surrogate pair after {text[max(e.start - 40, 0) : e.start]!a}"
        raise BadRow("bad_unicode", f"{where} has {found}; correct the escape") from e


def _read_conversation(row: Mapping[str, Any]) -> Conversation:
    turn_key = _first_key(row, TURN_KEYS)
    if turn_key:
        messages, form = _read_turns(row[turn_key], turn_key)
    else:
        messages, form = _read_columns(row)
    system_key = _first_key(row, SYSTEM_KEYS)
    if system_key and messages[0]["role"] != "system":
        messages = [*_read_turn({"role": "system", "content": row[system_key]}, system_key), *messages]
    if not any(m["role"] == "user" for m in messages):
        raise BadRow("no_user", "no user text; add a message with the role user or remove the row")
    tools = _read_tools(row)
    for where, value in [*((f"message {i}", m) for i, m in enumerate(messages, 1)), ("tools", tools)]:
        check_unicode(json.dumps(value, ensure_ascii=False), where)
    return Conversation(messages, tools, form)


def _read_turns(turns: Any, key: str) -> tuple[list[Message], str]:
    turns = _parse_json(turns, key)
    if not isinstance(turns, list) or not turns:
        found = "an empty list" if turns == [] else _type_name(turns)
        rule = f"{key} must be a list with at least one turn"
        raise BadRow("bad_turn", f"{rule}, got {found}; fill it or drop the row")
    messages = [m for i, turn in enumerate(turns, 1) for m in _read_turn(turn, f"turn {i} of {key}")]
    if not messages:
        raise BadRow("empty_text", f"{key} has no text; fill it or remove the row")
    return messages, "sharegpt" if "from" in turns[0] else "openai_messages"


def _read_columns(row: Mapping[str, Any]) -> tuple[list[Message], str]:
    prompt_key = _first_key(row, PROMPT_KEYS)
    if not prompt_key:
        found = f"no conversation, only the keys {sorted(map(str, row))}"
        raise BadRow("no_conversation", f"{found}; name it messages, or prompt and response")
    prompt = row[prompt_key]
    more = row.get("input")
    if prompt_key == "instruction" and isinstance(prompt, str) and isinstance(more, str) and more.strip():
        prompt = f"{prompt}\n\n{more}"
    messages = _read_column(prompt, "user", prompt_key)
    response_key = _first_key(row, RESPONSE_KEYS)
    if not response_key:
        return messages, "prompt_only"
    return messages + _read_column(row[response_key], "assistant", response_key), "prompt_response"


def _read_column(value: Any, role: str, key: str) -> list[Message]:
    if isinstance(value, list):
        return _read_turns(value, key)[0]
    return _read_turn({"role": role, "content": value}, key)


def _read_turn(turn: Any, where: str) -> list[Message]:
    """One message, or none for an empty system prompt."""
    if not isinstance(turn, dict):
        found = f"{where} must be an object, got {_type_name(turn)}"
        raise BadRow("bad_turn", f'{found}; write {{"role": …, "content": …}}')
    name = turn.get("role", turn.get("from"))
    role = ROLE_OF.get(name.strip().lower()) if isinstance(name, str) else None
    if role is None:
        raise BadRow("bad_role", f"{where} has the unknown role {name!r}; use one of {', '.join(ROLE_OF)}")
    content = turn.get("content", turn.get("value"))
    calls = turn.get("tool_calls") or turn.get("function_call")
    if role == "calls":
        role = "assistant"
        calls = content
        content = None
    text = _read_text(content, where, objects_too=role == "tool")
    if role == "system" and not text.strip():
        return []
    message = Message(role=role, content=text)
    if role == "assistant":
        value = next((turn[k] for k in REASONING_KEYS if turn.get(k)), None)
        reasoning = _read_text(value, f"reasoning of {where}")
        if reasoning.strip():
            message["reasoning_content"] = reasoning
        if calls:
            calls = _parse_json(calls, f"the tool call in {where}", "bad_tool_call")
            listed = calls if isinstance(calls, list) else [calls]
            message["tool_calls"] = [_read_call(call, where) for call in listed]
    if role == "tool" and isinstance(turn.get("tool_call_id"), str):
        message["tool_call_id"] = turn["tool_call_id"]
    if role == "tool" and isinstance(turn.get("name"), str):
        message["name"] = turn["name"]
    if not text.strip() and role != "tool" and not message.keys() & {"tool_calls", "reasoning_content"}:
        raise BadRow("empty_text", f"{where} is empty; fill it or remove the row")
    return [message]


def _read_text(value: Any, where: str, objects_too: bool = False) -> str:
    """Read a string, or a list of text parts (joined by line breaks as in vLLM), or an object as JSON."""
    if value is None:
        return ""
    if isinstance(value, list) and all(isinstance(p, dict) and isinstance(p.get("text"), str) for p in value):
        value = "\n".join(p["text"] for p in value)
    elif isinstance(value, dict | list) and objects_too:
        value = json.dumps(value, ensure_ascii=False)
    if not isinstance(value, str):
        found = f"{where} must be text, got {_type_name(value)}"
        raise BadRow("not_text", f"{found}; write a string or parts of type text")
    return value


def _read_call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function", call) if isinstance(call, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(function, dict) or not isinstance(name, str) or not name:
        remedy = 'write {"name": …, "arguments": …}'
        raise BadRow("bad_tool_call", f"a tool call in {where} has no name; {remedy}")
    arguments = function.get("arguments", function.get("parameters")) or {}
    arguments = _parse_json(arguments, f"arguments of {name}", "bad_tool_call")
    if not isinstance(arguments, dict):
        found = f"arguments of {name} in {where} must be an object, got {_type_name(arguments)}"
        raise BadRow("bad_tool_call", f"{found}; correct them")
    number = {"id": call["id"]} if isinstance(call.get("id"), str) else {}
    return {**number, "type": "function", "function": {"name": name, "arguments": arguments}}


def _read_tools(row: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    key = _first_key(row, ("tools", "functions"))
    if not key or not row[key]:
        return None
    listed = _parse_json(row[key], key, "bad_tools")
    tools = []
    for tool in listed if isinstance(listed, list) else [listed] if listed else []:
        schema = tool.get("function", tool) if isinstance(tool, dict) else None
        if not isinstance(schema, dict) or not isinstance(schema.get("name"), str):
            found = f"{key} must be JSON schemas with names, got {_type_name(tool)}"
            raise BadRow("bad_tools", f'{found}; write {{"name": …, …}}')
        tools.append({"type": "function", "function": schema})
    return tools or None


def _read_pretokenized(row: Mapping[str, Any]) -> Pretokenized:
    ids = row["input_ids"]
    mask = row.get("loss_mask")
    if not isinstance(ids, list) or not isinstance(mask, list) or not ids or len(ids) != len(mask):
        raise _bad_tokens("input_ids and loss_mask must be lists of one length, at least 1")
    if not all(type(t) is int and t >= 0 for t in ids):
        raise _bad_tokens("input_ids must be token ids from 0")
    if not all(type(m) in (bool, int) and m in (0, 1) for m in mask):
        raise _bad_tokens("loss_mask must be 0 or 1, or false or true")
    return Pretokenized(ids, [bool(m) for m in mask])


def _bad_tokens(rule: str) -> BadRow:
    return BadRow("bad_token_ids", f"{rule}, got something else; correct the row or give messages")


def _parse_json(value: Any, where: str, reason: str = "bad_json") -> Any:
    """Parse a string as JSON; other values are returned as they are."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as e:
        rule = f"{where} is a string that is not JSON ({e})"
        raise BadRow(reason, f"{rule}; write a list or correct the string") from e


def _first_key(row: Mapping[str, Any], keys: tuple[str, ...]) -> str | None:
    return next((k for k in keys if row.get(k) is not None), None)


def _type_name(value: Any) -> str:
    return "null" if value is None else type(value).__name__
