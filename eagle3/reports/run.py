"""The page that a run leaves behind: figures, curves, stages, sample rows with their loss mask, and how to serve the draft.

Everything that comes from data is escaped.
"""

from html import escape
from typing import Any

from eagle3.reports.charts import Point, bar_chart, line_chart
from eagle3.reports.parts import document, samples_list, section, table, tiles_row

SERVE_NOTE = "The line serves this machine alone; for others give another --host, and a key in VLLM_API_KEY or by --api-key."


def render_html(
    summary: dict[str, Any], training_metrics: list[dict[str, Any]], samples: list[dict[str, Any]]
) -> str:
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
        section("Training and acceptance", _charts(summary, training_metrics)),
        section("Speed", _speed(summary)),
        section("Stages", _stages(summary.get("stages", []))),
        section("Sample rows", samples_list(samples)),
        section("Serve it", _serve(summary.get("serve", {}))),
    ]
    return document(title, "".join(sections))


def _serve(lines: dict[str, str]) -> str:
    commands = "".join(_command(title, line) for title, line in lines.items())
    return commands and f"<p class='soft'>{SERVE_NOTE}</p>{commands}"


def _header(title: str, summary: dict[str, Any]) -> str:
    speed, prompts = summary["tokens_per_s"], summary.get("prompts")
    ratio = speed["with_draft"] / speed["without_draft"] if speed["without_draft"] else 0.0
    same = summary["outputs_identical"]
    differing = len(summary.get("differing_prompts", []))
    tiles = [
        (f"{summary['acceptance_length']:.3f}", "acceptance length, by the engine", ""),
        (f"{summary['trainer_acceptance_length']:.3f}", "acceptance length, by the trainer", ""),
        (f"{ratio:.2f}×", "tokens/s with the draft against without", "good" if ratio > 1 else ""),
        (
            "yes" if same else "no",
            "same text with and without" + f": {differing} differ" * (not same),
            "good" if same else "bad",
        ),
    ]
    if isinstance(prompts, dict):
        tiles.append((f"{prompts['train']:,} + {prompts['heldout']:,}", "prompts: training + held out", ""))
    places = "".join(
        f"<p class='soft'>{label} <code>{escape(str(summary[key]))}</code></p>"
        for key, label in (("target_dir", "Target"), ("export_dir", "Draft"))
        if summary.get(key)
    )
    return f"<header><h1>{escape(title)}</h1>{places}{tiles_row(tiles)}</header>"


def _charts(summary: dict[str, Any], metrics: list[dict[str, Any]]) -> str:
    validation = [
        (float(m["step"]), float(m[key]))
        for m in metrics
        if m.get(key := "validation_acceptance_length") is not None
    ]
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
    rows = [
        ("without draft", f"{speed['without_draft']:,.1f}"),
        ("with draft", f"{speed['with_draft']:,.1f}"),
    ]
    texts = {
        "num_speculative_tokens": "{} guesses a round",
        "max_new_tokens": "answers up to {} tokens",
        "dtype": "{}",
        "concurrency": "sequences in flight: {}",
    }
    settings = ", ".join(
        ["greedy", *(text.format(summary[key]) for key, text in texts.items() if key in summary)]
    )
    return table(("", "tokens/s"), rows) + f"<p class='soft'>{escape(settings)}</p>"


def _stages(stages: list[dict[str, Any]]) -> str:
    rows = []
    for stage in stages:
        done = [
            f"{word} {stage[key]}" for key, word in (("runs", "made"), ("cached", "cached")) if stage.get(key)
        ]
        rows.append((stage["name"], f"{stage['seconds']:,.1f}", ", ".join(done) or "skipped"))
    return table(("stage", "seconds", "made or cached"), rows) if rows else ""


def _command(title: str, command: str) -> str:
    return f"<p class='soft'>{escape(title)}</p><pre>{escape(command)}</pre>"
