"""One ZeroMQ socket on Trio, for any number of tasks; the only file that knows zmq.

Three facts shape it (libzmq 4.3, `socket_base.cpp`; trio issue 116 tells what becomes of wrappers that miss them):

1. The socket's descriptor says that libzmq has commands to process, not that the socket is readable or writable, and
   *any* call may process them. A task asleep on it misses its wake-up unless, after every call made while somebody
   sleeps, EVENTS is read and whoever waits for one of its bits is woken.
2. There is one descriptor for both directions and Trio allows it one waiter: `Descriptor` lets tasks share it.
3. A message is taken or given by one call that does not block, with no cancellation point after it: a cancelled call
   has done nothing.

High-water marks are 0: what may be outstanding is bounded by admission, and a message that was accepted is never
dropped for want of room. A send then waits only while no peer has ever connected. Linger is 0: closing drops what
was not yet written, so whoever needs its last word read waits for an acknowledgement. ZeroMQ does not show a peer's
death; watch its process.
"""

from __future__ import annotations

import errno
import logging
from collections import deque
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import cast

import trio
import zmq
from trio.lowlevel import cancel_shielded_checkpoint, checkpoint_if_cancelled, enable_ki_protection

from transport.descriptor import Descriptor
from transport.tensors import Frame

teardown = logging.getLogger("teardown")

Context = zmq.Context[zmq.Socket[bytes]]
"""Owns the I/O thread of a process's sockets; from `open_context`."""
SocketKind = zmq.SocketType
"""ROUTER, DEALER, PUSH, PULL, ..."""

_POLLIN, _POLLOUT, _NOBLOCK = int(zmq.POLLIN), int(zmq.POLLOUT), int(zmq.NOBLOCK)


@asynccontextmanager
async def open_context() -> AsyncIterator[Context]:
    """Give the context for this process's sockets; leaving ends it in a thread, for ending blocks.

    Close the sockets before; shielded, and short, for no socket lingers. Open it after any fork.
    """
    context: Context = zmq.Context()
    try:
        yield context
    finally:
        with trio.CancelScope(shield=True):
            await trio.to_thread.run_sync(context.destroy, 0)
        teardown.debug("context closed")


class PendingSends:
    """Keeps what was sent without a copy until libzmq has written it: the memory belongs to the wire meanwhile."""

    def __init__(self) -> None:
        self._pending: deque[tuple[zmq.MessageTracker, Sequence[Frame], int]] = deque()
        self.num_pending = 0
        self.pending_bytes = 0

    def hold(self, trackers: list[zmq.MessageTracker], frames: Sequence[Frame], size_bytes: int) -> None:
        """Keep `frames`, of which `size_bytes` are not copied, until all `trackers` are done."""
        self._pending.append((zmq.MessageTracker(*trackers), frames, size_bytes))
        self.num_pending += 1
        self.pending_bytes += size_bytes

    def reap(self) -> None:
        """Let go what was written; messages to different peers end out of order."""
        if not self.num_pending:
            return
        self._pending = deque(entry for entry in self._pending if not entry[0].done)
        self.num_pending = len(self._pending)
        self.pending_bytes = sum(size_bytes for _, _, size_bytes in self._pending)


