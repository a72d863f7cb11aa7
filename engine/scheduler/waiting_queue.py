"""The requests that wait to be admitted, in the order of their places.

Order: urgency; then those that were preempted before those that never ran; then position. A heap whose entries of
removed requests are skipped when they come up and swept out once they are the majority, so that adding, removing and
taking the head cost O(log n) however many wait.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from engine.outputs import RequestId
from engine.request import PREEMPTED, Request

_Entry = tuple[int, bool, int, Request]


class WaitingQueue:
    """A priority queue that forgets whoever leaves early; iterating gives admission order."""

    def __init__(self) -> None:
        """Start empty."""
        self._heap: list[_Entry] = []
        self._aside: list[_Entry] = []
        self._entries: dict[RequestId, _Entry] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Request]:
        return (entry[3] for entry in sorted(self._entries.values(), key=lambda entry: entry[:3]))

    def unordered(self) -> list[Request]:
        """Return all, in any order."""
        return [entry[3] for entry in self._entries.values()]

    def add(self, request: Request) -> None:
        """Enqueue `request` where its place and its status put it."""
        urgency, position = request.place
        entry = (urgency, request.status is not PREEMPTED, position, request)
        self._entries[request.request_id] = entry
        heapq.heappush(self._heap, entry)

    def peek(self) -> Request | None:
        """Return the first that is not set aside, None where there is none."""
        while self._heap and self._is_stale(self._heap[0]):
            heapq.heappop(self._heap)
        return self._heap[0][3] if self._heap else None

    def remove(self, request: Request) -> None:
        """Take `request` out; nothing happens where it does not wait."""
        if self._entries.pop(request.request_id, None) is None:
            return
        if len(self._heap) > 2 * len(self._entries):
            self._heap = [entry for entry in self._heap if not self._is_stale(entry)]
            heapq.heapify(self._heap)

    def set_aside(self) -> None:
        """Let `peek` show the next one, until `restore`."""
        self._aside.append(heapq.heappop(self._heap))

    def restore(self) -> None:
        """Put back whatever was set aside."""
        for entry in self._aside:
            heapq.heappush(self._heap, entry)
        self._aside.clear()

    def _is_stale(self, entry: _Entry) -> bool:
        return self._entries.get(entry[3].request_id) is not entry
