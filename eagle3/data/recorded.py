"""Recorded tool results by call, replayed when the target makes the same call.

Calls are equal if their names and arguments are equal, up to the order of keys, 2 or 2.0, and white space at
the ends of strings. Results are matched to calls by `tool_call_id`, or in order. One tool turn may hold the
results of parallel calls as a JSON list.
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import takewhile
from typing import Any

from eagle3.data.conversations import Message


class Recorded:
    """Results by call. `replay` takes them out in order; the last one of a call stays."""

    def __init__(self, results: Mapping[str, Sequence[str]]) -> None:
        self.results = {key: list(found) for key, found in results.items()}

    @classmethod
    def from_messages(cls, messages: Sequence[Message]) -> "Recorded":
        """Collect the results of a conversation's calls; skip calls and results without a match."""
        results: dict[str, list[str]] = {}
        for i, message in enumerate(messages):
            if "tool_calls" not in message:
                continue
            turns = list(takewhile(lambda m: m["role"] == "tool", messages[i + 1 :]))
            for call, content in _pairs(message["tool_calls"], turns):
                results.setdefault(key_of(call), []).append(content)
        return cls(results)

    @classmethod
    def from_json(cls, text: str) -> "Recorded":
        return cls(json.loads(text))

    def to_json(self) -> str:
        """Equal results in the same order give the same text."""
        return json.dumps(self.results, ensure_ascii=False, sort_keys=True)

    def replay(self, call: Mapping[str, Any]) -> str | None:
        """The next result of the call, then the last one again; None if the call was not recorded."""
        found = self.results.get(key_of(call))
        if not found:
            return None
        return found.pop(0) if len(found) > 1 else found[0]


def key_of(call: Mapping[str, Any]) -> str:
    """A key that equal calls share."""
    function = call["function"]
    return json.dumps([function["name"].strip(), _normal(function["arguments"])], sort_keys=True)


def _normal(value: Any) -> Any:
    if isinstance(value, str):
        return value.strip()
    if isinstance(value, float) and math.isfinite(value) and value == int(value):
        return int(value)
    if isinstance(value, list | tuple):
        return [_normal(v) for v in value]
    if isinstance(value, dict):
        return {str(k): _normal(v) for k, v in value.items()}
    return value


def _pairs(
    calls: Sequence[Mapping[str, Any]], turns: Sequence[Message]
) -> Iterator[tuple[Mapping[str, Any], str]]:
    """Match calls with their results: by id first, then in order."""
    if len(turns) == 1 and len(calls) > 1:
        parts = _list_parts(turns[0].get("content", ""))
        if parts is not None and len(parts) == len(calls):
            yield from zip(calls, parts, strict=True)
            return
    # An id that two calls share is ignored. A turn without a known id answers the next call without a result.
    ids = [call.get("id") for call in calls]
    index_of = {number: i for i, number in enumerate(ids) if number and ids.count(number) == 1}
    matched = [index_of.pop(turn.get("tool_call_id"), None) for turn in turns]
    left = iter([i for i in range(len(calls)) if i not in matched])
    for turn, index in zip(turns, matched, strict=True):
        found = next(left, None) if index is None else index
        if found is not None:
            yield calls[found], turn.get("content", "")


def _list_parts(content: str) -> list[str] | None:
    """The parts of a JSON list as strings; None if the text is no JSON list."""
    try:
        value = json.loads(content)
    except (ValueError, RecursionError):
        return None
    if not isinstance(value, list):
        return None
    return [v if isinstance(v, str) else json.dumps(v, ensure_ascii=False) for v in value]
