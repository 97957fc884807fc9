"""Answers behind their prompts."""

from types import SimpleNamespace

import pytest

from eagle3.data.regenerate import attach_answers
from eagle3.shards import TokenRow


def prompt(sample_id: str, ids: list[int]) -> TokenRow:
    return TokenRow(sample_id, "train", ids, [False] * len(ids))


def answer(*ids: int, finish_reason: str = "stop") -> SimpleNamespace:
    return SimpleNamespace(token_ids=list(ids), finish_reason=finish_reason)


def test_the_answer_and_nothing_else_is_supervised() -> None:
    rows = attach_answers([prompt("a", [5, 6, 7]), prompt("b", [5])], [answer(8, 2), answer(8, 9, 8, finish_reason="length")])
    assert rows == [
        TokenRow("a", "train", [5, 6, 7, 8, 2], [False, False, False, True, True]),
        TokenRow("b", "train", [5, 8, 9, 8], [False, True, True, True]),
    ]


def test_answers_shorter_than_two_tokens_are_left_out_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    rows = [prompt("a", [5]), prompt("b", [6]), prompt("c", [7])]
    assert [r.sample_id for r in attach_answers(rows, [answer(), answer(2), answer(8, 2)])] == ["c"]
    assert "2 of 3 answers are shorter than 2 tokens" in caplog.text


def test_the_prompts_stay_as_they_are() -> None:
    row = prompt("a", [5, 6])
    attach_answers([row], [answer(8, 2)])
    assert row == prompt("a", [5, 6])


def test_a_missing_answer_is_an_error() -> None:
    with pytest.raises(ValueError, match="got 1 answers for 2 prompts; ask the engine again"):
        attach_answers([prompt("a", [5]), prompt("b", [5])], [answer(8, 2)])


def test_rows_that_came_with_an_answer_keep_it_and_their_place() -> None:
    done = TokenRow("b", "other", [5, 6, 7], [False, True, True])
    rows = [prompt("a", [5]), done, prompt("c", [6]), prompt("d", [7])]
    answered = attach_answers(rows, [answer(8, 2), answer(2), answer(9, 2)])
    assert [(r.sample_id, r.token_ids) for r in answered] == [("a", [5, 8, 2]), ("b", [5, 6, 7]), ("d", [7, 9, 2])]
    assert answered[1] is done
