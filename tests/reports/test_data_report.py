"""The data page before and after the target has answered, and the outcomes of its answers."""

from typing import Any

import pytest

from eagle3.reports.data import answer_statistics, is_limit_low, render_report
from tests.helpers.pages import Page

OUTCOMES = {
    "conversations": 40,
    "requested": 50,
    "answered": 40,
    "failed": 7,
    "failed: too_short": 4,
    "failed: no_room": 3,
}
OUTCOMES |= {"skipped": 3, "tool_calls": 6, "at_length_limit": 10}


def source(**changes: Any) -> dict[str, Any]:
    statistics: dict[str, Any] = dict.fromkeys(("rows_read", "conversations", "rows_kept"), 4)
    statistics |= {
        "dropped": {},
        "examples": {},
        "truncated": 0,
        "tokens": 400,
        "supervised_tokens": 0,
        "with_tool_calls": 1,
    }
    return statistics | {"formats": {"prompt": 4}, "lengths": [[128, 4]], "turns": [[1, 3], [2, 1]]} | changes


def prepared(**sources: dict[str, Any]) -> dict[str, Any]:
    report = {
        "rows_read": 8,
        "rows_kept": 8,
        "dropped": {},
        "truncated": 0,
        "tokens": 800,
        "supervised_tokens": 0,
    }
    heldout = source(rows_read=2, conversations=2, rows_kept=2, with_tool_calls=0)
    return report | {
        "sources": sources,
        "prompts": {"train": 8, "heldout": 2},
        "heldout": heldout,
        "samples": [],
    }


def answered(**changes: Any) -> dict[str, Any]:
    rows = {"chats": {"rows": 5, "tokens": 1000, "supervised_tokens": 250, "lengths": [[256, 5]]}}
    vocab = {
        "size": 6,
        "coverage": 0.9,
        "by_source": {"chats": [225, 250]},
        "by_size": [[1, 0.5], [2, 0.7], [4, 0.8], [7, 1.0]],
    }
    report = prepared(chats=source(), lost=source())
    samples = [{"sample_id": "o:c", "source": "chats", "spans": [["Hi", False], ["<b>", True]]}]
    return (
        report
        | {"rows": rows, "vocab": vocab, "samples": samples, "answers": answer_statistics(OUTCOMES)}
        | changes
    )


def test_sources_are_shown_by_their_answered_rows_and_by_what_prepare_read() -> None:
    html = render_report(answered(answers={}))
    page = Page(html)
    chats, coverage = (row for row in page.rows if row[0] == "chats")
    assert chats[:7] == ["chats", "4", "4", "5", "1,000", "250", "25.0%"]
    assert coverage == ["chats", "250", "225", "90.00%"]
    # Nothing of this source is left, since the target answered none of it.
    assert page.row("lost")[1:7] == ["4", "4", "0", "0", "0", "0.0%"]
    assert page.row("held out")[1:6] == ["2", "2", "2", "400", "0"]
    assert "<mark>&lt;b&gt;</mark>" in html
    assert "has not answered yet" not in page.text
    assert "when the target" not in page.text


def test_lengths_are_those_of_the_answered_rows() -> None:
    assert "≤ 256" in render_report(answered())
    assert "≤ 128" not in render_report(answered())
    assert "≤ 128" in render_report(prepared(chats=source()))


def test_coverage_is_a_curve_with_the_chosen_size_marked() -> None:
    page = Page(render_report(answered()))
    assert "6: 90.00% size of the draft vocabulary" in page.text
    assert "90.00% of the supervised tokens are in the draft vocabulary" in page.text


def test_the_coverage_of_rows_without_answers_is_unknown() -> None:
    waiting, kept = source(), source(supervised_tokens=100)
    text = "the coverage is known when the target has answered"
    assert f"chats: {text}" in render_report(prepared(chats=waiting, own=kept))
    assert text not in render_report(prepared(own=kept))
    page = Page(render_report(prepared(own=kept) | {"vocab_note": "<other>"}))
    assert "<other>" in page.text
    assert "inside the draft vocabulary" not in page.text


def test_outcomes_add_up() -> None:
    answers = answer_statistics(OUTCOMES)
    assert answers["requested"] == answers["answered"] + answers["failed"] + answers["skipped"]
    assert answers["failed"] == sum(answers["failed_by_reason"].values())
    assert answers["failed_by_reason"] == {"no_room": 3, "too_short": 4}
    assert answers["share_at_length_limit"] == 0.2
    assert answer_statistics({}) == {}


def test_outcomes_are_on_the_page() -> None:
    page = Page(render_report(answered()))
    assert page.row("requested")[1:] == ["50", "100.0%"]
    assert page.row("failed: too_short")[1:] == ["4", "8.0%"]
    assert page.row("skipped")[1:] == ["3", "6.0%"]
    assert "Answers of the target" not in render_report(answered(answers={}))


@pytest.mark.parametrize(("at_limit", "is_low"), [(0, False), (10, False), (11, True)])
def test_more_than_a_fifth_at_the_length_limit_is_a_warning(at_limit: int, is_low: bool) -> None:
    answers = answer_statistics(OUTCOMES | {"at_length_limit": at_limit})
    assert is_limit_low(answers) == is_low
    assert ("raise regenerate.max_new_tokens" in render_report(answered(answers=answers))) == is_low
    assert not is_limit_low({})
