"""The data page: what it shows before and after the target has answered, and the accounts of its answers."""

import re
from typing import Any

import pytest

from eagle3.reports.data import answer_figures, is_limit_low, render_report

ACCOUNTS = {
    "conversations": 40,
    "requested": 50,
    "answered": 40,
    "failed": 7,
    "failed: too_short": 4,
    "failed: no_room": 3,
}
ACCOUNTS |= {"skipped": 3, "tool_calls": 6, "at_length_limit": 10}


def source(**changes: Any) -> dict[str, Any]:
    figures: dict[str, Any] = dict.fromkeys(("rows_read", "conversations", "rows_kept"), 4)
    figures |= {
        "dropped": {},
        "examples": {},
        "truncated": 0,
        "tokens": 400,
        "supervised_tokens": 0,
        "with_tool_calls": 1,
    }
    return figures | {"formats": {"prompt": 4}, "lengths": [[128, 4]], "turns": [[1, 3], [2, 1]]} | changes


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
        | {"rows": rows, "vocab": vocab, "samples": samples, "answers": answer_figures(ACCOUNTS)}
        | changes
    )


def cells(page: str, first: str) -> list[str]:
    """The cells of the table line that begins so."""
    (line,) = re.findall(rf"<tr><td>{first}</td>(.*?)</tr>", page)
    return re.findall(r"<td[^>]*>(.*?)</td>", line)


def test_sources_are_shown_by_their_answered_rows_and_by_what_prepare_read() -> None:
    page = render_report(answered(answers={}))
    lines = re.findall(r"<tr><td>chats</td>.*?</tr>", page)
    assert re.findall(r"<td[^>]*>(.*?)</td>", lines[0])[:7] == [
        "chats",
        "4",
        "4",
        "5",
        "1,000",
        "250",
        "25.0%",
    ]
    assert re.findall(r"<td[^>]*>(.*?)</td>", lines[1]) == ["chats", "250", "225", "90.00%"]
    # Nothing of this source is left, since the target answered none of it.
    assert cells(page, "lost")[:6] == ["4", "4", "0", "0", "0", "0.0%"]
    assert cells(page, "held out")[:5] == ["2", "2", "2", "400", "0"]
    assert "<mark>&lt;b&gt;</mark>" in page
    assert "still to come" not in page
    assert "known when the target" not in page


def test_lengths_are_those_of_the_answered_rows() -> None:
    assert "≤ 256" in render_report(answered())
    assert "≤ 128" not in render_report(answered())
    assert "≤ 128" in render_report(prepared(chats=source()))


def test_coverage_is_a_curve_with_the_chosen_size_marked() -> None:
    page = render_report(answered())
    assert page.count("<polyline") == 1
    assert page.count('class="mark"') == 1
    assert "6: 90.00%" in page
    assert '<b class="">90.00%</b>' in page


def test_of_rows_that_wait_the_page_says_that_coverage_is_still_unknown() -> None:
    waiting, kept = source(), source(supervised_tokens=100)
    assert "chats: what is covered is known when the target has answered" in render_report(
        prepared(chats=waiting, own=kept)
    )
    assert "what is covered" not in render_report(prepared(own=kept))
    page = render_report(prepared(own=kept) | {"vocab_note": "<other>"})
    assert "&lt;other&gt;" in page
    assert "<polyline" not in page


def test_accounts_add_up() -> None:
    figures = answer_figures(ACCOUNTS)
    assert figures["requested"] == figures["answered"] + figures["failed"] + figures["skipped"]
    assert figures["failed"] == sum(figures["failed_by_reason"].values())
    assert figures["failed_by_reason"] == {"no_room": 3, "too_short": 4}
    assert figures["share_at_length_limit"] == 0.2
    assert answer_figures({}) == {}


def test_accounts_stand_on_the_page() -> None:
    page = render_report(answered())
    assert cells(page, "requested") == ["50", "100.0%"]
    assert cells(page, "failed: too_short") == ["4", "8.0%"]
    assert cells(page, "skipped") == ["3", "6.0%"]
    assert "Answers of the target" not in render_report(answered(answers={}))


@pytest.mark.parametrize(("at_limit", "is_low"), [(0, False), (10, False), (11, True)])
def test_more_than_a_fifth_at_the_length_limit_is_a_warning(at_limit: int, is_low: bool) -> None:
    figures = answer_figures(ACCOUNTS | {"at_length_limit": at_limit})
    assert is_limit_low(figures) == is_low
    page = render_report(answered(answers=figures))
    assert ('<b class="bad">' in page) == is_low
    assert ("raise regenerate.max_new_tokens" in page) == is_low
    assert not is_limit_low({})
