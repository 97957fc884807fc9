"""Where an answer ends; the measurement as a whole is run in tests/workflows and tests/engine."""

import pytest

from eagle3.evaluation.benchmark import answer_length


@pytest.mark.parametrize(
    ("token_ids", "length"),
    [([5, 6, 2, 7, 8], 3), ([2, 5, 6, 7, 8], 1), ([5, 6, 7, 8, 2], 4), ([5, 6, 7, 9, 2], 4), ([5, 6, 7, 3, 2], 4)],
)
def test_an_answer_ends_at_its_first_end_token_or_the_limit(token_ids: list[int], length: int) -> None:
    assert answer_length(token_ids, [2, 3], 4) == length
