"""What came for an engine and waits until its step task takes it, in the order in which it came."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

import trio

from engine.grammar_compiler import CompiledFor
from engine.protocol import ClientMessage, StepsRead


class Arrived(NamedTuple):
    """A message, and the engine's time at which it was received."""

    message: ClientMessage | CompiledFor
    at_s: float


class Inbox:
    """Filled without waiting by whoever has something for the step task, which alone waits here.

    Attributes:
        read_step: The last step whose outputs the client is known to have read.
    """

    def __init__(self) -> None:
        """Start empty."""
        self.read_step = 0
        self._arrived: deque[Arrived] = deque()
        self._news = trio.Event()

    def __len__(self) -> int:
        """How many messages wait."""
        return len(self._arrived)

    def put(self, message: ClientMessage | CompiledFor) -> None:
        """Add `message` and wake the step task."""
        if isinstance(message, StepsRead):
            self.read_step = message.step
        else:
            self._arrived.append(Arrived(message, trio.current_time()))
        self.wake()

    def wake(self) -> None:
        """Have the step task look at what has changed, here or elsewhere."""
        self._news.set()

    def take_all(self) -> Iterator[Arrived]:
        """Yield what waits, and what comes meanwhile."""
        while self._arrived:
            yield self._arrived.popleft()

    async def wait(self, deadline: float) -> None:
        """Wait for news since the step task last looked, at most until `deadline` of Trio's clock."""
        if not self._arrived:
            self._news = trio.Event()
            with trio.move_on_at(deadline):
                await self._news.wait()
