"""The report of a run is one small file, with all text from data escaped."""

from typing import Any

from eagle3.reports.run import render_html
from tests.helpers.pages import Page

SUMMARY: dict[str, Any] = {
    "run_name": "smoke",
    "target_dir": "/models/tiny",
    "export_dir": "/runs/export",
    "acceptance_length": 1.5731,
    "acceptance_by_position": [0.38, 0.14, 0.05],
    "trainer_acceptance_length": 1.5729,
    "trainer_acceptance_by_position": [0.38, 0.14, 0.05],
    "outputs_identical": True,
    "differing_prompts": [],
    "tokens_per_s": {"with_draft": 58.12, "without_draft": 41.5},
    "num_speculative_tokens": 3,
    "max_new_tokens": 64,
    "dtype": "float32",
    "concurrency": 1,
    "prompts": {"train": 600, "heldout": 40},
    "stages": [
        {"name": "prepare_data", "seconds": 3.2, "runs": 1, "cached": 0},
        {"name": "extract_hidden_states", "seconds": 91.6, "runs": 1, "cached": 2},
        {"name": "export_draft", "seconds": 0.0, "runs": 0, "cached": 0},
    ],
    "serve": {
        "shell": 'vllm serve /models/tiny --speculative-config \'{"method": "eagle3"}\'',
        "python": "llm = vllm.LLM(…)",
    },
}
SAMPLES = [
    {
        "sample_id": "ab12",
        "source": "chat",
        "spans": [["<|user|>Hi & bye\n", False], ["Hello <b>you</b>", True]],
    }
]


def metrics(steps: int, ttt_steps: int = 3) -> list[dict[str, Any]]:
    lines: list[dict[str, Any]] = []
    for step in range(1, steps + 1):
        done = step / steps
        losses = [5.0 - 2 * done + 0.5 * i for i in range(ttt_steps)]
        lines.append(
            {
                "step": step,
                "loss_by_step": losses,
                "accuracy_by_step": [0.4 * done / (i + 1) for i in range(ttt_steps)],
            }
        )
    lines[-1]["validation_acceptance_length"] = 1.6
    lines[steps // 2]["validation_acceptance_length"] = 1.3
    return lines


def test_the_page_shows_the_numbers_of_the_run_and_needs_no_other_file() -> None:
    page = Page(render_html(SUMMARY, metrics(50), SAMPLES))
    for text in (
        "1.573 acceptance length, by the engine",
        "1.40× times the tokens/s without the draft",
        "yes same text with and without",
        "600 + 40 prompts",
        "Draft /runs/export",
        "Loss by TTT step step 0 step 1 step 2",
        "Accuracy by TTT step step 0 step 1 step 2",
        "Acceptance length on validation rows validation",
        "Acceptance by position: share of rounds engine trainer",
        "guess 1 0.38 0.38 guess 2 0.14 0.14 guess 3 0.05 0.05",
    ):
        assert text in page.text
    assert page.row("with draft") == ["with draft", "58.1"]
    assert page.row("without draft") == ["without draft", "41.5"]
    assert page.row("extract_hidden_states") == ["extract_hidden_states", "91.6", "made 1, cached 2"]
    assert page.row("export_draft") == ["export_draft", "0.0", "skipped"]


def test_supervised_text_is_marked_and_text_from_data_is_escaped() -> None:
    page = render_html(SUMMARY, [], SAMPLES)
    assert "<pre>&lt;|user|&gt;Hi &amp; bye\n<mark>Hello &lt;b&gt;you&lt;/b&gt;</mark></pre>" in page
    hostile = "<script>alert(1)</script>"
    spans = [[hostile, True]]
    page = render_html(
        SUMMARY | {"run_name": hostile, "target_dir": hostile, "serve": {hostile: hostile}, "dtype": hostile},
        [],
        [{"sample_id": hostile, "spans": spans}],
    )
    assert "alert(1)" in Page(page).text


def test_differing_outputs_are_counted() -> None:
    page = render_html(SUMMARY | {"outputs_identical": False, "differing_prompts": ["a", "b"]}, [], [])
    assert "2 differ" in page


def test_a_page_without_metrics_samples_or_stages_still_renders() -> None:
    known = (
        "acceptance_length",
        "acceptance_by_position",
        "trainer_acceptance_length",
        "outputs_identical",
        "tokens_per_s",
    )
    page = Page(render_html({key: SUMMARY[key] for key in known}, [], []))
    assert "Loss by TTT step nothing was recorded" in page.text


def test_the_largest_run_stays_below_one_megabyte() -> None:
    long = [{"sample_id": f"s{i}", "spans": [['"' * 5, i % 2 == 0] for i in range(20000)]} for i in range(40)]
    page = render_html(SUMMARY, metrics(5000, ttt_steps=16), long)
    assert len(page.encode()) < 1_000_000
    assert "94,000 more characters" in page
