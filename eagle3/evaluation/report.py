"""The page that a run leaves behind: figures, curves, stages, sample rows with their loss mask, and how to serve the draft.

One HTML file without scripts or outside references, readable in light and dark; everything that comes from data is escaped.
"""

from collections.abc import Iterable
from html import escape
from typing import Any

from eagle3.evaluation.charts import Point, bar_chart, line_chart

MAX_SAMPLES = 8
MAX_SAMPLE_CHARS = 6000  # of one sample; with MAX_SAMPLES it bounds the page, escapes included, below 1 MB

STYLE = """
.e3{--paper:#fff;--ink:#1c2330;--soft:#5d6778;--line:#dfe4ec;--card:#f6f8fb;--on:#cfe8d5;--good:#1a7f3c;--bad:#b3261e;
 color-scheme:light dark;background:var(--paper);color:var(--ink);font:15px/1.5 system-ui,sans-serif;margin:0 auto;
 max-width:1180px;padding:24px}
@media (prefers-color-scheme:dark){html{background:#12161d}.e3{--paper:#12161d;--ink:#e4e9f2;--soft:#9aa6b8;--line:#2c3542;
 --card:#1a202a;--on:#1f5133;--good:#5ccf82;--bad:#ff8a80}}
.e3 h1{font-size:24px;margin:0 0 2px}.e3 h2{font-size:17px;margin:34px 0 10px}.e3 .soft,.e3 .none{color:var(--soft)}
.e3 p{margin:4px 0}.e3 code,.e3 pre{font:13px/1.5 ui-monospace,monospace}
.e3 pre{background:var(--card);border:1px solid var(--line);border-radius:8px;padding:12px;white-space:pre-wrap;
 overflow-wrap:anywhere;margin:8px 0}
.e3 .tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(170px,1fr));gap:12px;margin-top:18px}
.e3 .tile{background:var(--card);border:1px solid var(--line);border-radius:10px;padding:12px 14px}
.e3 .tile b{display:block;font-size:24px;line-height:1.3}.e3 .tile span{color:var(--soft);font-size:13px}
.e3 .charts{display:grid;grid-template-columns:repeat(auto-fit,minmax(380px,1fr));gap:16px}
.e3 figure{margin:0;border:1px solid var(--line);border-radius:10px;padding:12px}
.e3 figcaption{font-weight:600;display:flex;flex-wrap:wrap;justify-content:space-between;gap:4px 16px}
.e3 .legend{font-weight:400;font-size:13px;color:var(--soft)}.e3 .legend span{margin-left:12px;white-space:nowrap}
.e3 .legend i{display:inline-block;width:10px;height:10px;border-radius:2px;margin-right:5px}
.e3 svg{width:100%;height:auto;display:block;margin-top:6px}.e3 svg text{fill:var(--soft);font-size:11.5px}
.e3 svg .grid{stroke:var(--line)}
.e3 .scroll{overflow-x:auto}.e3 table{border-collapse:collapse;min-width:420px}
.e3 th,.e3 td{padding:6px 18px 6px 0;text-align:left;border-bottom:1px solid var(--line)}
.e3 th{color:var(--soft);font-weight:500}.e3 .n{text-align:right;font-variant-numeric:tabular-nums}
.e3 .good{color:var(--good)}.e3 .bad{color:var(--bad)}
.e3 mark{background:var(--on);color:inherit;border-radius:3px}.e3 details{margin:8px 0}.e3 summary{cursor:pointer}
"""


def render_html(summary: dict[str, Any], training_metrics: list[dict[str, Any]], samples: list[dict[str, Any]]) -> str:
    """Render the page.

    Args:
        summary: acceptance_length, acceptance_by_position, trainer_acceptance_length, outputs_identical (bool), tokens_per_s
            {with_draft, without_draft}; where known also run_name, target_dir, export_dir, trainer_acceptance_by_position,
            differing_prompts (ids), num_speculative_tokens, max_new_tokens, dtype, concurrency, prompts {train, heldout},
            stages [{name, seconds, runs, cached}], serve {title: command}.
        training_metrics: one dict an optimizer step: step, loss_by_step and accuracy_by_step (one figure a TTT step), now and
            then validation_acceptance_length.
        samples: sample_id, spans [[text, supervised], …] in order; where known source.

    Returns:
        A whole HTML document, below 1 MB.
    """
    title = f"EAGLE-3 draft {summary.get('run_name', '')}".strip()
    sections = [
        _header(title, summary),
        _section("Training and acceptance", _charts(summary, training_metrics)),
        _section("Speed", _speed(summary)),
        _section("Stages", _stages(summary.get("stages", []))),
        _section("Sample rows", _samples(samples)),
        _section("Serve it", "".join(_command(k, v) for k, v in summary.get("serve", {}).items())),
    ]
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head><body style='margin:0'><main class=\"e3\">"
        f"{''.join(sections)}</main></body></html>"
    )


def _section(title: str, content: str) -> str:
    return f"<section><h2>{escape(title)}</h2>{content}</section>" if content else ""


