"""Count the rows of one source: read, kept, cut and dropped."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from eagle3.data.encode import Outcome
from eagle3.shards.tokens import TokenRow

MAX_EXAMPLES = 3  # for each reason
MAX_MESSAGE_CHARS = 300


@dataclass
class RowCounts:
    """Counts over token rows. lengths: rows by the upper bound of their bin, a power of two from 32."""

    rows: int = 0
    tokens: int = 0
    supervised_tokens: int = 0
    lengths: Counter[int] = field(default_factory=Counter)

    def add(self, row: TokenRow) -> None:
        num_tokens = len(row.token_ids)
        self.rows += 1
        self.tokens += num_tokens
        self.supervised_tokens += sum(row.loss_mask)
        self.lengths[max(32, 1 << (num_tokens - 1).bit_length())] += 1

    def token_statistics(self) -> dict[str, Any]:
        """JSON-ready: tokens, supervised_tokens, lengths [[tokens at most, rows], …] ascending."""
        lengths = sorted([size, rows] for size, rows in self.lengths.items())
        return {"tokens": self.tokens, "supervised_tokens": self.supervised_tokens, "lengths": lengths}


@dataclass
class SourceTally:
    """Counts over the rows of one source that were read so far. kept: counts of their token rows."""

    num_read: int = 0
    num_used: int = 0
    num_cut: int = 0
    with_tool_calls: int = 0
    kept: RowCounts = field(default_factory=RowCounts)
    dropped: Counter[str] = field(default_factory=Counter)
    examples: dict[str, list[dict[str, str]]] = field(default_factory=dict)
    formats: Counter[str] = field(default_factory=Counter)
    turns: Counter[int] = field(default_factory=Counter)

    def drop(self, where: str, reason: str, message: str) -> None:
        self.dropped[reason] += 1
        examples = self.examples.setdefault(reason, [])
        if len(examples) < MAX_EXAMPLES:
            examples.append({"row": where, "message": message[:MAX_MESSAGE_CHARS]})

    def use(self, outcome: Outcome) -> None:
        """Count a source row that is used. The caller adds its token rows to `kept`."""
        self.num_used += 1
        self.num_cut += outcome.is_cut
        self.turns[outcome.turns] += 1
        self.formats[outcome.format] += 1
        self.with_tool_calls += outcome.has_tool_calls

    def first_example(self) -> str:
        """For an error message: the first row dropped for the most common reason; "" if there is none."""
        if not self.dropped:
            return ""
        example = self.examples[self.dropped.most_common(1)[0][0]][0]
        return f". First: {example['row']}: {example['message']}"

    def statistics(self) -> dict[str, Any]:
        """JSON-ready: conversations are the source rows used, rows_kept their token rows."""
        return self.kept.token_statistics() | {
            "rows_read": self.num_read,
            "conversations": self.num_used,
            "rows_kept": self.kept.rows,
            "dropped": dict(self.dropped),
            "examples": self.examples,
            "truncated": self.num_cut,
            "with_tool_calls": self.with_tool_calls,
            "formats": dict(self.formats),
            "turns": sorted([turns, rows] for turns, rows in self.turns.items()),
        }


def total_statistics(tallies: list[SourceTally]) -> dict[str, Any]:
    """The sums over all sources: rows_read, rows_kept, dropped, truncated, tokens, supervised_tokens."""
    return {
        "rows_read": sum(t.num_read for t in tallies),
        "rows_kept": sum(t.kept.rows for t in tallies),
        "dropped": dict(sum((t.dropped for t in tallies), Counter[str]())),
        "truncated": sum(t.num_cut for t in tallies),
        "tokens": sum(t.kept.tokens for t in tallies),
        "supervised_tokens": sum(t.kept.supervised_tokens for t in tallies),
    }
