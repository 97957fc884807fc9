"""Charts: curves from metrics, thinning, ticks, numbers, colours."""

import pytest

from eagle3.reports.charts import bar_chart, line_chart, metric_curves, nice_ticks, number, palette, thin
from tests.helpers.pages import Page


def test_a_list_of_numbers_makes_a_curve_for_each_of_them() -> None:
    metrics = [
        {"step": 1, "loss": 3.0, "loss_by_step": [4.0, 5.0]},
        {"step": 2, "loss": None},
        {"step": 4, "loss": 1, "loss_by_step": []},
    ]
    assert metric_curves(metrics, {"loss": "all", "loss_by_step": "step", "rate": "rate"}) == {
        "all": [(1.0, 3.0), (4.0, 1.0)],
        "step 0": [(1.0, 4.0)],
        "step 1": [(1.0, 5.0)],
    }


def test_a_chart_names_its_curves_axes_and_marks() -> None:
    page = Page(line_chart("Loss", {"a": [(0, 1.0), (4, 3.0)]}, "steps", marks=[(2.0, "here")]))
    assert page.text == "Loss a 1 1.5 2 2.5 3 0 1 2 3 4 here steps"


def test_points_that_are_not_finite_are_left_out() -> None:
    infinite = [(1.0, float("nan")), (2.0, float("inf"))]
    assert Page(line_chart("Loss", {"a": infinite}, "steps")).text == "Loss nothing was recorded"
    assert line_chart("Loss", {"a": [*infinite, (3.0, 1.0)]}, "steps") == line_chart(
        "Loss", {"a": [(3.0, 1.0)]}, "steps"
    )


def test_bars_have_their_values_above_them() -> None:
    page = Page(bar_chart("Shares", ["x", "y"], {"one": [0.25, 0.5], "two": [1.0]}))
    assert page.text == "Shares one two 0 0.25 0.5 0.75 1 x 0.25 1.00 y 0.50"


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
