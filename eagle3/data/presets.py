"""Well-known data sets: their hub paths, and functions that map their rows to known formats.

A function gets one row as `datasets` yields it; a missing column raises KeyError, which the caller counts.
"""

import ast
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from itertools import dropwhile
from typing import Any

from eagle3.data.files import Row


@dataclass(frozen=True)
class Preset:
    """path: "" if the source must name it. map_row: maps a row to {conversations} or {messages, tools}."""

    path: str
    map_row: Callable[[Row], Row]


def _sharegpt(row: Row) -> Row:
    # The data set cuts long chats into pieces, so some pieces begin with an answer.
    turns = dropwhile(lambda turn: turn["from"] not in ("human", "user", "system"), row["conversations"])
    return {"conversations": list(turns)}


def _ultrachat(row: Row) -> Row:
    # `prompt` repeats the first message.
    return {"messages": row["messages"]}


def _conversations(row: Row) -> Row:
    return {"conversations": row["conversations"]}


def _toolace(row: Row) -> Row:
    """The system text has the functions as a JSON list; an answer has calls as [Name(key=value), …]."""
    system = row["system"]
    tools: list[Row] = []
    at = system.find('[{"name"')
    if at >= 0:
        tools, _ = json.JSONDecoder().raw_decode(system, at)
        system = ""  # the rest of the text only introduces the list
    messages: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
    for turn in row["conversations"]:
        message = {"role": turn["from"], "content": turn["value"]}
        calls = _parse_calls(turn["value"]) if turn["from"] == "assistant" else []
        if calls:
            message |= {"content": "", "tool_calls": calls}
        messages.append(message)
    return {"messages": messages, "tools": tools}


CALL_NAME = re.compile(r"(?:^\[|\)\s*,)\s*([^()\[\]{}'\"=,]+)\(")


def _parse_calls(text: str) -> list[dict[str, Any]]:
    """Read [Name(key=value), …] as {name, arguments}; [] for other text. Names may have spaces and dots."""
    names: list[str] = []

    def rename(match: re.Match[str]) -> str:
        names.append(match[1].strip())
        return match[0].replace(match[1], "call")

    try:
        tree = ast.parse(CALL_NAME.sub(rename, text.strip()), mode="eval").body
        calls = tree.elts if isinstance(tree, ast.List) else []
        read = [_read_arguments(call) for call in calls]
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return []
    if len(names) != len(read):
        return []
    return [{"name": name, "arguments": found} for name, found in zip(names, read, strict=True)]


def _read_arguments(call: ast.expr) -> dict[str, Any]:
    if not isinstance(call, ast.Call) or call.args:
        raise ValueError("not a call with named arguments")
    return {argument.arg or "": ast.literal_eval(argument.value) for argument in call.keywords}


# Type names of Python, Java and JavaScript. Other names, such as `any`, are dropped.
JSON_TYPE_OF = {
    **dict.fromkeys(("object", "dict", "hashmap"), "object"),
    **dict.fromkeys(("array", "list", "tuple", "arraylist"), "array"),
    **dict.fromkeys(("number", "float", "double"), "number"),
    **dict.fromkeys(("integer", "int", "long", "short", "byte"), "integer"),
    **dict.fromkeys(("string", "str", "char"), "string"),
    **dict.fromkeys(("boolean", "bool"), "boolean"),
}


def _bfcl(row: Row) -> Row:
    """`question` is a list of turns, each a list of messages; there are no answers and no tool results."""
    tools = [{**function, "parameters": _json_schema(function["parameters"])} for function in row["function"]]
    return {"messages": [message for turn in row["question"] for message in turn], "tools": tools}


def _json_schema(schema: Row) -> Row:
    """Rename the types of a schema as JSON Schema names them; a property may be called `type`."""
    mapped = {key: value for key, value in schema.items() if key != "type"}
    kind = JSON_TYPE_OF.get(str(schema.get("type")).lower())
    if kind:
        mapped = {"type": kind, **mapped}
    for key in ("items", "additionalProperties"):
        if isinstance(mapped.get(key), dict):
            mapped[key] = _json_schema(mapped[key])
    if isinstance(mapped.get("properties"), dict):
        parts = mapped["properties"].items()
        mapped["properties"] = {
            name: _json_schema(part) if isinstance(part, dict) else part for name, part in parts
        }
    return mapped


PRESETS = {
    "sharegpt": Preset("Aeala/ShareGPT_Vicuna_unfiltered:train", _sharegpt),
    "ultrachat": Preset("HuggingFaceH4/ultrachat_200k:train_sft", _ultrachat),
    "magpie": Preset("Magpie-Align/Magpie-Llama-3.1-Pro-300K-Filtered:train", _conversations),
    "open_perfectblend": Preset("mlabonne/open-perfectblend:train", _conversations),
    "toolace": Preset("Team-ACE/ToolACE:train", _toolace),
    "bfcl": Preset("", _bfcl),
}
