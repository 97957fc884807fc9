"""HTML of live Decks: curves of a training run, progress of engine jobs."""

from dataclasses import replace
from html import escape
from itertools import pairwise
from typing import Any

from eagle3.engine.progress import Progress, duration_text
from eagle3.reports.charts import line_chart, metric_curves
from eagle3.reports.parts import STYLE, section, tiles_row

# A job's last sample may come milliseconds after the one before it; a rate over less time is noise.
MIN_INTERVAL_S = 1.0
# Chart title -> key in a metrics line -> name of its curve.
CHARTS: dict[str, dict[str, str]] = {
    "Loss": {"loss": "all steps"},
    "Loss by TTT step": {"loss_by_step": "step"},
    "Accuracy by TTT step": {"accuracy_by_step": "step"},
    "Acceptance length": {
        "acceptance_length": "training packs",
        "validation_acceptance_length": "validation",
    },
    "Coverage of the draft vocabulary": {
        "label_coverage": "labels",
        "validation_coverage": "target probability, validation",
    },
    "Gradient norm": {"gradient_norm": "before clipping"},
    "Learning rate": {"learning_rate": "rate"},
    "Tokens/s": {"tokens_per_s": "all", "supervised_per_s": "supervised"},
    "Share of time waiting for data": {"data_wait_share": "waiting"},
    "Memory, GiB": {"memory_gib": "peak"},
}


def render_live(metrics: list[dict[str, Any]]) -> str:
    """Render charts of a training run from the lines of metrics.jsonl; the page stays below 1 MB."""
    lines = [
        line | {"memory_gib": line["memory_bytes"] / (1 << 30)} if line.get("memory_bytes") else line
        for line in metrics
    ]
    charts = "".join(
        line_chart(title, metric_curves(lines, names), "optimizer step") for title, names in CHARTS.items()
    )
    return (
        f'<style>{STYLE}</style><div class="e3">{_headline(metrics)}<div class="charts">{charts}</div></div>'
    )


def _headline(metrics: list[dict[str, Any]]) -> str:
    newest: dict[str, Any] = {}
    for line in metrics[-50:]:
        newest |= {key: value for key, value in line.items() if value is not None}
    parts = [f"step {newest['step']:,}" if "step" in newest else "no step yet"]
    if "seconds_left" in newest:
        parts.append(f"{newest['seconds_left'] / 60:,.0f} minutes left")
    if "tokens_per_s" in newest:
        parts.append(f"{newest['tokens_per_s']:,.0f} tokens/s")
    return f"<h1>Training</h1><p class='soft'>{escape(', '.join(parts))}</p>"


def render_jobs(
    title: str, jobs: dict[str, list[Progress]], statistics: dict[str, str], note: str = ""
) -> str:
    """Render the progress of jobs, and their statistics when all are done.

    Args:
        title: stage and shard.
        jobs: label -> progress samples, oldest first; empty while the engine starts.
        statistics: name -> number; empty until all jobs are done.
        note: a sentence below the statistics.
    """
    state = "done" if statistics else "under way" if any(jobs.values()) else "the engine starts"
    result = tiles_row([(number, name, "") for name, number in statistics.items()]) if statistics else ""
    result += f"<p>{escape(note)}</p>" if note else ""
    parts = "".join(section(label, _job(samples)) for label, samples in jobs.items())
    return (
        f'<style>{STYLE}</style><div class="e3"><h1>{escape(title)}</h1><p class="soft">{state}</p>'
        f"{result}{parts}</div>"
    )


def _job(samples: list[Progress]) -> str:
    if not samples:
        return '<p class="soft">nothing yet</p>'
    newest = samples[-1]
    tiles = [(f"{newest.done:,} / {newest.total:,}", newest.unit, "")]
    if newest.kept:
        tiles.append((f"{newest.kept:,}", "of these by an earlier attempt", ""))
    if newest.conversations != newest.done:
        tiles.append((f"{newest.conversations:,}", "conversations", ""))
    tiles.append((f"{newest.tokens_per_s():,.0f}", "tokens/s", ""))
    if newest.done < newest.total:
        left = newest.seconds_left
        tiles.append(("?" if left is None else duration_text(left), "left", ""))
    tiles.append((duration_text(newest.seconds), "so far", ""))
    first = replace(newest, done=newest.kept, tokens=0, conversations=0, seconds=0.0)
    rate = [
        (b.seconds, b.tokens_per_s(a))
        for a, b in pairwise([first, *samples])
        if b.seconds - a.seconds >= MIN_INTERVAL_S
    ]
    return f'{tiles_row(tiles)}<div class="charts">{line_chart("Speed", {"tokens/s": rate}, "seconds")}</div>'
