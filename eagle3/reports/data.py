"""The data report: what became of every source's rows, and of the target's answers, as plain figures and as a page."""

import math
from collections import Counter
from html import escape
from typing import Any

from eagle3.data.tally import SourceTally
from eagle3.regenerate.generator import WARN_AT_LIMIT
from eagle3.reports.charts import bar_chart, line_chart
from eagle3.reports.parts import document, samples_list, section, table, tiles_row

MAX_CHART_SOURCES = 6
MAX_TURNS = 8  # of a bar; the last one takes all longer conversations


def answer_figures(accounts: dict[str, int]) -> dict[str, Any]:
    """What became of the user turns that the target was asked to answer.

    Args:
        accounts: of all shards (eagle3/regenerate/generator.py); empty where the rows' own answers were kept.

    Returns:
        JSON-ready: conversations; user turns requested = answered + failed + skipped (behind one that failed); failed_by_reason;
        answers at_length_limit and their share_at_length_limit of the user turns; tool_calls. Empty where nothing was asked.
    """
    if not accounts.get("requested"):
        return {}
    names = ("conversations", "requested", "answered", "failed", "skipped", "at_length_limit", "tool_calls")
    figures: dict[str, Any] = {name: accounts.get(name, 0) for name in names}
    failed = {
        name.removeprefix("failed: "): number
        for name, number in accounts.items()
        if name.startswith("failed: ")
    }
    figures["failed_by_reason"] = dict(sorted(failed.items()))
    return figures | {"share_at_length_limit": figures["at_length_limit"] / figures["requested"]}


def is_limit_low(answers: dict[str, Any]) -> bool:
    """Whether so many answers end at the length limit that the draft would learn that nothing ends. answers: answer_figures."""
    return bool(answers) and answers["share_at_length_limit"] > WARN_AT_LIMIT


def render_report(report: dict[str, Any]) -> str:
    """A run's data as an HTML document.

    Args:
        report: as prepare makes it (eagle3/data/prepare.py); where known also rows {source: figures of the rows trained on} and
            vocab (both eagle3/data/describe.py), vocab_note and answers (answer_figures). Samples are those rows' then.
    """
    rows = rows_by_source(report)
    # Shards that existed before the run have rows, but nothing is known of what they were made of.
    unknown = SourceTally().statistics()
    sources: dict[str, dict[str, Any]] = {name: report["sources"].get(name, unknown) for name in rows}
    every = sources | ({"held out": report["heldout"]} if report["heldout"] else {})
    lines = [_source_line(name, figures, rows.get(name) or figures) for name, figures in every.items()]
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


