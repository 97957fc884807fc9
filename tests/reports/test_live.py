"""Pages of live Decks: complete, small, with all text escaped."""

from eagle3.engine.progress import Progress
from eagle3.reports.live import render_jobs, render_live
from tests.helpers.pages import Page


def sample(seconds: float, done: int, total: int = 1000, unit: str = "user turns", kept: int = 0) -> Progress:
    return Progress(done, total, unit, kept, 50 * done, done // 2, seconds)


def test_before_the_engine_reports_anything_the_page_says_so() -> None:
    assert "the engine starts" in render_jobs("extract shard 3", {}, {})
    page = Page(render_jobs("extract shard 3", {"extract shard 3": []}, {}))
    assert page.text == "extract shard 3 the engine starts extract shard 3 nothing yet"


def test_a_running_job_shows_done_total_rate_time_left_and_a_curve() -> None:
    samples = [sample(10, 100), sample(20, 250, kept=50)]
    page = Page(render_jobs("extract shard 3", {"the job": samples}, {}))
    assert page.text.startswith(
        "extract shard 3 under way the job 250 / 1,000 user turns 50 of these by an earlier attempt "
        "125 conversations 625 tokens/s 75 s left 20 s so far Speed tokens/s"
    )
    assert page.text.endswith("seconds")


def test_the_curve_is_the_rate_between_two_samples_that_are_a_second_apart() -> None:
    one, other = (
        render_jobs("x", {"x": [sample(10, 100), sample(20, 300), *more]}, {}).partition("<svg")[2]
        for more in ([], [sample(20.2, 301)])
    )
    assert one == other
    # 500 tokens/s, then 1,000, where the axis ends.
    assert (
        "500 600 700 800 900 1,000"
        in Page(render_jobs("x", {"x": [sample(10, 100), sample(20, 300)]}, {})).text
    )


def test_a_finished_job_shows_its_statistics_and_no_time_left() -> None:
    outcomes = "9 requested = 8 answered + 1 failed"
    page = Page(render_jobs("x", {"x": [sample(60, 1000)]}, {"GB of states": "1.25"}, outcomes))
    assert page.text.startswith(f"x done 1.25 GB of states {outcomes} x 1,000 / 1,000 user turns")
    assert " left " not in page.text


def test_every_pass_has_its_own_section() -> None:
    jobs = {"with draft": [sample(9, 5)], "without draft": [], "walk": [sample(9, 7)]}
    text = Page(render_jobs("evaluate", jobs, {})).text
    assert "with draft 5 / 1,000" in text
    assert "without draft nothing yet walk 7 / 1,000" in text


def test_text_is_escaped() -> None:
    hostile = "<script>alert('1')</script>"
    page = Page(render_jobs(hostile, {hostile: [sample(9, 5, unit=hostile)]}, {hostile: hostile}, hostile))
    assert hostile in page.text


def test_a_week_of_samples_stays_far_below_one_megabyte() -> None:
    samples = [sample(5.0 * i, i, 10**6) for i in range(7 * 24 * 3600 // 5)]
    jobs = {"a": samples, "b": samples, "c": samples}
    assert len(render_jobs("x", jobs, {}).encode()) < 100_000


def test_a_training_run_shows_its_newest_numbers_and_its_curves() -> None:
    metrics = [
        {"step": 1, "loss": 3.0, "memory_bytes": 2 << 30, "tokens_per_s": 900.0},
        {"step": 2, "loss": 2.0, "memory_bytes": 3 << 30, "tokens_per_s": 1000.0, "seconds_left": 120},
    ]
    text = Page(render_live(metrics)).text
    assert text.startswith("Training step 2, 2 minutes left, 1,000 tokens/s Loss all steps")
    assert "Memory, GiB peak 2 2.2 2.4 2.6 2.8 3" in text
    assert "Learning rate nothing was recorded" in text
    assert Page(render_live([])).text.startswith("Training no step yet")
