"""The requests that wait to be admitted, in a policy's order; preempted ones before all others.

A heap whose entries of removed requests are skipped when they come up and swept out once they are the majority, so
that adding, removing and taking the head cost O(log n) however many wait.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from engine.outputs import RequestId
from engine.request import Request, RequestStatus
from engine.scheduler.policy import OrderKey, Policy

_Entry = tuple[bool, OrderKey, Request]


class WaitingQueue:
    """A priority queue that forgets whoever leaves early; iterating gives admission order."""

    def __init__(self, policy: Policy) -> None:
        """Start empty; `policy` gives the order."""
        self._policy = policy
        self._heap: list[_Entry] = []
        self._entries: dict[RequestId, _Entry] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Request]:
        return (request for _, _, request in sorted(self._entries.values()))

    def add(self, request: Request) -> None:
        """Enqueue `request` at the place that its status and the policy give it."""
        entry = (request.status is not RequestStatus.PREEMPTED, self._policy(request), request)
        self._entries[request.request_id] = entry
        heapq.heappush(self._heap, entry)

    def peek(self) -> Request:
        """Return the head; the queue must not be empty."""
        while self._is_stale(self._heap[0]):
            heapq.heappop(self._heap)
        return self._heap[0][2]

    def remove(self, request: Request) -> None:
        """Take `request` out; nothing happens where it does not wait."""
        if self._entries.pop(request.request_id, None) is None:
            return
        if len(self._heap) > 2 * len(self._entries):
            self._heap = [entry for entry in self._heap if not self._is_stale(entry)]
            heapq.heapify(self._heap)

    def _is_stale(self, entry: _Entry) -> bool:
        return self._entries.get(entry[2].request_id) is not entry
