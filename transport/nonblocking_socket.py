"""One ZeroMQ socket whose calls never wait: what `ZmqSocket` waits for under Trio, and a plain thread with a poll.

High-water marks are 0: what may be outstanding is bounded by admission, and a message that was accepted is never
dropped for want of room. Linger is 0: closing drops what was not yet written, so whoever needs its last word read waits
for an acknowledgement. ZeroMQ does not show a peer's death; watch its process.

Frames of `COPY_THRESHOLD` bytes and more are not copied, in either direction: below, libzmq's book-keeping for one
costs more than the copy it saves.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import cast

import zmq

from transport.address import Curve, check_connecting, check_listening
from transport.pending_sends import PendingSends
from transport.tensors import Frame

Context = zmq.Context[zmq.Socket[bytes]]
"""Owns the I/O thread of a process's sockets."""
SocketKind = zmq.SocketType
"""ROUTER, DEALER, PUSH, PULL, ..."""

COPY_THRESHOLD = zmq.COPY_THRESHOLD
"""Smaller frames are copied; 64 KiB, from where on a copy costs more CPU time than its absence (measured)."""
CAN_RECEIVE, CAN_SEND = int(zmq.POLLIN), int(zmq.POLLOUT)
"""Bits of `events`."""

_NOBLOCK, _MORE = int(zmq.NOBLOCK), int(zmq.SNDMORE)


class UnknownPeerError(Exception):
    """A ROUTER knows no peer of this identity."""


class NonblockingSocket:
    """A ZeroMQ socket; messages are lists of frames. For one thread.

    A KeyboardInterrupt between two frames would tear their message: keep it away while a call runs.
    """

    def __init__(
        self, context: Context, kind: SocketKind, *, identity: bytes | None = None, curve: Curve | None = None
    ) -> None:
        """Open a socket of `kind` in `context`; it is owned here, until `close`.

        `identity` is the name under which a ROUTER peer knows this socket. A ROUTER here refuses to send to a peer it
        does not know instead of dropping the message. With `curve` only encrypted peers with the right key connect.
        """
        self._socket = context.socket(kind)
        self._socket.linger = 0
        self._socket.sndhwm = self._socket.rcvhwm = 0
        if kind == SocketKind.ROUTER:
            self._socket.router_mandatory = True
        if identity is not None:
            self._socket.identity = identity
        if curve is not None:
            self._encrypt(curve)
        self._curve = curve
        self._pending = PendingSends()

    def _encrypt(self, curve: Curve) -> None:
        if curve.secret_key is not None:
            self._socket.curve_server = True
            self._socket.curve_publickey, self._socket.curve_secretkey = curve.public_key, curve.secret_key
        else:
            self._socket.curve_serverkey = curve.public_key
            self._socket.curve_publickey, self._socket.curve_secretkey = zmq.curve_keypair()

    def fileno(self) -> int:
        """Return the descriptor that is readable when `events` may have changed; any call here clears it."""
        return self._socket.fileno()

    def bind(self, address: str) -> str:
        """Listen on `address` and return it as it became: a wildcard port is filled in.

        Raises:
            OSError: The address cannot be had, or others could be heard on it.
        """
        check_listening(address, self._curve)
        with _os_error_about("bind", address):
            self._socket.bind(address)
        return self._socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def connect(self, address: str) -> None:
        """Connect to `address`, now or whenever somebody listens there.

        Raises:
            OSError: The address is malformed, or messages would leave this machine in the clear.
        """
        check_connecting(address, self._curve)
        with _os_error_about("connect to", address):
            self._socket.connect(address)

    @property
    def events(self) -> int:
        """What can be done, as bits; reading them makes libzmq process what its descriptor tells of."""
        return cast(int, self._socket.getsockopt(zmq.EVENTS))

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._socket.closed

    @property
    def num_pending(self) -> int:
        """Messages sent without a copy and not yet written."""
        self._pending.sweep()
        return self._pending.num_pending

    @property
    def pending_bytes(self) -> int:
        """Bytes of the frames held for `num_pending` messages."""
        self._pending.sweep()
        return self._pending.pending_bytes

    def take_buffer(self) -> bytearray:
        """Give a buffer to encode a message into, to be passed to `give` with it."""
        return self._pending.take_buffer()

    def give(self, frames: Sequence[Frame], buffer: bytearray | None = None) -> bool:
        """Hand `frames` to libzmq as one message; False where it has no peer for it, as before the first connects.

        Large frames are not copied: leave them unchanged. `buffer`, from `take_buffer` and one of the frames, is used
        for a later message once this one is written; where this returns False or raises, it is still the caller's.

        Raises:
            UnknownPeerError: A ROUTER does not know the peer named by the first frame.
        """
        self._pending.reap()
        try:
            if not self._send(frames, buffer):
                # A send looks for libzmq's commands only once a millisecond; reading EVENTS does always.
                return bool(self.events & CAN_SEND) and self._send(frames, buffer)
        except zmq.ZMQError as error:
            if error.errno != errno.EHOSTUNREACH:
                raise
            raise UnknownPeerError(f"no peer with identity {bytes(frames[0]).hex()} is connected") from None
        return True

    def take(self) -> list[Frame] | None:
        """Return the next message that waits, or None; a ROUTER's begins with the sender's identity.

        Frames of `COPY_THRESHOLD` bytes and more are read-only views of libzmq's memory, which live as long as
        somebody refers to them; smaller ones are bytes.
        """
        try:
            part = self._socket.recv(_NOBLOCK, False)
        except zmq.Again:
            return None
        frames = [_contents(part)]
        while part.more:
            part = self._socket.recv(_NOBLOCK, False)
            frames.append(_contents(part))
        return frames

    def close(self) -> None:
        """Close at once; unsent messages are dropped. Idempotent."""
        self._socket.close()

    def _send(self, frames: Sequence[Frame], buffer: bytearray | None) -> bool:
        uncopied_bytes = 0
        trackers: list[zmq.MessageTracker] = []
        last = len(frames) - 1
        try:
            for number, frame in enumerate(frames):
                flags = _NOBLOCK if number == last else _NOBLOCK | _MORE
                size_bytes = frame.nbytes if isinstance(frame, memoryview) else len(frame)
                if size_bytes < COPY_THRESHOLD:
                    self._socket.send(frame, flags)
                    continue
                part = zmq.Frame(frame, track=True, copy=False)
                trackers.append(part.tracker)
                uncopied_bytes += size_bytes
                self._socket.send(part, flags, False)
        except zmq.Again:
            return False
        if trackers:
            self._pending.hold(trackers, frames, uncopied_bytes, buffer)
        else:
            self._pending.give_back(buffer)
        return True


def _contents(part: zmq.Frame) -> Frame:
    return part.bytes if len(part) < COPY_THRESHOLD else part.buffer.toreadonly()


@contextmanager
def _os_error_about(verb: str, address: str) -> Iterator[None]:
    try:
        yield
    except zmq.ZMQError as error:
        raise OSError(error.errno, f"cannot {verb} {address}: {error.strerror}") from None
