"""Many things at once, but no more than two bounds allow: how many are in flight, and how much their results hold."""

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine, Iterable
from typing import Any


async def run_bounded(
    items: Iterable[int],
    work: Callable[[int], Coroutine[Any, Any, None]],
    max_items: int,
    size_of: Callable[[int], int] = lambda item: 0,
    max_size: int = 0,
) -> None:
    """Run `work` on every item, starting in order, as many at once as two bounds allow; the first failure ends all.

    Args:
        max_items, max_size: in flight, and of all shares held; a single item may be larger.
        size_of: an item's share of max_size, held until all earlier items are done too, since its result may wait for theirs.
    """
    running: set[asyncio.Task[None]] = set()
    holding: deque[tuple[asyncio.Task[None], int]] = deque()

    def is_full(size: int) -> bool:
        while holding and holding[0][0].done():
            holding.popleft()
        return len(running) >= max_items or (
            bool(holding) and sum(held for _, held in holding) + size > max_size
        )

    async def settle() -> None:
        done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
        running.difference_update(done)

    try:
        for item in items:
            while is_full(size_of(item)):
                await settle()
            task = asyncio.create_task(work(item))
            running.add(task)
            holding.append((task, size_of(item)))
        while running:
            await settle()
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
