"""The regenerate stage: prompts get the target's own answers, token for token as the engine wrote them."""

import logging
from collections.abc import Sequence
from typing import Protocol

from eagle3.shards import TokenRow

# The first token of an answer comes from the target's own prefill and is never drafted, so shorter answers train nothing.
MIN_ANSWER_TOKENS = 2

logger = logging.getLogger(__name__)


class WrittenAnswer(Protocol):
    """What is needed of an engine's answer: its tokens, the end of turn included when it ended by itself."""

    @property
    def token_ids(self) -> list[int]: ...


def waiting_rows(rows: Sequence[TokenRow]) -> list[TokenRow]:
    """The prompts among the rows: those without a supervised token. The others keep the answers that they came with."""
    return [row for row in rows if not any(row.loss_mask)]


def attach_answers(rows: Sequence[TokenRow], answers: Sequence[WrittenAnswer]) -> list[TokenRow]:
    """Append each answer to its prompt and supervise the answer.

    Args:
        rows: prompts, all-False masks, and rows that have answers already.
        answers: one for each of `waiting_rows`, in order.

    Returns:
        the rows in order, without those whose answer has less than MIN_ANSWER_TOKENS tokens; the caller counts what is missing.

    Raises:
        ValueError: if prompts and answers do not pair up.
    """
    num_waiting = len(waiting_rows(rows))
    if num_waiting != len(answers):
        raise ValueError(
            f"every prompt needs one answer, got {len(answers)} answers for {num_waiting} prompts; ask the engine again"
        )
    left = iter(answers)
    answered = []
    for row in rows:
        if any(row.loss_mask):
            answered.append(row)
            continue
        new_ids = list(next(left).token_ids)
        if len(new_ids) >= MIN_ANSWER_TOKENS:
            mask = row.loss_mask + [True] * len(new_ids)
            answered.append(TokenRow(row.sample_id, row.source, row.token_ids + new_ids, mask))
    if len(answered) < len(rows):
        dropped = len(rows) - len(answered)
        logger.warning("%d of %d answers are shorter than %d tokens: dropped", dropped, num_waiting, MIN_ANSWER_TOKENS)
    return answered
