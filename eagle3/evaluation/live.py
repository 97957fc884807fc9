"""Curves of a training run that is still going on, as HTML: what the live Deck shows."""

from html import escape
from typing import Any

from eagle3.page.charts import Point, line_chart
from eagle3.page.parts import STYLE

# Chart title -> metrics that it draws: key in a metrics line, name of the curve.
CHARTS: dict[str, dict[str, str]] = {
    "Loss": {"loss": "all steps"},
    "Loss by TTT step": {"loss_by_step": "step"},
    "Accuracy by TTT step": {"accuracy_by_step": "step"},
    "Acceptance length": {"acceptance_length": "training packs", "validation_acceptance_length": "validation"},
    "Coverage of the draft vocabulary": {"label_coverage": "labels", "validation_coverage": "target probability, validation"},
    "Gradient norm": {"gradient_norm": "before clipping"},
    "Learning rate": {"learning_rate": "rate"},
    "Tokens/s": {"tokens_per_s": "all", "supervised_per_s": "supervised"},
    "Share of time waiting for data": {"data_wait_share": "waiting"},
    "Memory, GiB": {"memory_bytes": "peak"},
}


def render_live(metrics: list[dict[str, Any]]) -> str:
    """Render the charts; curves are thinned, so that the page stays far below 1 MB.

    Args:
        metrics: lines of metrics.jsonl in order; keys may be missing.
    """
    charts = "".join(line_chart(title, _curves(metrics, keys), "optimizer step") for title, keys in CHARTS.items())
    return f'<style>{STYLE}</style><div class="e3">{_headline(metrics)}<div class="charts">{charts}</div></div>'


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


def _curves(metrics: list[dict[str, Any]], keys: dict[str, str]) -> dict[str, list[Point]]:
    curves: dict[str, list[Point]] = {}
    for line in metrics:
        for key, name in keys.items():
            value = line.get(key)
            values = {f"{name} {i}": v for i, v in enumerate(value)} if isinstance(value, list) else {name: value}
            for curve, number in values.items():
                if isinstance(number, int | float):
                    y = number / (1 << 30) if key == "memory_bytes" else float(number)
                    curves.setdefault(curve, []).append((float(line["step"]), y))
    return curves
