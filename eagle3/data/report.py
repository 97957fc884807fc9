"""The data report: what became of every source's rows, as plain figures and as a page."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from eagle3.data.encode import Outcome
from eagle3.page.charts import bar_chart
from eagle3.page.parts import document, samples_list, section, table, tiles_row
from eagle3.shards import TokenRow

NUM_EXAMPLES = 3  # shown of each reason for which rows are dropped
MAX_MESSAGE_CHARS = 300
MAX_CHART_SOURCES = 6
MAX_TURNS = 8  # of a bar; the last one takes all longer conversations


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


def length_bin(num_tokens: int) -> int:
    """The upper bound of a row's bin in the length histogram: a power of two, at least 32 tokens."""
    return max(32, 1 << (num_tokens - 1).bit_length())


def total_figures(tallies: list[SourceTally]) -> dict[str, Any]:
    """The sums over all sources: rows_read, rows_kept, dropped, truncated, tokens, supervised_tokens."""
    names = ("rows_kept", "truncated", "tokens", "supervised_tokens")
    figures = [tally.figures() for tally in tallies]
    dropped = sum((tally.dropped for tally in tallies), Counter[str]())
    return {"rows_read": sum(t.read for t in tallies), "dropped": dict(dropped)} | {n: sum(f[n] for f in figures) for n in names}


def render_report(report: dict[str, Any]) -> str:
    """The report of `prepare_shards` as an HTML document."""
    sources: dict[str, dict[str, Any]] = report["sources"]
    every = sources | {"held out": report["heldout"]}
    sections = [
        f"<header><h1>Data</h1>{_tiles(report)}</header>",
        section("Sources", table(SOURCE_HEAD, [_source_line(*item) for item in every.items()], numbers=(1, 2, 3, 4, 5, 6, 7))),
        section("Dropped rows", _dropped(every)),
        section("Lengths and turns", _charts(sources)),
        section("Sample rows", samples_list(report["samples"])),
    ]
    return document("Data report", "".join(sections))


SOURCE_HEAD = ("source", "read", "used", "token rows", "tokens", "supervised", "cut", "with tool calls", "formats")


def _source_line(name: str, figures: dict[str, Any]) -> tuple[str, ...]:
    share = figures["supervised_tokens"] / figures["tokens"] if figures["tokens"] else 0.0
    calls = figures["with_tool_calls"] / figures["conversations"] if figures["conversations"] else 0.0
    counts = [f"{figures[key]:,}" for key in ("rows_read", "conversations", "rows_kept", "tokens")]
    formats = ", ".join(f"{form} {rows:,}" for form, rows in figures["formats"].items())
    return (name, *counts, f"{share:.1%}", f"{figures['truncated']:,}", f"{calls:.1%}", formats)


def _tiles(report: dict[str, Any]) -> str:
    num_dropped = sum(report["dropped"].values())
    share = num_dropped / report["rows_read"] if report["rows_read"] else 0.0
    return tiles_row(
        [
            (f"{report['rows_kept']:,}", "token rows to train on", ""),
            (f"{report['tokens']:,}", "tokens", ""),
            (f"{report['supervised_tokens']:,}", "of them supervised; 0 where answers are still to come", ""),
            (f"{share:.1%}", f"rows dropped: {num_dropped:,} of {report['rows_read']:,}", "bad" if share > 0.1 else ""),
            (f"{report['prompts']['heldout']:,}", "held-out prompts", ""),
        ]
    )


def _dropped(every: dict[str, dict[str, Any]]) -> str:
    lines = []
    for name, figures in every.items():
        for reason, rows in figures["dropped"].items():
            first = figures["examples"][reason][0]
            lines.append((name, f"{rows:,}", reason, f"{first['row']}: {first['message']}"))
    if not lines:
        return "<p class='soft'>none</p>"
    return table(("source", "rows", "reason", "first of them"), lines)


def _charts(sources: dict[str, dict[str, Any]]) -> str:
    shown = dict(list(sources.items())[:MAX_CHART_SOURCES])
    more = f"<p class='soft'>the first {MAX_CHART_SOURCES} of {len(sources)} sources</p>" if len(sources) > len(shown) else ""
    lengths = {name: Counter(dict(figures["lengths"])) for name, figures in shown.items()}
    turns: dict[str, Counter[int]] = {}
    for name, figures in shown.items():
        turns[name] = Counter()
        for number, rows in figures["turns"]:
            turns[name][min(number, MAX_TURNS)] += rows
    charts = [
        _histogram("Tokens of a row: share of rows", lengths, "≤ {}"),
        _histogram(f"User turns: share of conversations ({MAX_TURNS}: or more)", turns, "{}"),
    ]
    return f'{more}<div class="charts">{"".join(charts)}</div>'


def _histogram(title: str, counts: dict[str, Counter[int]], label: str) -> str:
    bins = sorted(set().union(*counts.values()))
    shares = {name: [c[b] / max(1, c.total()) for b in bins] for name, c in counts.items()}
    return bar_chart(title, [label.format(b) for b in bins], shares)
