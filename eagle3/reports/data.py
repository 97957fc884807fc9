"""The data report: statistics of every source and of the target's answers, as an HTML page."""

import math
from collections import Counter
from html import escape
from typing import Any

from eagle3.data.tally import SourceTally
from eagle3.regenerate.generator import WARN_AT_LIMIT
from eagle3.reports.charts import bar_chart, line_chart
from eagle3.reports.parts import document, samples_list, section, table, tiles_row

MAX_CHART_SOURCES = 6
# The last bar counts all longer conversations.
MAX_TURNS = 8
SOURCE_HEAD = (
    "source",
    "read",
    "used",
    "token rows",
    "tokens",
    "supervised",
    "share",
    "cut",
    "with tool calls",
    "formats",
)


def answer_statistics(outcomes: dict[str, int]) -> dict[str, Any]:
    """Statistics of the user turns that the target was asked to answer; empty if there are none.

    Args:
        outcomes: outcome counts of all shards (eagle3/regenerate/generator.py).

    Returns:
        JSON-ready; requested = answered + failed + skipped, where a turn after a failed one is skipped.
        share_at_length_limit is of the requested turns.
    """
    if not outcomes.get("requested"):
        return {}
    names = ("conversations", "requested", "answered", "failed", "skipped", "at_length_limit", "tool_calls")
    statistics: dict[str, Any] = {name: outcomes.get(name, 0) for name in names}
    failed = "failed: "
    reasons = {name.removeprefix(failed): n for name, n in outcomes.items() if name.startswith(failed)}
    statistics["failed_by_reason"] = dict(sorted(reasons.items()))
    statistics["share_at_length_limit"] = statistics["at_length_limit"] / statistics["requested"]
    return statistics


def is_limit_low(answers: dict[str, Any]) -> bool:
    """Whether too many answers are cut at the length limit: the draft would not learn how answers end."""
    return bool(answers) and answers["share_at_length_limit"] > WARN_AT_LIMIT


def render_report(report: dict[str, Any]) -> str:
    """Render the data report of a run.

    Args:
        report: as eagle3/data/prepare.py writes it. It may also have `rows` (source -> statistics of the rows
            to train on), their `samples`, `vocab` (eagle3/data/describe.py), `vocab_note` and `answers`
            (answer_statistics).
    """
    rows = rows_by_source(report)
    # A run that starts from shards has rows, but no statistics of their sources.
    unknown = SourceTally().statistics()
    sources: dict[str, dict[str, Any]] = {name: report["sources"].get(name, unknown) for name in rows}
    every = sources | ({"held out": report["heldout"]} if report["heldout"] else {})
    lines = [_source_line(name, source, rows.get(name) or source) for name, source in every.items()]
    sections = [
        f"<header><h1>Data</h1>{_tiles(report, rows)}</header>",
        section("Sources", table(SOURCE_HEAD, lines, numbers=tuple(range(1, 9)))),
        section("Answers of the target", _answers(report.get("answers", {}))),
        section("Draft vocabulary", _vocabulary(report)),
        section("Dropped rows", _dropped(every)),
        section("Lengths and turns", _charts(sources, rows)),
        section("Sample rows", samples_list(report["samples"])),
    ]
    return document("Data report", "".join(sections))


