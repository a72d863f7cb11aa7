"""One ZeroMQ socket whose calls never wait: what a plain thread with a poll needs.

High-water marks are 0 and linger is 0, as in `zmq_socket.py`. ZeroMQ does not show a peer's death; watch its process.
"""

from __future__ import annotations

import errno
from collections.abc import Sequence
from typing import cast

import zmq

from transport.tensors import Frame

Context = zmq.Context[zmq.Socket[bytes]]
"""Owns the I/O thread of a process's sockets."""
SocketKind = zmq.SocketType
"""ROUTER, DEALER, PUSH, PULL, ..."""
CAN_RECEIVE = int(zmq.POLLIN)
"""A bit of `events`."""

_NOBLOCK = int(zmq.NOBLOCK)


class UnknownPeerError(Exception):
    """A ROUTER knows no peer of this identity."""


class NonblockingSocket:
    """A ZeroMQ socket; messages are lists of frames. For one thread."""

    def __init__(self, context: Context, kind: SocketKind) -> None:
        """Open a socket of `kind` in `context`; it is owned here, until `close`."""
        self._socket = context.socket(kind)
        self._socket.linger = 0
        self._socket.sndhwm = self._socket.rcvhwm = 0
        if kind == SocketKind.ROUTER:
            self._socket.router_mandatory = True

    def fileno(self) -> int:
        """Return the descriptor that is readable when `events` may have changed; any call here clears it."""
        return self._socket.fileno()

    def bind(self, address: str) -> str:
        """Listen on `address` and return it as it became."""
        self._socket.bind(address)
        return self._socket.getsockopt_string(zmq.LAST_ENDPOINT)

    @property
    def events(self) -> int:
        """What can be done, as bits; reading them makes libzmq process what its descriptor tells of."""
        return cast(int, self._socket.getsockopt(zmq.EVENTS))

    def give(self, frames: Sequence[Frame]) -> bool:
        """Hand `frames` to libzmq as one message; False where it has no peer for it.

        Raises:
            UnknownPeerError: A ROUTER does not know the peer named by the first frame.
        """
        try:
            self._socket.send_multipart(frames, _NOBLOCK)
        except zmq.Again:
            return False
        except zmq.ZMQError as error:
            if error.errno != errno.EHOSTUNREACH:
                raise
            raise UnknownPeerError(f"no peer with identity {bytes(frames[0])!r} is connected") from None
        return True

    def take(self) -> list[bytes] | None:
        """Return the next message that waits, or None; a ROUTER's begins with the sender's identity."""
        try:
            return self._socket.recv_multipart(_NOBLOCK)
        except zmq.Again:
            return None

    def close(self) -> None:
        """Close at once; unsent messages are dropped. Idempotent."""
        self._socket.close()
