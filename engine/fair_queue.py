"""A bounded queue from which clients are served in turn, one thing each."""

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
        self._is_filled = trio.Event()

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
        self._is_filled.set()
        return excess

    async def get(self) -> tuple[str | None, Item]:
        """Wait for the next item, whose client then stands behind all others; return both."""
        while not self._of_clients:
            self._is_filled = trio.Event()
            await self._is_filled.wait()
        client, items = self._of_clients.popitem(last=False)
        item = items.popleft()
        if items:
            self._of_clients[client] = items
        return client, item
