"""The live Deck's page of an engine's jobs: small, complete, and harmless whatever its words are."""

from eagle3.engine.progress import Progress
from eagle3.reports.live import render_jobs
from tests.reports.test_run_report import Tags


def look(seconds: float, done: int, total: int = 1000, unit: str = "user turns", kept: int = 0) -> Progress:
    return Progress(done, total, unit, kept, 50 * done, done // 2, seconds)


def test_before_the_engine_tells_anything_the_page_says_so() -> None:
    assert "the engine starts" in render_jobs("extract shard 3", {}, {})
    page = render_jobs("extract shard 3", {"extract shard 3": []}, {})
    assert "the engine starts" in page
    assert "nothing yet" in page
    assert Tags(page).open == []


def test_a_job_under_way_shows_done_total_rate_time_left_and_a_curve() -> None:
    page = render_jobs("extract shard 3", {"extract shard 3": [look(10, 100), look(20, 250, kept=50)]}, {})
    tags = Tags(page)
    assert tags.open == []
    assert not {"script", "link", "img", "iframe", "a"} & set(tags.seen)
    for text in (
        "<h1>extract shard 3</h1>",
        "under way",
        '<b class="">250 / 1,000</b><span>user turns</span>',
        '<b class="">50</b><span>of these by an earlier attempt</span>',
        '<b class="">125</b><span>conversations</span>',
        '<b class="">625</b><span>tokens/s</span>',
        '<b class="">75 s</b><span>left</span>',
        '<b class="">20 s</b><span>so far</span>',
    ):
        assert text in page
    assert tags.seen.count("polyline") == 1
    assert tags.seen.count("circle") == 2


def test_the_curve_is_the_rate_between_two_looks_and_leaves_out_one_that_comes_at_once() -> None:
    one, other = (
        render_jobs("x", {"x": [look(10, 100), look(20, 300), *more]}, {}).partition("<svg")[2]
        for more in ([], [look(20.2, 301)])
    )
    assert one == other
    # 500 tokens/s, then twice that: the axis ends there.
    assert ">1,000<" in one
    assert ">500<" in one


def test_a_finished_job_shows_its_figures_and_no_time_left() -> None:
    page = render_jobs(
        "x", {"x": [look(60, 1000)]}, {"GB of states": "1.25"}, "9 requested = 8 answered + 1 failed"
    )
    for text in (
        "done",
        '<b class="">1.25</b><span>GB of states</span>',
        "<p>9 requested = 8 answered + 1 failed</p>",
    ):
        assert text in page
    assert "<span>left</span>" not in page


def test_every_pass_has_a_part_of_its_own() -> None:
    page = render_jobs(
        "evaluate", {"with draft": [look(9, 5)], "without draft": [], "walk": [look(9, 7)]}, {}
    )
    assert page.count("<section>") == 3
    assert page.count("<svg") == 2
    assert page.index("with draft") < page.index("without draft") < page.index("walk")


def test_words_stay_words() -> None:
    hostile = "<script>alert('1')</script>"
    page = render_jobs(hostile, {hostile: [look(9, 5, unit=hostile)]}, {hostile: hostile}, hostile)
    assert "<script" not in page
    assert Tags(page).open == []


def test_a_week_of_looks_stays_far_below_one_megabyte() -> None:
    looks = [look(5.0 * i, i, 10**6) for i in range(7 * 24 * 3600 // 5)]
    assert len(render_jobs("x", {"a": looks, "b": looks, "c": looks}, {}).encode()) < 100_000
