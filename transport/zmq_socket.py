"""One ZeroMQ socket on Trio, for any number of tasks.

Three facts shape it (libzmq 4.3, `socket_base.cpp`; trio issue 116 tells what becomes of wrappers that miss them):

1. The socket's descriptor says that libzmq has commands to process, not that the socket is readable or writable, and
   *any* call may process them. A task asleep on it misses its wake-up unless, after every call made while somebody
   sleeps, EVENTS is read and whoever waits for one of its bits is woken.
2. There is one descriptor for both directions and Trio allows it one waiter: `Descriptor` lets tasks share it.
3. A message is taken or given by one call that does not block, with no cancellation point after it: a cancelled call
   has done nothing.

A send waits only while no peer has ever connected; `nonblocking_socket.py` says why.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import trio
import zmq
from trio.lowlevel import cancel_shielded_checkpoint, checkpoint_if_cancelled, enable_ki_protection

from transport.address import Curve
from transport.descriptor import Descriptor
from transport.nonblocking_socket import (
    CAN_RECEIVE,
    CAN_SEND,
    Context,
    NonblockingSocket,
    SocketKind,
    UnknownPeerError,
)
from transport.tensors import Frame

teardown = logging.getLogger("teardown")

__all__ = ["Context", "Curve", "SocketKind", "ZmqSocket", "open_context"]


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


class ZmqSocket(trio.abc.AsyncResource):
    """A ZeroMQ socket used from one Trio loop; messages are lists of frames."""

    def __init__(
        self, context: Context, kind: SocketKind, *, identity: bytes | None = None, curve: Curve | None = None
    ) -> None:
        """Open a socket of `kind` in `context`; it is owned here, until `aclose`.

        `identity` is the name under which a ROUTER peer knows this socket. A ROUTER here refuses to send to a peer it
        does not know instead of dropping the message. With `curve` only encrypted peers with the right key connect.
        """
        self._socket = NonblockingSocket(context, kind, identity=identity, curve=curve)
        self._descriptor = Descriptor(self._socket.fileno())
        self._receive_lock = trio.StrictFIFOLock()
        self._send_lock = trio.StrictFIFOLock()
        self._wanted = 0

    def bind(self, address: str) -> str:
        """Listen on `address` and return it as it became: a wildcard port is filled in.

        Raises:
            OSError: The address cannot be had, or others could be heard on it.
        """
        endpoint = self._socket.bind(address)
        self._wake_waiters()
        return endpoint

    def connect(self, address: str) -> None:
        """Connect to `address`, now or whenever somebody listens there.

        Raises:
            OSError: The address is malformed, or messages would leave this machine in the clear.
        """
        self._socket.connect(address)
        self._wake_waiters()

    @property
    def num_pending(self) -> int:
        """Messages sent without a copy and not yet written."""
        return self._socket.num_pending

    @property
    def pending_bytes(self) -> int:
        """Bytes of the frames held for `num_pending` messages."""
        return self._socket.pending_bytes

    def take_buffer(self) -> bytearray:
        """Give a buffer to encode a message into; pass it on to the send of that message."""
        return self._socket.take_buffer()

    @enable_ki_protection
    def send_nowait(self, frames: Sequence[Frame], buffer: bytearray | None = None) -> None:
        """Send one message now. Large frames are not copied: leave them unchanged.

        `buffer`, from `take_buffer` and one of the frames, is used again once the message is written.

        Raises:
            trio.WouldBlock: No peer has connected yet.
            trio.BrokenResourceError: A ROUTER does not know the peer named by the first frame.
            trio.ClosedResourceError: The socket is closed.
        """
        self._check_open()
        try:
            if not self._socket.give(frames, buffer):
                raise trio.WouldBlock
        except UnknownPeerError as error:
            raise trio.BrokenResourceError(str(error)) from None
        finally:
            self._wake_waiters()

    @enable_ki_protection
    async def send(self, frames: Sequence[Frame], buffer: bytearray | None = None) -> None:
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
                    self.send_nowait(frames, buffer)
                    break
                except trio.WouldBlock:
                    await self._wait_for(CAN_SEND)
        finally:
            self._send_lock.release()
        await cancel_shielded_checkpoint()

    @enable_ki_protection
    def receive_nowait(self) -> list[Frame]:
        """Return the next message that waits; a ROUTER's begins with the sender's identity.

        Large frames are read-only views of libzmq's memory, which live as long as somebody refers to them.

        Raises:
            trio.WouldBlock: None waits.
            trio.ClosedResourceError: The socket is closed.
        """
        messages = self._take_waiting(1)
        if not messages:
            raise trio.WouldBlock
        return messages[0]

    async def receive(self) -> list[Frame]:
        """Wait for the next message; cancelled: nothing was taken.

        Raises:
            trio.ClosedResourceError: The socket is closed, before or meanwhile.
        """
        (frames,) = await self.receive_many(1)
        return frames

    @enable_ki_protection
    async def receive_many(self, limit: int = 64) -> list[list[Frame]]:
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
                await self._wait_for(CAN_RECEIVE)
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

    def _wake_waiters(self) -> None:
        if self._wanted and self._socket.events & self._wanted:
            self._descriptor.wake()

    async def _wait_for(self, event: int) -> None:
        """Wait until EVENTS may have `event`; callers try again."""
        events = self._socket.events
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

    def _take_waiting(self, limit: int) -> list[list[Frame]]:
        self._check_open()
        messages: list[list[Frame]] = []
        while len(messages) < limit and (frames := self._socket.take()) is not None:
            messages.append(frames)
        self._wake_waiters()
        return messages


async def _acquire(lock: trio.StrictFIFOLock) -> None:
    try:
        lock.acquire_nowait()
    except trio.WouldBlock:
        await lock.acquire()