def rows_by_source(report: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Figures of the token rows of each source as they stand last: answered where the target has answered them."""
    if "rows" in report:
        nothing = {"rows": 0, "tokens": 0, "supervised_tokens": 0, "lengths": []}
        return {name: report["rows"].get(name, nothing) for name in report["sources"] | report["rows"]}
    return {name: figures | {"rows": figures["rows_kept"]} for name, figures in report["sources"].items()}


def _source_line(name: str, figures: dict[str, Any], rows: dict[str, Any]) -> tuple[str, ...]:
    share = rows["supervised_tokens"] / rows["tokens"] if rows["tokens"] else 0.0
    calls = figures["with_tool_calls"] / figures["conversations"] if figures["conversations"] else 0.0
    counts = [figures["rows_read"], figures["conversations"], rows.get("rows", figures["rows_kept"])]
    counts += [rows["tokens"], rows["supervised_tokens"]]
    formats = ", ".join(f"{form} {number:,}" for form, number in figures["formats"].items())
    return (
        name,
        *(f"{n:,}" for n in counts),
        f"{share:.1%}",
        f"{figures['truncated']:,}",
        f"{calls:.1%}",
        formats,
    )


def _tiles(report: dict[str, Any], rows: dict[str, dict[str, Any]]) -> str:
    num_dropped = sum(report["dropped"].values())
    share = num_dropped / report["rows_read"] if report["rows_read"] else 0.0
    num_rows, tokens, supervised = (
        sum(f[key] for f in rows.values()) for key in ("rows", "tokens", "supervised_tokens")
    )
    to_come = "" if "rows" in report else "; 0 where answers are still to come"
    tiles = [
        (f"{num_rows:,}", "token rows to train on", ""),
        (f"{tokens:,}", "tokens", ""),
        (f"{supervised:,}", f"of them supervised{to_come}", ""),
        (
            f"{share:.1%}",
            f"rows dropped: {num_dropped:,} of {report['rows_read']:,}",
            "bad" if share > 0.1 else "",
        ),
        (f"{report['prompts']['heldout']:,}", "held-out prompts", ""),
    ]
    if "vocab" in report:
        tiles.append(
            (f"{report['vocab']['coverage']:.2%}", "of the supervised tokens are in the draft vocabulary", "")
        )
    return tiles_row(tiles)


def _answers(answers: dict[str, Any]) -> str:
    if not answers:
        return ""
    without, low = answers["failed"] + answers["skipped"], is_limit_low(answers)
    at_limit = (
        f"ended at the length limit: {answers['at_length_limit']:,}"
        + "; raise regenerate.max_new_tokens" * low
    )
    tiles = tiles_row(
        [
            (f"{answers['answered']:,}", f"of {answers['requested']:,} user turns answered", ""),
            (
                f"{without:,}",
                "failed, or skipped behind one that failed",
                "bad" if without > answers["answered"] else "",
            ),
            (f"{answers['share_at_length_limit']:.1%}", at_limit, "bad" if low else ""),
            (f"{answers['tool_calls']:,}", "tool calls", ""),
            (f"{answers['conversations']:,}", "conversations", ""),
        ]
    )
    reasons = {f"failed: {reason}": number for reason, number in answers["failed_by_reason"].items()}
    counts = {
        "requested": answers["requested"],
        "answered": answers["answered"],
        **reasons,
        "skipped": answers["skipped"],
    }
    lines = [(name, f"{number:,}", f"{number / answers['requested']:.1%}") for name, number in counts.items()]
    return tiles + table(("user turns", "number", "share"), lines, numbers=(1, 2))


def _vocabulary(report: dict[str, Any]) -> str:
    notes = [report["vocab_note"]] if report.get("vocab_note") else []
    waiting = [
        name
        for name, figures in report["sources"].items()
        if figures["rows_kept"] and not figures["supervised_tokens"]
    ]
    if waiting and "rows" not in report:
        notes.append(f"{', '.join(waiting)}: what is covered is known when the target has answered.")
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
    for name, figures in every.items():
        for reason, rows in figures["dropped"].items():
            first = figures["examples"][reason][0]
            lines.append((name, f"{rows:,}", reason, f"{first['row']}: {first['message']}"))
    if not lines:
        return "<p class='soft'>none</p>"
    return table(("source", "rows", "reason", "first of them"), lines)


def _charts(sources: dict[str, dict[str, Any]], rows: dict[str, dict[str, Any]]) -> str:
    shown = dict(list(sources.items())[:MAX_CHART_SOURCES])
    more = (
        f"<p class='soft'>the first {MAX_CHART_SOURCES} of {len(sources)} sources</p>"
        if len(sources) > len(shown)
        else ""
    )
    lengths = {name: Counter(dict(rows[name]["lengths"])) for name in shown}
    turns: dict[str, Counter[int]] = {}
    for name, figures in shown.items():
        turns[name] = Counter()
        for number, conversations in figures["turns"]:
            turns[name][min(number, MAX_TURNS)] += conversations
    charts = [
        _histogram("Tokens of a row: share of rows", lengths, "≤ {}"),
        _histogram(f"User turns: share of conversations ({MAX_TURNS}: or more)", turns, "{}"),
    ]
    return f'{more}<div class="charts">{"".join(charts)}</div>'


def _histogram(title: str, counts: dict[str, Counter[int]], label: str) -> str:
    bins = sorted(set().union(*counts.values()))
    shares = {name: [c[b] / max(1, c.total()) for b in bins] for name, c in counts.items()}
    return bar_chart(title, [label.format(b) for b in bins], shares)