class ZmqSocket(trio.abc.AsyncResource):
    """A ZeroMQ socket used from one Trio loop; messages are lists of frames."""

    def __init__(self, context: Context, kind: SocketKind, *, identity: bytes | None = None) -> None:
        """Open a socket of `kind` in `context`; it is owned here, until `aclose`.

        `identity` is the name under which a ROUTER peer knows this socket. A ROUTER here refuses to send to a peer it
        does not know instead of dropping the message.
        """
        self._socket = context.socket(kind)
        self._socket.linger = 0
        self._socket.sndhwm = self._socket.rcvhwm = 0
        if kind == SocketKind.ROUTER:
            self._socket.router_mandatory = True
        if identity is not None:
            self._socket.identity = identity
        self._descriptor = Descriptor(self._socket.fileno())
        self._receive_lock = trio.StrictFIFOLock()
        self._send_lock = trio.StrictFIFOLock()
        self._wanted = 0
        self._pending = PendingSends()

    def bind(self, address: str) -> str:
        """Listen on `address` and return it as it became: a wildcard port or path is filled in.

        Raises:
            OSError: The address cannot be had.
        """
        with _os_error_about("bind", address):
            self._socket.bind(address)
        endpoint = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._wake_waiters()
        return endpoint

    def connect(self, address: str) -> None:
        """Connect to `address`, now or whenever somebody listens there.

        Raises:
            OSError: The address is malformed.
        """
        with _os_error_about("connect to", address):
            self._socket.connect(address)
        self._wake_waiters()

    @property
    def num_pending(self) -> int:
        """Messages sent without a copy and not yet written."""
        self._pending.reap()
        return self._pending.num_pending

    @property
    def pending_bytes(self) -> int:
        """Bytes of the frames held for `num_pending` messages."""
        self._pending.reap()
        return self._pending.pending_bytes

    @enable_ki_protection
    def send_nowait(self, frames: Sequence[Frame]) -> None:
        """Send one message now. Large frames are not copied: leave them unchanged.

        Raises:
            trio.WouldBlock: No peer has connected yet.
            trio.BrokenResourceError: A ROUTER does not know the peer named by the first frame.
            trio.ClosedResourceError: The socket is closed.
        """
        self._check_open()
        self._pending.reap()
        try:
            if not self._give(frames):
                # A send looks for libzmq's commands only once a millisecond; reading EVENTS does always.
                self._events()
                if not self._give(frames):
                    raise trio.WouldBlock
        finally:
            self._wake_waiters()

    @enable_ki_protection
    async def send(self, frames: Sequence[Frame]) -> None:
        """Send one message, in turn with other senders; waits while no peer has connected. Cancelled: not sent.

        Raises:
            trio.BrokenResourceError: A ROUTER does not know the peer named by the first frame.
            trio.ClosedResourceError: The socket is closed, before or meanwhile.
        """
        await checkpoint_if_cancelled()
        await _acquire(self._send_lock)
        try:
            while True:
                try:
                    self.send_nowait(frames)
                    break
                except trio.WouldBlock:
                    await self._wait_for(_POLLOUT)
        finally:
            self._send_lock.release()
        await cancel_shielded_checkpoint()

    @enable_ki_protection
    def receive_nowait(self) -> list[bytes]:
        """Return the next message that waits; a ROUTER's begins with the sender's identity.

        Raises:
            trio.WouldBlock: None waits.
            trio.ClosedResourceError: The socket is closed.
        """
        messages = self._take_waiting(1)
        if not messages:
            raise trio.WouldBlock
        return messages[0]

    async def receive(self) -> list[bytes]:
        """Wait for the next message; cancelled: nothing was taken.

        Raises:
            trio.ClosedResourceError: The socket is closed, before or meanwhile.
        """
        (frames,) = await self.receive_many(1)
        return frames

    @enable_ki_protection
    async def receive_many(self, limit: int = 64) -> list[list[bytes]]:
        """Wait for a message and return it with what else waits, at most `limit`: one checkpoint for all.

        Raises:
            ValueError: `limit` is below 1.
            trio.ClosedResourceError: The socket is closed, before or meanwhile.
        """
        if limit < 1:
            raise ValueError(f"limit must be at least 1, got {limit}")
        await checkpoint_if_cancelled()
        await _acquire(self._receive_lock)
        try:
            while not (messages := self._take_waiting(limit)):
                await self._wait_for(_POLLIN)
        finally:
            self._receive_lock.release()
        await cancel_shielded_checkpoint()
        return messages

    def close(self) -> None:
        """Close at once; whoever waits gets `trio.ClosedResourceError`, unsent messages are dropped. Idempotent."""
        if self._socket.closed:
            return
        self._descriptor.close()
        self._socket.close()

    async def aclose(self) -> None:
        """Close as `close` does; a checkpoint that is never cancelled."""
        self.close()
        teardown.debug("socket closed")
        await cancel_shielded_checkpoint()

    def _check_open(self) -> None:
        if self._socket.closed:
            raise trio.ClosedResourceError("this zmq socket is closed")

    def _events(self) -> int:
        return cast(int, self._socket.getsockopt(zmq.EVENTS))

    def _wake_waiters(self) -> None:
        if self._wanted and self._events() & self._wanted:
            self._descriptor.wake()

    async def _wait_for(self, event: int) -> None:
        """Wait until EVENTS may have `event`; callers try again."""
        events = self._events()
        if events & self._wanted:
            self._descriptor.wake()
        if events & event:
            return
        self._wanted |= event
        try:
            await self._descriptor.wait()
        finally:
            self._wanted &= ~event
        self._check_open()

    def _take_waiting(self, limit: int) -> list[list[bytes]]:
        self._check_open()
        messages: list[list[bytes]] = []
        try:
            while len(messages) < limit:
                messages.append(self._socket.recv_multipart(_NOBLOCK))
        except zmq.Again:
            pass
        self._wake_waiters()
        return messages

    def _give(self, frames: Sequence[Frame]) -> bool:
        """Hand `frames` to libzmq as one message; False where it has no peer for it."""
        large_bytes = 0
        trackers: list[zmq.MessageTracker] = []
        parts: list[zmq.Frame | Frame] = []
        for frame in frames:
            size_bytes = memoryview(frame).nbytes
            if size_bytes < zmq.COPY_THRESHOLD:
                parts.append(frame)
                continue
            part = zmq.Frame(frame, track=True, copy=False)
            parts.append(part)
            trackers.append(part.tracker)
            large_bytes += size_bytes
        try:
            self._socket.send_multipart(parts, _NOBLOCK, copy=False)
        except zmq.Again:
            return False
        except zmq.ZMQError as error:
            if error.errno != errno.EHOSTUNREACH:
                raise
            raise trio.BrokenResourceError(f"no peer with identity {bytes(frames[0])!r} is connected") from None
        if trackers:
            self._pending.hold(trackers, frames, large_bytes)
        return True


@contextmanager
def _os_error_about(verb: str, address: str) -> Iterator[None]:
    try:
        yield
    except zmq.ZMQError as error:
        raise OSError(error.errno, f"cannot {verb} {address}: {error.strerror}") from None


async def _acquire(lock: trio.StrictFIFOLock) -> None:
    try:
        lock.acquire_nowait()
    except trio.WouldBlock:
        await lock.acquire()