def _header(title: str, summary: dict[str, Any]) -> str:
    speed, prompts = summary["tokens_per_s"], summary.get("prompts")
    ratio = speed["with_draft"] / speed["without_draft"] if speed["without_draft"] else 0.0
    same = summary["outputs_identical"]
    differing = len(summary.get("differing_prompts", []))
    tiles = [
        (f"{summary['acceptance_length']:.3f}", "acceptance length, by the engine", ""),
        (f"{summary['trainer_acceptance_length']:.3f}", "acceptance length, by the trainer", ""),
        (f"{ratio:.2f}×", "tokens/s with the draft against without", "good" if ratio > 1 else ""),
        ("yes" if same else "no", "same text with and without" + f": {differing} differ" * (not same), "good" if same else "bad"),
    ]
    if isinstance(prompts, dict):
        tiles.append((f"{prompts['train']:,} + {prompts['heldout']:,}", "prompts: training + held out", ""))
    boxes = "".join(f'<div class="tile"><b class="{c}">{escape(v)}</b><span>{escape(text)}</span></div>' for v, text, c in tiles)
    places = "".join(
        f"<p class='soft'>{label} <code>{escape(str(summary[key]))}</code></p>"
        for key, label in (("target_dir", "Target"), ("export_dir", "Draft"))
        if summary.get(key)
    )
    return f'<header><h1>{escape(title)}</h1>{places}<div class="tiles">{boxes}</div></header>'


def _charts(summary: dict[str, Any], metrics: list[dict[str, Any]]) -> str:
    validation = [(float(m["step"]), float(m[key])) for m in metrics if m.get(key := "validation_acceptance_length") is not None]
    charts = [
        line_chart("Loss by TTT step", _by_step(metrics, "loss_by_step"), "optimizer step"),
        line_chart("Accuracy by TTT step", _by_step(metrics, "accuracy_by_step"), "optimizer step"),
        line_chart("Acceptance length on validation rows", {"validation": validation}, "optimizer step"),
        _positions(summary),
    ]
    return f'<div class="charts">{"".join(charts)}</div>'


def _by_step(metrics: list[dict[str, Any]], key: str) -> dict[str, list[Point]]:
    curves: dict[str, list[Point]] = {}
    for line in metrics:
        for i, value in enumerate(line.get(key) or []):
            curves.setdefault(f"step {i}", []).append((float(line["step"]), float(value)))
    return curves


def _positions(summary: dict[str, Any]) -> str:
    series = {"engine": summary["acceptance_by_position"]}
    if summary.get("trainer_acceptance_by_position"):
        series["trainer"] = summary["trainer_acceptance_by_position"]
    groups = [f"guess {i + 1}" for i in range(len(series["engine"]))]
    return bar_chart("Acceptance by position: share of rounds", groups, series)


def _speed(summary: dict[str, Any]) -> str:
    speed = summary["tokens_per_s"]
    rows = [("without draft", f"{speed['without_draft']:,.1f}"), ("with draft", f"{speed['with_draft']:,.1f}")]
    texts = {
        "num_speculative_tokens": "{} guesses a round",
        "max_new_tokens": "answers up to {} tokens",
        "dtype": "{}",
        "concurrency": "sequences in flight: {}",
    }
    settings = ", ".join(["greedy", *(text.format(summary[key]) for key, text in texts.items() if key in summary)])
    return _table(("", "tokens/s"), rows) + f"<p class='soft'>{escape(settings)}</p>"


def _stages(stages: list[dict[str, Any]]) -> str:
    rows = []
    for stage in stages:
        done = [f"{word} {stage[key]}" for key, word in (("runs", "made"), ("cached", "cached")) if stage.get(key)]
        rows.append((stage["name"], f"{stage['seconds']:,.1f}", ", ".join(done) or "skipped"))
    return _table(("stage", "seconds", "made or cached"), rows) if rows else ""


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    """Second column right-aligned: it holds the numbers."""

    def line(cells: tuple[str, ...], tag: str) -> str:
        marks = ["", ' class="n"', ""]
        return "<tr>" + "".join(f"<{tag}{m}>{escape(c)}</{tag}>" for c, m in zip(cells, marks, strict=False)) + "</tr>"

    return f'<div class="scroll"><table>{line(head, "th")}{"".join(line(row, "td") for row in rows)}</table></div>'


def _samples(samples: list[dict[str, Any]]) -> str:
    if not samples:
        return ""
    rows = [_sample(sample, is_open=i == 0) for i, sample in enumerate(samples[:MAX_SAMPLES])]
    return f"<p class='soft'><mark>Marked</mark> text is supervised: the target wrote it.</p>{''.join(rows)}"


def _sample(sample: dict[str, Any], is_open: bool) -> str:
    left, parts = MAX_SAMPLE_CHARS, []
    for text, supervised in sample["spans"]:
        shown = escape(text[:left])
        parts.append(f"<mark>{shown}</mark>" if supervised else shown)
        left -= len(text)
        if left < 0:
            parts.append(f" … {-left + sum(len(t) for t, _ in sample['spans'][len(parts) :]):,} more characters")
            break
    name = " ".join(str(sample[key]) for key in ("source", "sample_id") if sample.get(key))
    return f"<details{' open' * is_open}><summary><code>{escape(name)}</code></summary><pre>{''.join(parts)}</pre></details>"


def _command(title: str, command: str) -> str:
    return f"<p class='soft'>{escape(title)}</p><pre>{escape(command)}</pre>"
