"""A bounded queue from which clients are served in turn, one thing each, and several of them, emptied in order."""

from __future__ import annotations

from collections import OrderedDict, deque
from typing import Generic, TypeVar

import trio

Item = TypeVar("Item")


class FairQueue(Generic[Item]):
    """What clients wait for; each one's own in order. Where it is full, who has most in it loses the latest."""

    def __init__(self, max_size: int) -> None:
        """Hold at most `max_size` items."""
        self._max_size = max_size
        self._of_clients: OrderedDict[str | None, deque[Item]] = OrderedDict()

    def __len__(self) -> int:
        """Return how many wait."""
        return sum(map(len, self._of_clients.values()))

    def put(self, client: str | None, item: Item) -> Item | None:
        """Take in an item of `client`; return what has no place any more, which may be itself."""
        excess = None
        if len(self) >= self._max_size:
            most = max(self._of_clients, key=lambda other: len(self._of_clients[other]))
            if len(self._of_clients.get(client, ())) + 1 >= len(self._of_clients[most]):
                return item
            excess = self._of_clients[most].pop()
        self._of_clients.setdefault(client, deque()).append(item)
        return excess

    def take(self) -> tuple[str | None, Item]:
        """Return the next item and its client, who then stands behind all others; KeyError where there is none."""
        client, items = self._of_clients.popitem(last=False)
        item = items.popleft()
        if items:
            self._of_clients[client] = items
        return client, item


class FairQueues(Generic[Item]):
    """Several such queues: what waits in a later one is taken where those before it are empty."""

    def __init__(self, num_queues: int, max_size: int) -> None:
        """Hold at most `max_size` items in each."""
        self._queues: list[FairQueue[Item]] = [FairQueue(max_size) for _ in range(num_queues)]
        self._is_filled = trio.Event()

    def __len__(self) -> int:
        """Return how many wait in all of them."""
        return sum(map(len, self._queues))

    def put(self, index: int, client: str | None, item: Item) -> Item | None:
        """Take in an item of `client` in one of the queues; see `FairQueue.put`."""
        self._is_filled.set()
        return self._queues[index].put(client, item)

    async def get(self) -> tuple[int, str | None, Item]:
        """Wait for the next item; return it behind its queue's index and its client."""
        while not len(self):
            self._is_filled = trio.Event()
            await self._is_filled.wait()
        index = next(index for index, queue in enumerate(self._queues) if len(queue))
        return index, *self._queues[index].take()
