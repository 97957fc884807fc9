"""Rows and tokens of a run, put together from what a survey found of each source."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

from eagle3.config.run import RunSettings

# The length of an answer that the target will write is unknown; this share of its limit is expected.
ANSWER_SHARE = 0.5


@dataclass(frozen=True)
class SourceSurvey:
    """What one source contributes: kept rows, their tokens and supervised tokens.

    basis: how it is known: counted, estimated, or at_least where the number of rows is unknown. answers: to
    be written by the target, 0 where rows keep their own; such a row ends before its first answer.
    tool_tasks: rows that need an answer and offer tools. dropped_share: of the rows that were read.
    """

    name: str
    basis: str
    rows: int
    tokens: int
    supervised: int
    answers: int
    tool_tasks: int
    dropped_share: float


@dataclass(frozen=True)
class Workload:
    """Rows and tokens of a run: expected ones, and the most there can be.

    prompt_tokens: read before the answers that the target will write; 0 without regeneration. tokens,
    supervised: of the finished rows. max_tokens, max_supervised: the same with every answer at its longest.
    """

    rows: int
    shards: int
    waiting_rows: int
    prompt_tokens: int
    new_tokens: int
    tokens: int
    supervised: int
    max_tokens: int
    max_supervised: int


def workload(cfg: RunSettings, surveys: Sequence[SourceSurvey]) -> Workload:
    """Mix the sources as prepare does, and add the answers that the target will write.

    Args:
        surveys: of the prompts, if there are any, then of data.sources.
    """
    weights = [source.weight for source in cfg.data.sources]
    weights = [0.0] * (len(surveys) - len(weights)) + weights
    sources = list(zip(surveys, _taken_shares(surveys, weights), strict=True))
    rows = [round(s.rows * share) for s, share in sources]
    tasks = [round(s.tool_tasks * share) for s, share in sources]
    chats = [n - t for n, t in zip(rows, tasks, strict=True)]
    # Tool tasks fill shards of their own; without weights every source does, too.
    groups = [sum(chats), sum(tasks)] if any(weights) else chats + tasks
    tokens = round(sum(s.tokens * share for s, share in sources))
    supervised = round(sum(s.supervised * share for s, share in sources))
    longest = round(sum(s.answers * share * cfg.regenerate.sampling(s.name)[2] for s, share in sources))
    expected = round(longest * ANSWER_SHARE)
    return Workload(
        rows=sum(rows),
        shards=sum(ceil(n / cfg.data.rows_per_shard) for n in groups),
        waiting_rows=sum(n for n, s in zip(rows, surveys, strict=True) if s.answers),
        prompt_tokens=round(sum(s.tokens * share for s, share in sources if s.answers)),
        new_tokens=expected,
        tokens=tokens + expected,
        supervised=supervised + expected,
        max_tokens=min(tokens + longest, sum(rows) * cfg.engine.max_model_len),
        max_supervised=supervised + longest,
    )


def _taken_shares(surveys: Sequence[SourceSurvey], weights: Sequence[float]) -> list[float]:
    """Share of each source's rows that is taken: all, or by weight until the first source is used up."""
    if not any(weights):
        return [1.0] * len(surveys)
    mixed = min(s.rows / weight for s, weight in zip(surveys, weights, strict=True))
    return [mixed * weight / s.rows if s.rows else 0.0 for s, weight in zip(surveys, weights, strict=True)]
