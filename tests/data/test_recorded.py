"""Recorded tool results are found by the call that asks for them."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eagle3.data.conversations import Message
from eagle3.data.recorded import Recorded, key_of


def call(name: str, number: str = "", **arguments: Any) -> dict[str, Any]:
    made: dict[str, Any] = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return {"id": number, **made} if number else made


def calling(*calls: dict[str, Any]) -> Message:
    return Message(role="assistant", content="", tool_calls=list(calls))


def result(content: str, number: str = "") -> Message:
    return (
        Message(role="tool", content=content, tool_call_id=number)
        if number
        else Message(role="tool", content=content)
    )


ASKED = Message(role="user", content="Tell me.")
ROME, OSLO = call("weather", city="Rome"), call("weather", city="Oslo")


def test_parallel_results_follow_the_order_of_their_calls() -> None:
    recorded = Recorded.from_messages([ASKED, calling(ROME, OSLO), result("sun"), result("snow")])
    assert [recorded.replay(c) for c in (OSLO, ROME)] == ["snow", "sun"]


def test_ids_outweigh_the_order() -> None:
    rome, oslo = call("weather", "a", city="Rome"), call("weather", "b", city="Oslo")
    recorded = Recorded.from_messages([ASKED, calling(rome, oslo), result("snow", "b"), result("sun", "a")])
    assert [recorded.replay(c) for c in (ROME, OSLO)] == ["sun", "snow"]


def test_a_result_without_a_known_id_goes_to_the_first_call_that_has_none() -> None:
    rome, oslo = call("weather", "a", city="Rome"), call("weather", "b", city="Oslo")
    recorded = Recorded.from_messages([ASKED, calling(rome, oslo), result("snow", "x"), result("sun", "a")])
    assert [recorded.replay(c) for c in (ROME, OSLO)] == ["sun", "snow"]


def test_an_id_that_two_calls_share_says_nothing() -> None:
    rome, oslo = call("weather", "a", city="Rome"), call("weather", "a", city="Oslo")
    recorded = Recorded.from_messages([ASKED, calling(rome, oslo), result("sun", "a"), result("snow", "a")])
    assert [recorded.replay(c) for c in (ROME, OSLO)] == ["sun", "snow"]


def test_one_turn_may_hold_the_results_of_all_parallel_calls() -> None:
    listed = json.dumps([{"name": "weather", "results": {"t": 30}}, "snow"])
    recorded = Recorded.from_messages([ASKED, calling(ROME, OSLO), result(listed)])
    assert recorded.replay(ROME) == '{"name": "weather", "results": {"t": 30}}'
    assert recorded.replay(OSLO) == "snow"


@pytest.mark.parametrize("content", ["[1, 2, 3]", '{"a": 1}', "[1, 2", "sun", "[" * 100_000])
def test_one_turn_that_is_no_list_of_all_results_belongs_to_the_first_call(content: str) -> None:
    recorded = Recorded.from_messages([ASKED, calling(ROME, OSLO), result(content)])
    assert recorded.replay(ROME) == content
    assert recorded.replay(OSLO) is None


def test_a_list_that_answers_one_call_stays_whole() -> None:
    assert Recorded.from_messages([ASKED, calling(ROME), result('["sun"]')]).replay(ROME) == '["sun"]'


def test_the_same_call_gets_its_results_in_order_and_then_the_last_again() -> None:
    turns = [ASKED, calling(ROME), result("sun"), ASKED, calling(ROME, ROME), result("rain"), result("snow")]
    recorded = Recorded.from_messages(turns)
    assert [recorded.replay(ROME) for _ in range(5)] == ["sun", "rain", "snow", "snow", "snow"]


def test_a_call_that_was_never_recorded_has_no_result() -> None:
    turns = [
        result("before any call"),
        ASKED,
        calling(ROME, OSLO),
        result("sun"),
        ASKED,
        result("after a user's turn"),
    ]
    recorded = Recorded.from_messages(turns)
    assert recorded.results == {key_of(ROME): ["sun"]}
    for other in (OSLO, call("climate", city="Rome"), call("weather"), call("weather", city="Rome", days=1)):
        assert recorded.replay(other) is None


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ({"a": 1, "b": {"c": 1, "d": 2}}, {"b": {"d": 2, "c": 1}, "a": 1}, True),
        ({"a": 2}, {"a": 2.0}, True),
        ({"a": [0, -3]}, {"a": [-0.0, -3.0]}, True),
        ({"a": " Rome\n"}, {"a": "Rome"}, True),
        ({"a": ["Rome "]}, {"a": ["Rome"]}, True),
        ({"a": 2}, {"a": 2.5}, False),
        ({"a": 1}, {"a": True}, False),
        ({"a": 1}, {"a": "1"}, False),
        ({"a": [1, 2]}, {"a": [2, 1]}, False),
        ({"a": "San Marino"}, {"a": "SanMarino"}, False),
        ({"a": None}, {}, False),
    ],
)
def test_arguments_that_mean_the_same_ask_the_same(
    one: dict[str, Any], other: dict[str, Any], same: bool
) -> None:
    assert (key_of(call("f", **one)) == key_of(call("f", **other))) == same


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(codec="utf-8")),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(st.characters(codec="utf-8")), inner, max_size=3)
    ),
    max_leaves=6,
)
NAMES = st.sampled_from(["f", "g"])


@given(
    st.lists(
        st.tuples(
            NAMES,
            st.dictionaries(st.sampled_from("ab"), VALUES, max_size=2),
            st.text(st.characters(codec="utf-8")),
        )
    )
)
def test_what_was_recorded_survives_json_and_every_call_finds_its_results(
    calls: list[tuple[str, dict[str, Any], str]],
) -> None:
    turns = [
        turn
        for name, arguments, content in calls
        for turn in (calling(call(name, **arguments)), result(content))
    ]
    recorded = Recorded.from_messages([ASKED, *turns])
    again = Recorded.from_json(recorded.to_json())
    assert again.results == recorded.results
    assert again.to_json() == recorded.to_json()
    expected: dict[str, list[str]] = {}
    for name, arguments, content in calls:
        expected.setdefault(key_of(call(name, **arguments)), []).append(content)
    assert recorded.results == expected
    for name, arguments, _ in calls:
        written = json.loads(json.dumps(call(name, **arguments)))
        assert again.replay(written) == recorded.replay(call(name, **arguments)) is not None
