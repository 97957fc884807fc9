"""How much is in flight at once, in which order, and what a failure leaves behind."""

import asyncio
import gc
import time

import pytest

from eagle3.engine.server.concurrency import run_bounded


def test_items_run_as_many_at_once_as_may_and_in_order() -> None:
    started: list[int] = []
    running = most = 0

    async def work(item: int) -> None:
        nonlocal running, most
        started.append(item)
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.001 * (item % 3))
        running -= 1

    asyncio.run(run_bounded(range(20), work, 4))
    assert (started, most) == (list(range(20)), 4)


def test_a_late_item_holds_back_the_size_of_those_after_it() -> None:
    done: list[int] = []

    async def work(item: int) -> None:
        if item == 0:
            await asyncio.sleep(0.05)
            assert done == [
                1,
                2,
                3,
            ]  # 10 + 3 x 30 = 100 are held, though 1 to 3 are done; a fifth would be too much
        done.append(item)

    asyncio.run(run_bounded(range(6), work, 99, lambda item: 30 if item else 10, 100))
    assert sorted(done) == list(range(6))


def test_a_done_item_gives_back_its_own_size_and_no_others() -> None:
    sizes, started = [60, 30, 80], []

    async def work(item: int) -> None:
        started.append(item)
        if item == 1:
            await asyncio.sleep(0.05)
            assert started == [0, 1]  # 30 are held still: 80 more would be too much

    asyncio.run(run_bounded(range(3), work, 99, lambda item: sizes[item], 100))
    assert started == [0, 1, 2]


def test_an_item_larger_than_the_bound_runs_alone() -> None:
    running: set[int] = set()

    async def work(item: int) -> None:
        running.add(item)
        await asyncio.sleep(0.001)
        assert running == {item}
        running.remove(item)

    asyncio.run(run_bounded(range(3), work, 9, lambda item: 500, 100))


def test_the_first_failure_cancels_the_rest() -> None:
    started: list[int] = []

    async def work(item: int) -> None:
        started.append(item)
        if item == 1:
            raise RuntimeError("no")
        await asyncio.sleep(60)

    start = time.monotonic()
    with pytest.raises(RuntimeError, match="no"):
        asyncio.run(run_bounded(range(100), work, 3))
    assert started == [0, 1, 2]
    assert time.monotonic() - start < 30


def test_failures_at_one_time_leave_nothing_to_complain_about_later(caplog: pytest.LogCaptureFixture) -> None:
    async def work(item: int) -> None:
        raise RuntimeError(f"no {item}")

    with pytest.raises(RuntimeError, match="no"):
        asyncio.run(run_bounded(range(9), work, 3))
    gc.collect()
    assert caplog.text == ""
