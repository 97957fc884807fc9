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


def attach_answers(rows: Sequence[TokenRow], answers: Sequence[WrittenAnswer]) -> list[TokenRow]:
    """Append each answer to its prompt and supervise the answer.

    Args:
        rows: prompts, all-False masks.
        answers: one for each row, in order.

    Returns:
        the rows with answers of at least MIN_ANSWER_TOKENS tokens, in order; the caller counts those that are missing.

    Raises:
        ValueError: if rows and answers do not pair up, or a row already has supervised tokens; names the row.
    """
    if len(rows) != len(answers):
        raise ValueError(
            f"every prompt needs one answer, got {len(answers)} answers for {len(rows)} prompts; ask the engine again"
        )
    answered = []
    for row, answer in zip(rows, answers, strict=True):
        if any(row.loss_mask):
            raise ValueError(f"row {row.sample_id} already holds an answer; prepare the shard with regenerate.enabled = true")
        num_new = len(answer.token_ids)
        if num_new >= MIN_ANSWER_TOKENS:
            mask = row.loss_mask + [True] * num_new
            answered.append(TokenRow(row.sample_id, row.source, row.token_ids + list(answer.token_ids), mask))
    if len(answered) < len(rows):
        dropped = len(rows) - len(answered)
        logger.warning("%d of %d answers are shorter than %d tokens: dropped", dropped, len(rows), MIN_ANSWER_TOKENS)
    return answered
