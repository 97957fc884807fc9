"""The results of a conversation's tool calls, by call: what a tool answers when the target calls it again.

Calls are equal if name and arguments are, whatever the order of keys, the type of a number (2 and 2.0) or
white space at the ends of texts. Results belong to calls by `tool_call_id`, or in order. One tool turn may
hold the results of several parallel calls as a JSON list.
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import takewhile
from typing import Any

from eagle3.data.conversations import Message


class Recorded:
    """Results by call, and how often each was asked for."""

    def __init__(self, results: Mapping[str, Sequence[str]]) -> None:
        self.results = {key: list(found) for key, found in results.items()}
        self.num_asked: dict[str, int] = {}

    @classmethod
    def from_messages(cls, messages: Sequence[Message]) -> "Recorded":
        """Collect the results of a conversation's calls; unpaired calls and results are left out."""
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
        """The inverse of `to_json`, but that nothing has been asked for."""
        return cls(json.loads(text))

    def to_json(self) -> str:
        """The results as a JSON object: the same text for the same results in the same order."""
        return json.dumps(self.results, ensure_ascii=False, sort_keys=True)

    def replay(self, call: Mapping[str, Any]) -> str | None:
        """The next result of a call of tool_calls, later the last one again; None if never recorded."""
        key = key_of(call)
        if key not in self.results:
            return None
        asked = self.num_asked.get(key, 0)
        self.num_asked[key] = asked + 1
        return self.results[key][min(asked, len(self.results[key]) - 1)]


def key_of(call: Mapping[str, Any]) -> str:
    """Equal for calls that ask the same."""
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
    """Calls with their results: by id first, the rest in order."""
    if len(turns) == 1 and len(calls) > 1:
        parts = _list_parts(turns[0].get("content", ""))
        if parts is not None and len(parts) == len(calls):
            yield from zip(calls, parts, strict=True)
            return
    # Ids that two calls share are ignored; a turn without a known id answers the next call, as where ids were
    # removed.
    ids = [call.get("id") for call in calls]
    index_of = {number: i for i, number in enumerate(ids) if number and ids.count(number) == 1}
    matched = [index_of.pop(turn.get("tool_call_id"), None) for turn in turns]
    left = iter([i for i in range(len(calls)) if i not in matched])
    for turn, index in zip(turns, matched, strict=True):
        found = next(left, None) if index is None else index
        if found is not None:
            yield calls[found], turn.get("content", "")


def _list_parts(content: str) -> list[str] | None:
    """The parts of a JSON list, each as text."""
    try:
        value = json.loads(content)
    except (ValueError, RecursionError):
        return None
    if not isinstance(value, list):
        return None
    return [v if isinstance(v, str) else json.dumps(v, ensure_ascii=False) for v in value]
