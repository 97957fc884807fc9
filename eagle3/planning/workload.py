"""The workload of a run, rows and tokens, from the surveys of its sources."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

from eagle3.config.run import RunSettings

# Expected length of the target's answers, as a share of max_new_tokens. Not measured.
ANSWER_SHARE = 0.5


@dataclass(frozen=True)
class SourceSurvey:
    """Kept rows of one source, their tokens and their supervised tokens.

    basis: "counted", "estimated", or "at_least" if the number of rows is unknown. answers: those that the
    target has to write; a row that waits for them ends before its first answer. tool_tasks: rows that wait
    and have tools. dropped_share: share of the rows read.
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
    """Rows and tokens of a run, as expected and at most.

    waiting_rows: rows that the target has to answer; prompt_tokens: their tokens; new_tokens: the answers'.
    tokens and supervised include answers at expected length, max_tokens and max_supervised at full length.
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

    `surveys` holds that of the prompts, if there are any, then those of data.sources.
    """
    weights = [source.weight for source in cfg.data.sources]
    weights = [0.0] * (len(surveys) - len(weights)) + weights
    sources = list(zip(surveys, _taken_shares(surveys, weights), strict=True))
    rows = [round(s.rows * share) for s, share in sources]
    tasks = [round(s.tool_tasks * share) for s, share in sources]
    chats = [n - t for n, t in zip(rows, tasks, strict=True)]
    # Tool tasks have their own shards. Without weights each source has its own, too.
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
    """Share of each source's rows to take: all, or by weight until the first source is exhausted."""
    if not any(weights):
        return [1.0] * len(surveys)
    mixed = min(s.rows / weight for s, weight in zip(surveys, weights, strict=True))
    return [mixed * weight / s.rows if s.rows else 0.0 for s, weight in zip(surveys, weights, strict=True)]
