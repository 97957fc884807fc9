"""The report of a run: acceptance, curves, stages, sample rows with their loss mask, and serve commands."""

from html import escape
from typing import Any

from eagle3.reports.charts import bar_chart, line_chart, metric_curves
from eagle3.reports.parts import document, samples_list, section, table, tiles_row

SERVE_NOTE = (
    "The server accepts connections from this machine only. To serve others, set --host, and a key in "
    "VLLM_API_KEY or --api-key."
)


def render_html(
    summary: dict[str, Any], training_metrics: list[dict[str, Any]], samples: list[dict[str, Any]]
) -> str:
    """Render the report as one HTML document below 1 MB.

    Args:
        summary: as summarize_run writes it; these keys may be missing: run_name, target_dir, export_dir,
            trainer_acceptance_by_position, differing_prompts, num_speculative_tokens, max_new_tokens, dtype,
            concurrency, prompts, stages, serve.
        training_metrics: lines of metrics.jsonl, one for each optimizer step.
        samples: rows for `samples_list`.
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
    if not lines:
        return ""
    commands = [
        f"<p class='soft'>{escape(title)}</p><pre>{escape(command)}</pre>" for title, command in lines.items()
    ]
    return f"<p class='soft'>{SERVE_NOTE}</p>{''.join(commands)}"


def _header(title: str, summary: dict[str, Any]) -> str:
    speed = summary["tokens_per_s"]
    prompts = summary.get("prompts")
    ratio = speed["with_draft"] / speed["without_draft"] if speed["without_draft"] else 0.0
    same = summary["outputs_identical"]
    differing = "" if same else f": {len(summary.get('differing_prompts', []))} differ"
    tiles = [
        (f"{summary['acceptance_length']:.3f}", "acceptance length, by the engine", ""),
        (f"{summary['trainer_acceptance_length']:.3f}", "acceptance length, by the trainer", ""),
        (f"{ratio:.2f}×", "times the tokens/s without the draft", "good" if ratio > 1 else ""),
        ("yes" if same else "no", f"same text with and without{differing}", "good" if same else "bad"),
    ]
    if isinstance(prompts, dict):
        tiles.append((f"{prompts['train']:,} + {prompts['heldout']:,}", "prompts: training + held out", ""))
    paths = "".join(
        f"<p class='soft'>{label} <code>{escape(str(summary[key]))}</code></p>"
        for key, label in (("target_dir", "Target"), ("export_dir", "Draft"))
        if summary.get(key)
    )
    return f"<header><h1>{escape(title)}</h1>{paths}{tiles_row(tiles)}</header>"


def _charts(summary: dict[str, Any], metrics: list[dict[str, Any]]) -> str:
    names_by_title = {
        "Loss by TTT step": {"loss_by_step": "step"},
        "Accuracy by TTT step": {"accuracy_by_step": "step"},
        "Acceptance length on validation rows": {"validation_acceptance_length": "validation"},
    }
    charts = [
        line_chart(title, metric_curves(metrics, names), "optimizer step")
        for title, names in names_by_title.items()
    ]
    return f'<div class="charts">{"".join(charts)}{_positions(summary)}</div>'


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
    settings = ["greedy", *(text.format(summary[key]) for key, text in texts.items() if key in summary)]
    return table(("", "tokens/s"), rows) + f"<p class='soft'>{escape(', '.join(settings))}</p>"


def _stages(stages: list[dict[str, Any]]) -> str:
    rows = []
    for stage in stages:
        done = [
            f"{word} {stage[key]}" for key, word in (("runs", "made"), ("cached", "cached")) if stage.get(key)
        ]
        rows.append((stage["name"], f"{stage['seconds']:,.1f}", ", ".join(done) or "skipped"))
    return table(("stage", "seconds", "made or cached"), rows) if rows else ""
