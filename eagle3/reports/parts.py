"""HTML parts of all reports: document, tiles, tables, sample rows with their loss mask.

A page is one HTML file without scripts or links, for light and dark mode. All text is escaped here, except
arguments named `content`, which are HTML.
"""

from collections.abc import Iterable
from html import escape
from typing import Any

MAX_SAMPLES = 8
# Characters of one sample; MAX_SAMPLES of them stay below 1 MB, escapes included.
MAX_SAMPLE_CHARS = 6000

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
.e3 svg .grid{stroke:var(--line)}.e3 svg .mark{stroke:var(--soft);stroke-dasharray:4 3}
.e3 .scroll{overflow-x:auto}.e3 table{border-collapse:collapse;min-width:420px}
.e3 th,.e3 td{padding:6px 18px 6px 0;text-align:left;border-bottom:1px solid var(--line)}
.e3 th{color:var(--soft);font-weight:500}.e3 .n{text-align:right;font-variant-numeric:tabular-nums}
.e3 .good{color:var(--good)}.e3 .bad{color:var(--bad)}
.e3 mark{background:var(--on);color:inherit;border-radius:3px}.e3 details{margin:8px 0}.e3 summary{cursor:pointer}
"""


def document(title: str, content: str) -> str:
    """A complete HTML document."""
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head>"
        f"<body style='margin:0'><main class=\"e3\">{content}</main></body></html>"
    )


def section(title: str, content: str) -> str:
    """A section with a heading; empty if the content is empty."""
    return f"<section><h2>{escape(title)}</h2>{content}</section>" if content else ""


def tiles_row(tiles: list[tuple[str, str, str]]) -> str:
    """Large numbers, each as (number, label, CSS class: good, bad or empty)."""
    boxes = "".join(
        f'<div class="tile"><b class="{kind}">{escape(number)}</b><span>{escape(text)}</span></div>'
        for number, text, kind in tiles
    )
    return f'<div class="tiles">{boxes}</div>'


def table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]], numbers: tuple[int, ...] = (1,)) -> str:
    """A table; the columns in `numbers`, counted from 0, are right-aligned."""

    def line(cells: tuple[str, ...], tag: str) -> str:
        kinds = [' class="n"' if i in numbers else "" for i in range(len(cells))]
        content = (f"<{tag}{kind}>{escape(cell)}</{tag}>" for cell, kind in zip(cells, kinds, strict=True))
        return f"<tr>{''.join(content)}</tr>"

    body = "".join(line(row, "td") for row in rows)
    return f'<div class="scroll"><table>{line(head, "th")}{body}</table></div>'


def samples_list(samples: list[dict[str, Any]]) -> str:
    """Rows as text with the loss mask in colour; a sample has sample_id, spans [[text, supervised], …] and
    perhaps source."""
    if not samples:
        return ""
    rows = [_sample(sample, is_open=i == 0) for i, sample in enumerate(samples[:MAX_SAMPLES])]
    return f"<p class='soft'><mark>Marked</mark> text is supervised: the target wrote it.</p>{''.join(rows)}"


def _sample(sample: dict[str, Any], is_open: bool) -> str:
    left = MAX_SAMPLE_CHARS
    parts = []
    for text, is_supervised in sample["spans"]:
        visible = escape(text[: max(left, 0)])
        parts.append(f"<mark>{visible}</mark>" if is_supervised and visible else visible)
        left -= len(text)
    if left < 0:
        parts.append(f" … {-left:,} more characters")
    name = " ".join(str(sample[key]) for key in ("source", "sample_id") if sample.get(key))
    state = " open" if is_open else ""
    text = "".join(parts)
    return f"<details{state}><summary><code>{escape(name)}</code></summary><pre>{text}</pre></details>"
