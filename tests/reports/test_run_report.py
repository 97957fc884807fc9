"""The report page is one small file that shows what it was given and lets nothing of it act."""

from html.parser import HTMLParser
from typing import Any

import pytest

from eagle3.reports.charts import nice_ticks, number, palette, thin
from eagle3.reports.run import render_html

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


class Tags(HTMLParser):
    """Collects tag names and checks that they close in order."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.seen: list[str] = []
        self.open: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)
        self.attributes += attrs
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_is_whole_and_refers_to_nothing_outside() -> None:
    tags = Tags(render_html(SUMMARY, metrics(50), SAMPLES))
    assert tags.open == []
    assert not {"script", "link", "img", "iframe", "a"} & set(tags.seen)
    assert not {"src", "href", "onload"} & {name for name, _ in tags.attributes}
    assert tags.seen.count("svg") == 4
    # three losses, three accuracies, one validation curve
    assert tags.seen.count("polyline") == 7
    # two bars for each of three positions
    assert tags.seen.count("rect") == 6


def test_the_figures_of_the_run_stand_on_the_page() -> None:
    page = render_html(SUMMARY, metrics(50), SAMPLES)
    for text in (
        "1.573",
        "1.40×",
        "58.1",
        "41.5",
        "extract_hidden_states",
        "made 1, cached 2",
        "skipped",
        "600 + 40",
        "/runs/export",
    ):
        assert text in page


def test_supervised_text_is_marked_and_text_of_the_data_stays_text() -> None:
    page = render_html(SUMMARY, [], SAMPLES)
    assert "<pre>&lt;|user|&gt;Hi &amp; bye\n<mark>Hello &lt;b&gt;you&lt;/b&gt;</mark></pre>" in page
    hostile = "<script>alert(1)</script>"
    spans = [[hostile, True]]
    page = render_html(
        SUMMARY | {"run_name": hostile, "target_dir": hostile, "serve": {hostile: hostile}, "dtype": hostile},
        [],
        [{"sample_id": hostile, "spans": spans}],
    )
    assert "<script" not in page


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
    page = render_html({key: SUMMARY[key] for key in known}, [], [])
    assert Tags(page).open == []
    assert page.count("nothing was recorded") == 3


def test_non_finite_figures_are_left_out_of_the_curves() -> None:
    lines = metrics(3)
    lines[1]["loss_by_step"] = [float("nan"), float("inf"), 1.0]
    page = render_html(SUMMARY, lines, [])
    assert "nan" not in page
    assert "inf" not in page.replace("info", "")


def test_the_largest_run_stays_below_one_megabyte() -> None:
    long = [{"sample_id": f"s{i}", "spans": [['"' * 5, i % 2 == 0] for i in range(20000)]} for i in range(40)]
    page = render_html(SUMMARY, metrics(5000, ttt_steps=16), long)
    assert len(page.encode()) < 1_000_000
    assert "94,000 more characters" in page


def test_thinning_keeps_the_mean_of_equal_runs() -> None:
    points = [(float(i), float(i % 2)) for i in range(10)]
    assert thin(points, 5) == [(0.5, 0.5), (2.5, 0.5), (4.5, 0.5), (6.5, 0.5), (8.5, 0.5)]
    assert thin(points, 10) == points
    assert len(thin(points, 4)) == 4


@pytest.mark.parametrize(
    ("low", "high"), [(0.0, 1.0), (1.3, 1.6), (3.0, 3.0), (0.0, 0.0), (-2.0, 9000.0), (1.0, 2.0)]
)
def test_ticks_are_few_and_enclose_the_data(low: float, high: float) -> None:
    ticks = nice_ticks(low, high)
    assert ticks[0] <= low + 1e-9
    assert ticks[-1] >= high - 1e-9
    assert 2 <= len(ticks) <= 8


def test_numbers_are_short_and_colours_differ() -> None:
    assert [number(v) for v in (0.25, 12.0, 3000.0, 0.1 + 0.2)] == ["0.25", "12", "3,000", "0.3"]
    assert len(set(palette(16))) == 16