def rows_by_source(report: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Statistics of each source's token rows, with the target's answers if it has answered."""
    if "rows" in report:
        nothing = {"rows": 0, "tokens": 0, "supervised_tokens": 0, "lengths": []}
        return {name: report["rows"].get(name, nothing) for name in report["sources"] | report["rows"]}
    return {name: source | {"rows": source["rows_kept"]} for name, source in report["sources"].items()}


def _source_line(name: str, source: dict[str, Any], rows: dict[str, Any]) -> tuple[str, ...]:
    share = rows["supervised_tokens"] / rows["tokens"] if rows["tokens"] else 0.0
    calls = source["with_tool_calls"] / source["conversations"] if source["conversations"] else 0.0
    counts = [source["rows_read"], source["conversations"], rows.get("rows", source["rows_kept"])]
    counts += [rows["tokens"], rows["supervised_tokens"]]
    formats = ", ".join(f"{form} {count:,}" for form, count in source["formats"].items())
    cut = f"{source['truncated']:,}"
    return (name, *(f"{n:,}" for n in counts), f"{share:.1%}", cut, f"{calls:.1%}", formats)


def _tiles(report: dict[str, Any], rows: dict[str, dict[str, Any]]) -> str:
    num_dropped = sum(report["dropped"].values())
    share = num_dropped / report["rows_read"] if report["rows_read"] else 0.0
    num_rows = sum(source["rows"] for source in rows.values())
    tokens = sum(source["tokens"] for source in rows.values())
    supervised = sum(source["supervised_tokens"] for source in rows.values())
    waiting = "" if "rows" in report else "; 0 where the target has not answered yet"
    dropped = f"rows dropped: {num_dropped:,} of {report['rows_read']:,}"
    tiles = [
        (f"{num_rows:,}", "token rows to train on", ""),
        (f"{tokens:,}", "tokens", ""),
        (f"{supervised:,}", f"of them supervised{waiting}", ""),
        (f"{share:.1%}", dropped, "bad" if share > 0.1 else ""),
        (f"{report['prompts']['heldout']:,}", "held-out prompts", ""),
    ]
    if "vocab" in report:
        coverage = f"{report['vocab']['coverage']:.2%}"
        tiles.append((coverage, "of the supervised tokens are in the draft vocabulary", ""))
    return tiles_row(tiles)


def _answers(answers: dict[str, Any]) -> str:
    if not answers:
        return ""
    requested = answers["requested"]
    without = answers["failed"] + answers["skipped"]
    is_low = is_limit_low(answers)
    remedy = "; raise regenerate.max_new_tokens" if is_low else ""
    at_limit = f"ended at the length limit: {answers['at_length_limit']:,}{remedy}"
    failed_class = "bad" if without > answers["answered"] else ""
    tiles = [
        (f"{answers['answered']:,}", f"of {requested:,} user turns answered", ""),
        (f"{without:,}", "failed, or skipped after a failed one", failed_class),
        (f"{answers['share_at_length_limit']:.1%}", at_limit, "bad" if is_low else ""),
        (f"{answers['tool_calls']:,}", "tool calls", ""),
        (f"{answers['conversations']:,}", "conversations", ""),
    ]
    counts = {"requested": requested, "answered": answers["answered"]}
    counts |= {f"failed: {reason}": count for reason, count in answers["failed_by_reason"].items()}
    counts["skipped"] = answers["skipped"]
    lines = [(name, f"{count:,}", f"{count / requested:.1%}") for name, count in counts.items()]
    return tiles_row(tiles) + table(("user turns", "number", "share"), lines, numbers=(1, 2))


def _vocabulary(report: dict[str, Any]) -> str:
    notes = [report["vocab_note"]] if report.get("vocab_note") else []
    sources = report["sources"].items()
    waiting = [name for name, s in sources if s["rows_kept"] and not s["supervised_tokens"]]
    if waiting and "rows" not in report:
        notes.append(f"{', '.join(waiting)}: the coverage is known when the target has answered.")
    content = "".join(f"<p class='soft'>{escape(note)}</p>" for note in notes)
    if "vocab" not in report:
        return content
    vocab = report["vocab"]
    lines = [
        (name, f"{supervised:,}", f"{inside:,}", f"{inside / supervised:.2%}" if supervised else "")
        for name, (inside, supervised) in vocab["by_source"].items()
    ]
    points = [(math.log2(size), share) for size, share in vocab["by_size"]]
    chart = line_chart(
        "Share of supervised tokens inside the draft vocabulary",
        {"most frequent tokens": points},
        "size of the draft vocabulary",
        ticks=[(float(i), f"{1 << i:,}") for i in range(0, int(points[-1][0]) + 1, 3)],
        marks=[(math.log2(vocab["size"]), f"{vocab['size']:,}: {vocab['coverage']:.2%}")],
    )
    head = ("source", "supervised tokens", "in the draft vocabulary", "share")
    return f'{content}{table(head, lines, numbers=(1, 2, 3))}<div class="charts">{chart}</div>'


def _dropped(every: dict[str, dict[str, Any]]) -> str:
    lines = []
    for name, source in every.items():
        for reason, count in source["dropped"].items():
            first = source["examples"][reason][0]
            lines.append((name, f"{count:,}", reason, f"{first['row']}: {first['message']}"))
    if not lines:
        return "<p class='soft'>none</p>"
    return table(("source", "rows", "reason", "first of them"), lines)


def _charts(sources: dict[str, dict[str, Any]], rows: dict[str, dict[str, Any]]) -> str:
    names = list(sources)[:MAX_CHART_SOURCES]
    is_cut = len(sources) > len(names)
    note = f"<p class='soft'>the first {len(names)} of {len(sources)} sources</p>" if is_cut else ""
    lengths = {name: Counter(dict(rows[name]["lengths"])) for name in names}
    turns: dict[str, Counter[int]] = {name: Counter() for name in names}
    for name in names:
        for number, conversations in sources[name]["turns"]:
            turns[name][min(number, MAX_TURNS)] += conversations
    by_length = _histogram("Tokens of a row: share of rows", lengths, "≤ {}")
    by_turns = _histogram(f"User turns: share of conversations ({MAX_TURNS}: or more)", turns, "{}")
    return f'{note}<div class="charts">{by_length}{by_turns}</div>'


def _histogram(title: str, counts: dict[str, Counter[int]], label: str) -> str:
    bins = sorted(set().union(*counts.values()))
    shares = {name: [c[b] / max(1, c.total()) for b in bins] for name, c in counts.items()}
    return bar_chart(title, [label.format(b) for b in bins], shares)
