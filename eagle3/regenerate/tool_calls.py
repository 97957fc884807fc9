"""Tool calls that a parser found, checked against the tools: known name, JSON, required arguments, types."""

import json
import math
import re
from typing import Any, NamedTuple

from eagle3.data.conversations import BadRow

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

    id: str
    name: str
    arguments: str


class Parsed(NamedTuple):
    """The parts of an answer. opens_call: it has words that open a call, whether or not one could be read."""

    thoughts: str
    content: str
    calls: list[FoundCall]
    opens_call: bool = False


def opens_bare_call(content: str, tools: list[dict[str, Any]]) -> bool:
    """Whether a text begins as a call without opening words does: a JSON object or Python call that names a tool."""
    names = "|".join(re.escape(tool["function"]["name"]) for tool in tools)
    return re.match(rf'\s*(\[?\s*\{{\s*"name"\s*:\s*"|\[\s*)({names})\b', content) is not None


def checked_call(call: FoundCall, tools: list[dict[str, Any]], text: str) -> dict[str, Any]:
    """The call as a message has it, if it fits its tool's schema: required arguments, and types of the first level.

    Args:
        call: as a parser found it.
        tools: of the conversation.
        text: the answer. An id that is not in it was made up by the parser and is left out.
    """
    arguments = _read_arguments(call)
    functions = {tool["function"]["name"]: tool["function"] for tool in tools}
    if call.name not in functions:
        known = ", ".join(functions)
        raise BadCall(
            "unknown_tool", f"a call must name one of {known}, got {call.name}; nothing can be replayed"
        )
    schema = functions[call.name].get("parameters")
    _check_arguments(call.name, arguments, schema if isinstance(schema, dict) else {})
    message_call = {"type": "function", "function": {"name": call.name, "arguments": arguments}}
    return {"id": call.id, **message_call} if call.id and call.id in text else message_call


def _read_arguments(call: FoundCall) -> Any:
    try:
        value = DECODER.decode(call.arguments)
        json.dumps([call.name, value], ensure_ascii=False).encode()
    except (ValueError, RecursionError) as e:
        got = call.arguments[:60]
        raise BadCall("bad_json", f"arguments of {call.name} must be JSON ({e}), got {got!r}") from e
    return value


def _finite(number: str) -> float:
    if math.isfinite(value := float(number)):
        return value
    raise ValueError(f"{number} is no number in JSON")


DECODER = json.JSONDecoder(parse_constant=_finite, parse_float=_finite)


def _check_arguments(name: str, arguments: Any, schema: dict[str, Any]) -> None:
    if not isinstance(arguments, dict):
        raise BadCall(
            "no_arguments", f"arguments of {name} must be an object, got {type(arguments).__name__}"
        )
    required, properties = schema.get("required"), schema.get("properties")
    for key in required if isinstance(required, list) else []:
        if key not in arguments:
            given = ", ".join(arguments) or "none"
            raise BadCall("missing_argument", f"{name} needs the argument {key}, got {given}")
    for key, value in arguments.items():
        described = properties.get(key) if isinstance(properties, dict) else None
        if isinstance(described, dict) and not _has_type(value, described.get("type")):
            got = json.dumps(value)[:40]
            raise BadCall("wrong_type", f"{key} of {name} must be {described['type']}, got {got}")


def _has_type(value: Any, wanted: Any) -> bool:
    names = [wanted] if isinstance(wanted, str) else wanted if isinstance(wanted, list) else []
    if not names or any(name not in JSON_TYPES for name in names):
        return True  # no type, or none of JSON Schema's
    for name in names:
        right = isinstance(value, JSON_TYPES[name]) and (name == "boolean" or not isinstance(value, bool))
        if right and (name != "integer" or value == int(value)):
            return True
    return False
