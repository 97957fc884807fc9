"""Counts over the rows of one source: what was read, kept, cut and dropped."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from eagle3.data.encode import Outcome
from eagle3.shards.tokens import TokenRow

NUM_EXAMPLES = 3  # shown of each reason for which rows are dropped


MAX_MESSAGE_CHARS = 300


@dataclass
class SourceTally:
    """Counts over one source's rows, in source order up to the last one that was asked for."""

    read: int = 0
    taken: int = 0
    kept: int = 0
    truncated: int = 0
    tokens: int = 0
    supervised_tokens: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    examples: dict[str, list[dict[str, str]]] = field(default_factory=dict)
    with_tool_calls: int = 0
    formats: Counter[str] = field(default_factory=Counter)
    lengths: Counter[int] = field(default_factory=Counter)
    turns: Counter[int] = field(default_factory=Counter)

    def drop(self, where: str, reason: str, message: str) -> None:
        """Count a source row that is not used."""
        self.dropped[reason] += 1
        examples = self.examples.setdefault(reason, [])
        if len(examples) < NUM_EXAMPLES:
            examples.append({"row": where, "message": message[:MAX_MESSAGE_CHARS]})

    def keep(self, outcome: Outcome) -> None:
        """Count a source row that is used."""
        self.taken += 1
        self.truncated += outcome.is_cut
        self.turns[outcome.turns] += 1
        self.formats[outcome.format] += 1
        self.with_tool_calls += outcome.has_tool_calls

    def keep_row(self, row: TokenRow) -> None:
        """Count one of its token rows."""
        self.kept += 1
        self.tokens += len(row.token_ids)
        self.supervised_tokens += sum(row.loss_mask)
        self.lengths[length_bin(len(row.token_ids))] += 1

    def first_example(self) -> str:
        """The first dropped row of the commonest reason, as the end of an error message; empty where none was dropped."""
        if not self.dropped:
            return ""
        example = self.examples[self.dropped.most_common(1)[0][0]][0]
        return f". First: {example['row']}: {example['message']}"

    def figures(self) -> dict[str, Any]:
        """JSON-ready. conversations: source rows used. rows_kept: their token rows. turns: [[user turns, conversations], …].

        lengths: [[tokens at most, token rows], …], ascending. examples: {reason: [{row, message}, …]} of dropped rows.
        """
        return {
            "rows_read": self.read,
            "conversations": self.taken,
            "rows_kept": self.kept,
            "dropped": dict(self.dropped),
            "examples": self.examples,
            "truncated": self.truncated,
            "tokens": self.tokens,
            "supervised_tokens": self.supervised_tokens,
            "with_tool_calls": self.with_tool_calls,
            "formats": dict(self.formats),
            "lengths": sorted([size, rows] for size, rows in self.lengths.items()),
            "turns": sorted([turns, rows] for turns, rows in self.turns.items()),
        }


def total_figures(tallies: list[SourceTally]) -> dict[str, Any]:
    """The sums over all sources: rows_read, rows_kept, dropped, truncated, tokens, supervised_tokens."""
    names = ("rows_kept", "truncated", "tokens", "supervised_tokens")
    figures = [tally.figures() for tally in tallies]
    dropped = sum((tally.dropped for tally in tallies), Counter[str]())
    return {"rows_read": sum(t.read for t in tallies), "dropped": dict(dropped)} | {
        n: sum(f[n] for f in figures) for n in names
    }


def length_bin(num_tokens: int) -> int:
    """The upper bound of a row's bin in the length histogram: a power of two, at least 32 tokens."""
    return max(32, 1 << (num_tokens - 1).bit_length())
