"""Calls that are no JSON, or do not fit the schema of their tool, are refused by reason."""

from typing import Any

import pytest

from eagle3.regenerate.tool_calls import BadCall, FoundCall, checked_call, opens_bare_call
from tests.helpers.calls import OSLO, TOOLS, call


@pytest.mark.parametrize(
    ("name", "arguments", "reason"),
    [
        ("weather", '{"city": "Oslo",}', "bad_json"),
        ("weather", '{"city": "Oslo"', "bad_json"),
        ("weather", '{"city": "Oslo"}}', "bad_json"),
        ("weather", '{"a": ' * 100_000, "bad_json"),
        ("weather", "", "bad_json"),
        ("climate", "{}", "unknown_tool"),
        ("", "{}", "unknown_tool"),
        ("get_time", "null", "no_arguments"),
        ("get_time", '"{}"', "no_arguments"),
        ("get_time", "[1]", "no_arguments"),
        ("weather", '{"days": 3}', "missing_argument"),
        ("weather", '{"city": "Oslo", "days": 3.5}', "wrong_type"),
        ("weather", '{"city": "Oslo", "days": true}', "wrong_type"),
        ("weather", '{"city": "Oslo", "days": "3"}', "wrong_type"),
        ("weather", '{"city": "Oslo", "scale": 1}', "wrong_type"),
        ("weather", '{"city": null}', "wrong_type"),
        ("weather", '{"city": NaN}', "wrong_type"),
        ("weather", '{"city": "Oslo", "days": 1e999}', "wrong_type"),
        ("math.sum", '{"start": false}', "wrong_type"),
        ("math.sum", '{"values": {"a": 1}}', "wrong_type"),
        ("math.sum", '{"exact": 1}', "wrong_type"),
    ],
)
def test_a_call_that_cannot_be_carried_out_is_refused_by_reason(
    name: str, arguments: str, reason: str
) -> None:
    with pytest.raises(BadCall, match=r"must|needs") as e:
        checked_call(FoundCall(name, arguments), TOOLS, "")
    assert e.value.reason == reason


@pytest.mark.parametrize(
    ("name", "text", "arguments"),
    [
        ("weather", '{"city": "Oslo", "days": 3, "scale": null}', {"city": "Oslo", "days": 3, "scale": None}),
        ("weather", '{"city": "Oslo", "days": 3.0, "more": [1]}', {"city": "Oslo", "days": 3, "more": [1]}),
        ("math.sum", '{"values": [1], "exact": true}', {"values": [1], "exact": True}),
        ("math.sum", '{"start": 1.5}', {"start": 1.5}),
        ("get_time", "{}", {}),
    ],
)
def test_arguments_of_the_types_of_the_schema_are_kept(
    name: str, text: str, arguments: dict[str, Any]
) -> None:
    assert checked_call(FoundCall(name, text), TOOLS, text) == call(name, **arguments)


def test_only_an_id_that_the_answer_has_is_kept() -> None:
    found = FoundCall("weather", '{"city": "Oslo"}', "functions.weather:0")
    assert checked_call(found, TOOLS, "call functions.weather:0 {}") == {"id": "functions.weather:0", **OSLO}
    assert checked_call(found, TOOLS, "call weather {}") == OSLO


@pytest.mark.parametrize(
    "parameters",
    [None, [], {}, {"properties": None, "required": None}, {"properties": {"a": {"type": "dict"}}}],
)
def test_a_schema_that_says_nothing_checks_nothing(parameters: Any) -> None:
    tools = [
        {"type": "function", "function": {"name": "f", "parameters": parameters}},
        {"type": "function", "function": {"name": "g"}},
    ]
    for name in "fg":
        assert checked_call(FoundCall(name, '{"a": 1}'), tools, "") == call(name, a=1)


@pytest.mark.parametrize(
    ("text", "begun"),
    [
        ('{"name": "weather", "par', True),
        (' [{"name":"math.sum"', True),
        ("[get_time(", True),
        ('{"name": "Bob", "ag', False),
        ('{"name": "weathers"', False),
        ("weather is bad", False),
        ("It rains [1].", False),
    ],
)
def test_a_text_that_begins_with_a_tools_name_in_json_or_python_begins_a_call(text: str, begun: bool) -> None:
    assert opens_bare_call(text, TOOLS) == begun
