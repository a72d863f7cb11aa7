"""Clients are served in turn, and where there is no place, who has most gives way."""

from __future__ import annotations

import trio
import trio.testing

from engine.fair_queue import FairQueue


async def test_clients_are_served_in_turn_each_in_order() -> None:
    queue: FairQueue[int] = FairQueue(9)
    for item in range(3):
        assert queue.put("many", item) is None
    assert queue.put(None, 10) is None
    assert queue.put("few", 20) is None
    assert [(await queue.get())[1] for _ in range(5)] == [0, 10, 20, 1, 2]
    assert len(queue) == 0


async def test_where_it_is_full_who_has_most_in_it_loses_the_latest() -> None:
    queue: FairQueue[int] = FairQueue(3)
    assert [queue.put("many", item) for item in range(4)] == [None, None, None, 3]
    assert queue.put("few", 10) == 2
    assert queue.put("few", 11) == 11  # it would then have as many as the other
    assert [(await queue.get())[1] for _ in range(3)] == [0, 10, 1]


async def test_an_item_wakes_who_waits_for_it() -> None:
    queue: FairQueue[str] = FairQueue(1)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(trio.lowlevel.checkpoint)
        nursery.start_soon(_put_later, queue)
        assert await queue.get() == ("client", "item")


async def _put_later(queue: FairQueue[str]) -> None:
    await trio.testing.wait_all_tasks_blocked()
    queue.put("client", "item")
