"""Clients are served in turn, and where there is no place, who has most gives way."""

from __future__ import annotations

import pytest
import trio
import trio.testing

from engine.fair_queue import FairQueue, FairQueues


def test_clients_are_served_in_turn_each_in_order() -> None:
    queue: FairQueue[int] = FairQueue(9)
    for item in range(3):
        assert queue.put("many", item) is None
    assert queue.put(None, 10) is None
    assert queue.put("few", 20) is None
    assert [queue.take()[1] for _ in range(5)] == [0, 10, 20, 1, 2]
    assert len(queue) == 0


def test_where_it_is_full_who_has_most_in_it_loses_the_latest() -> None:
    queue: FairQueue[int] = FairQueue(3)
    assert [queue.put("many", item) for item in range(4)] == [None, None, None, 3]
    assert queue.put("few", 10) == 2
    assert queue.put("few", 11) == 11  # it would then have as many as the other
    assert [queue.take()[1] for _ in range(3)] == [0, 10, 1]


def test_an_empty_one_gives_nothing() -> None:
    with pytest.raises(KeyError):
        FairQueue[int](1).take()


async def test_of_several_the_first_is_emptied_before_the_next() -> None:
    queues: FairQueues[int] = FairQueues(3, 9)
    for index, item in [(2, 20), (1, 10), (0, 0), (1, 11)]:
        queues.put(index, f"client {item}", item)
    assert [await queues.get() for _ in range(2)] == [(0, "client 0", 0), (1, "client 10", 10)]
    queues.put(0, None, 1)
    assert [(await queues.get())[::2] for _ in range(3)] == [(0, 1), (1, 11), (2, 20)]


async def test_each_of_several_is_full_by_itself() -> None:
    queues: FairQueues[int] = FairQueues(2, 1)
    assert [queues.put(index, None, index) for index in (0, 0, 1)] == [None, 0, None]


async def test_an_item_wakes_who_waits_for_it() -> None:
    queues: FairQueues[str] = FairQueues(2, 1)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_put_later, queues)
        assert await queues.get() == (1, "client", "item")


async def _put_later(queues: FairQueues[str]) -> None:
    await trio.testing.wait_all_tasks_blocked()
    queues.put(1, "client", "item")
