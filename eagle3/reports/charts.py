"""Line and bar charts as inline SVG; the page's CSS colours text and grid."""

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

WIDTH, HEIGHT = 560, 250
LEFT, RIGHT, TOP, BOTTOM = 48, 12, 10, 34
# Points of a curve; longer curves are averaged to keep a page small.
MAX_POINTS = 300

Point = tuple[float, float]


def metric_curves(metrics: Sequence[dict[str, Any]], names: Mapping[str, str]) -> dict[str, list[Point]]:
    """Curves over optimizer steps.

    Args:
        metrics: lines of metrics.jsonl in order; keys may be missing.
        names: metric -> name of its curve; a list of numbers makes a curve for each index.
    """
    curves: dict[str, list[Point]] = {}
    for line in metrics:
        step = float(line["step"])
        for key, name in names.items():
            value = line.get(key)
            if isinstance(value, list):
                for i, v in enumerate(value):
                    curves.setdefault(f"{name} {i}", []).append((step, float(v)))
            elif value is not None:
                curves.setdefault(name, []).append((step, float(value)))
    return curves


def line_chart(
    title: str,
    series: dict[str, list[Point]],
    x_label: str,
    ticks: Sequence[tuple[float, str]] = (),
    marks: Sequence[tuple[float, str]] = (),
) -> str:
    """Draw curves over a common x axis.

    Args:
        title: plain text.
        series: name -> (x, y) in ascending x; points that are not finite are skipped.
        x_label: unit of x.
        ticks: (x, label) on the x axis, for scales that are not linear; by default round numbers.
        marks: (x, label) of vertical lines.
    """
    curves = {name: thin([p for p in points if math.isfinite(p[1])]) for name, points in series.items()}
    curves = {name: points for name, points in curves.items() if points}
    if not curves:
        return _figure(title, [], '<p class="none">nothing was recorded</p>')
    xs = [x for points in curves.values() for x, _ in points]
    ys = [y for points in curves.values() for _, y in points]
    x_range = (min(xs), max(max(xs), min(xs) + 1))
    x_ticks = ticks or [(tick, number(tick)) for tick in nice_ticks(min(xs), max(xs))]
    y_ticks = nice_ticks(min(ys), max(ys))
    y_range = (y_ticks[0], y_ticks[-1])
    parts = [_grid(y_ticks, y_range)]
    for tick, label in x_ticks:
        if x_range[0] <= tick <= x_range[1]:
            parts.append(_text(_x(tick, x_range), HEIGHT - BOTTOM + 15, label, "middle"))
    parts += [_mark(_x(at, x_range), label) for at, label in marks]
    parts.append(_text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 4, x_label, "middle"))
    colours = palette(len(curves))
    for points, colour in zip(curves.values(), colours, strict=True):
        pixels = [(_x(x, x_range), _y(y, y_range)) for x, y in points]
        parts += _curve(pixels, colour)
    return _figure(title, list(zip(curves, colours, strict=True)), _svg(title, parts))


def _curve(pixels: list[Point], colour: str) -> list[str]:
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in pixels)
    stroke = f'fill="none" stroke="{colour}" stroke-width="1.8" stroke-linejoin="round"'
    dots = [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.6" fill="{colour}"/>' for x, y in pixels]
    return [f'<polyline points="{path}" {stroke}/>', *(dots if len(dots) <= 30 else [])]


def bar_chart(title: str, groups: Sequence[str], series: Mapping[str, Sequence[float]]) -> str:
    """Draw shares between 0 and 1: one bar for each series in each group, with its value above it."""
    y_range = (0.0, 1.0)
    colours = palette(len(series))
    parts = [_grid([0.0, 0.25, 0.5, 0.75, 1.0], y_range)]
    pitch = (WIDTH - LEFT - RIGHT) / max(1, len(groups))
    bar = min(46.0, 0.8 * pitch / max(1, len(series)))
    for g, group in enumerate(groups):
        middle = LEFT + pitch * (g + 0.5)
        parts.append(_text(middle, HEIGHT - BOTTOM + 16, group, "middle"))
        for s, (name, values) in enumerate(series.items()):
            if g >= len(values):
                continue
            left = middle + bar * (s - len(series) / 2)
            top = _y(min(1.0, values[g]), y_range)
            label = escape(f"{name}, {group}: {values[g]:.3f}")
            parts.append(
                f'<rect x="{left + 1:.1f}" y="{top:.1f}" width="{bar - 2:.1f}" '
                f'height="{HEIGHT - BOTTOM - top:.1f}" rx="2" fill="{colours[s]}">'
                f"<title>{label}</title></rect>"
            )
            parts.append(_text(left + bar / 2, top - 4, f"{values[g]:.2f}", "middle"))
    return _figure(title, list(zip(series, colours, strict=True)), _svg(title, parts))


def thin(points: list[Point], limit: int = MAX_POINTS) -> list[Point]:
    """Average neighbouring points so that at most `limit` are left."""
    size = -(-len(points) // limit)
    if size <= 1:
        return points
    runs = [points[i : i + size] for i in range(0, len(points), size)]
    return [(sum(x for x, _ in run) / len(run), sum(y for _, y in run) / len(run)) for run in runs]


def nice_ticks(low: float, high: float) -> list[float]:
    """Choose up to eight round numbers that enclose the range."""
    span = (high - low) or abs(high) or 1.0
    raw = span / 5
    power: float = 10 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= raw * 0.999)
    first = math.floor(low / step + 1e-9)
    last = math.ceil(high / step - 1e-9)
    return [i * step for i in range(first, max(last, first + 1) + 1)]


def number(value: float) -> str:
    """Format a number, such as 0.25, 12 or 3,000."""
    return f"{value:,.0f}" if abs(value) >= 1000 or value == int(value) else f"{value:.4g}"


def palette(count: int) -> list[str]:
    """Choose `count` distinct colours, blue to orange, readable on white and on black."""
    hues = [215 - 190 * i / max(1, count - 1) for i in range(count)]
    return [f"hsl({hue % 360:.0f} 62% 48%)" for hue in hues]


def _x(value: float, limits: Point) -> float:
    return LEFT + (value - limits[0]) / (limits[1] - limits[0]) * (WIDTH - LEFT - RIGHT)


def _y(value: float, limits: Point) -> float:
    return HEIGHT - BOTTOM - (value - limits[0]) / (limits[1] - limits[0]) * (HEIGHT - TOP - BOTTOM - 8)


def _grid(ticks: list[float], limits: Point) -> str:
    lines = []
    for tick in ticks:
        y = _y(tick, limits)
        lines.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" class="grid"/>')
        lines.append(_text(LEFT - 6, y + 4, number(tick), "end"))
    return "".join(lines)


def _mark(x: float, label: str) -> str:
    is_right = x > (LEFT + WIDTH - RIGHT) / 2
    line = f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}" class="mark"/>'
    label_x = x - 5 if is_right else x + 5
    return line + _text(label_x, HEIGHT - BOTTOM - 8, label, "end" if is_right else "start")


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _svg(title: str, parts: list[str]) -> str:
    size = f"0 0 {WIDTH} {HEIGHT}"
    return f'<svg viewBox="{size}" role="img" aria-label="{escape(title)}">{"".join(parts)}</svg>'


def _figure(title: str, legend: list[tuple[str, str]], content: str) -> str:
    keys = "".join(
        f'<span><i style="background:{colour}"></i>{escape(name)}</span>' for name, colour in legend
    )
    caption = f'{escape(title)}<span class="legend">{keys}</span>'
    return f"<figure><figcaption>{caption}</figcaption>{content}</figure>"
