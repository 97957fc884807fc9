"""Check the tool calls that a parser found: a known name, JSON, required arguments, types."""

import json
import re
from typing import Any, NamedTuple

from eagle3.data.conversations import BadRow

# A float counts as an integer only if it is whole.
JSON_TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "number": (int, float),
    "integer": (int, float),
    "boolean": (bool,),
    "array": (list,),
    "object": (dict,),
    "null": (type(None),),
}


class BadCall(BadRow):
    """A tool call that cannot be carried out.

    reason: bad_form, bad_json, no_arguments, unknown_tool, missing_argument or wrong_type.
    """


class FoundCall(NamedTuple):
    """A tool call in an answer. arguments: the text of a JSON value."""

    name: str
    arguments: str
    id: str | None = None


class Parsed(NamedTuple):
    """The parts of an answer. opens_call: it has words that open a call, even if no call could be read."""

    thoughts: str
    content: str
    calls: list[FoundCall]
    opens_call: bool = False


def opens_bare_call(content: str, tools: list[dict[str, Any]]) -> bool:
    """Whether a text begins like a call without opening words: JSON or Python that names a tool."""
    names = "|".join(re.escape(tool["function"]["name"]) for tool in tools)
    return re.match(rf'\s*(\[?\s*\{{\s*"name"\s*:\s*"|\[\s*)({names})\b', content) is not None


def checked_call(call: FoundCall, tools: list[dict[str, Any]], text: str) -> dict[str, Any]:
    """The call as a message has it, if it fits its tool's schema at the first level.

    Args:
        call: as a parser found it.
        tools: of the conversation.
        text: the answer. An id that is not in it was made up by the parser and is left out.
    """
    functions = {tool["function"]["name"]: tool["function"] for tool in tools}
    if call.name not in functions:
        raise BadCall("unknown_tool", f"a call must name one of {', '.join(functions)}, got {call.name!r}")
    try:
        arguments = json.loads(call.arguments)
    except (ValueError, RecursionError) as e:
        got = call.arguments[:60]
        raise BadCall("bad_json", f"arguments of {call.name} must be JSON ({e}), got {got!r}") from e
    schema = functions[call.name].get("parameters")
    _check_arguments(call.name, arguments, schema if isinstance(schema, dict) else {})
    message_call = {"type": "function", "function": {"name": call.name, "arguments": arguments}}
    return {"id": call.id, **message_call} if call.id and call.id in text else message_call


def _check_arguments(name: str, arguments: Any, schema: dict[str, Any]) -> None:
    if not isinstance(arguments, dict):
        got = type(arguments).__name__
        raise BadCall("no_arguments", f"arguments of {name} must be an object, got {got}")
    for key in schema.get("required") or []:
        if key not in arguments:
            given = ", ".join(arguments) or "none"
            raise BadCall("missing_argument", f"{name} needs the argument {key}, got {given}")
    properties = schema.get("properties") or {}
    for key, value in arguments.items():
        wanted = properties.get(key, {}).get("type")
        if not _has_type(value, wanted if isinstance(wanted, list) else [wanted]):
            got = json.dumps(value)[:40]
            raise BadCall("wrong_type", f"{key} of {name} must be {wanted}, got {got}")


def _has_type(value: Any, names: list[Any]) -> bool:
    if not all(isinstance(name, str) and name in JSON_TYPES for name in names):
        return True  # no type, or none of JSON Schema's
    if isinstance(value, bool):
        return "boolean" in names
    if isinstance(value, float) and not value.is_integer():
        return "number" in names
    return any(isinstance(value, JSON_TYPES[name]) for name in names)
