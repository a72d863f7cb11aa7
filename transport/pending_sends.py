"""What was sent without a copy, kept until libzmq has written it; and the buffers that messages are encoded into.

One book a socket, whichever way its messages go. Nothing is dropped to bound it: what may be outstanding is bounded by
admission, and the two gauges say how much it is.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import zmq

from transport.tensors import Frame

MAX_KEPT_BUFFERS = 2
"""Buffers kept for the next messages: one that is written while the other is filled."""
MAX_KEPT_BYTES = 1 << 22
"""A larger buffer is not kept: one huge message must not hold its memory for ever."""


class _Sent(NamedTuple):
    tracker: zmq.MessageTracker
    frames: Sequence[Frame]
    size_bytes: int
    buffer: bytearray | None


class PendingSends:
    """Holds (tracker, message, buffer) until all frames of the message are done: its memory is the wire's meanwhile.

    Attributes:
        num_pending: Messages held.
        pending_bytes: Bytes of their frames that were not copied.
    """

    def __init__(self) -> None:
        self._sent: deque[_Sent] = deque()
        self._kept: list[bytearray] = []
        self._sweep_at = MAX_KEPT_BUFFERS
        self.num_pending = 0
        self.pending_bytes = 0

    def take_buffer(self) -> bytearray:
        """Give a buffer to encode a message into: one that is done, or a new one."""
        self.reap()
        return self._kept.pop() if self._kept else bytearray()

    def give_back(self, buffer: bytearray | None) -> None:
        """Keep `buffer`, which nothing refers to any more, for the next message."""
        if buffer is not None and len(self._kept) < MAX_KEPT_BUFFERS and len(buffer) <= MAX_KEPT_BYTES:
            self._kept.append(buffer)

    def hold(
        self,
        trackers: Sequence[zmq.MessageTracker],
        frames: Sequence[Frame],
        size_bytes: int,
        buffer: bytearray | None = None,
    ) -> None:
        """Keep `frames`, of which `size_bytes` are not copied, until all `trackers` are done; then keep `buffer`."""
        self._sent.append(_Sent(zmq.MessageTracker(*trackers), frames, size_bytes, buffer))
        self.num_pending += 1
        self.pending_bytes += size_bytes

    def reap(self) -> None:
        """Let go what is done, oldest first; now and then, at a cost that averages out, also what overtook it."""
        while self._sent and self._sent[0].tracker.done:
            self._end(self._sent.popleft())
        if self.num_pending >= self._sweep_at:
            self.sweep()
            self._sweep_at = max(MAX_KEPT_BUFFERS, 2 * self.num_pending)

    def sweep(self) -> None:
        """Let go all that is done: messages to different peers end out of order."""
        for _ in range(len(self._sent)):
            sent = self._sent.popleft()
            if sent.tracker.done:
                self._end(sent)
            else:
                self._sent.append(sent)

    def _end(self, sent: _Sent) -> None:
        self.num_pending -= 1
        self.pending_bytes -= sent.size_bytes
        self.give_back(sent.buffer)
