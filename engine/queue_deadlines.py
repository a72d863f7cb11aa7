"""Until when requests wait for their first step. One timeout for all, so that they lie in order of arrival."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection

from engine.request import Request

MAX_A_REQUEST = 2
"""Deadlines kept for each live request; those of the ended are swept out when they are the majority."""


class QueueDeadlines:
    """Forgets whoever has begun or ended, at the latest when they are asked for."""

    def __init__(self, timeout_s: float | None) -> None:
        """Give each request `timeout_s` seconds; None for ever."""
        self._timeout_s = timeout_s
        self._waiting: deque[tuple[float, Request]] = deque()

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, request: Request, now: float) -> None:
        """`request` arrives and waits from `now` on."""
        if self._timeout_s is not None:
            self._waiting.append((now + self._timeout_s, request))

    @property
    def next(self) -> float:
        """The first deadline of a request that still waits for its first step; infinity for none."""
        while self._waiting and not self._waiting[0][1].awaits_first_step:
            self._waiting.popleft()
        return self._waiting[0][0] if self._waiting else math.inf

    def pop_overdue(self, now: float) -> Request | None:
        """Return the first request that should have begun by `now` and forget it; None where there is none."""
        return self._waiting.popleft()[1] if self.next <= now else None

    def sweep(self, num_live: int) -> None:
        """A request has ended, and `num_live` live: forget the ended where they are the majority."""
        if len(self._waiting) > MAX_A_REQUEST * num_live:
            self._waiting = deque(entry for entry in self._waiting if entry[1].awaits_first_step)

    def check_invariants(self, live: Collection[Request]) -> None:
        """Check that they do not pile up.

        Raises:
            AssertionError: They do.
        """
        assert len(self._waiting) <= MAX_A_REQUEST * len(live), "deadlines of requests that have ended are kept"
