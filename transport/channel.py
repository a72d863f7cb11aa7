"""Typed channels over a ZeroMQ socket and the codec; in process, `trio.open_memory_channel` already is one.

A message that cannot be decoded costs itself alone: it is reported and skipped. ZeroMQ shows no end of a stream, so
receiving never raises `trio.EndOfChannel`; the end is a message, or the peer's process ending.

Channels may share one socket, as the senders to the peers of a ROUTER do. Closing a channel closes the socket only
where the channel owns it; a task that waits in a channel of a shared socket is ended by cancelling it, or by closing
the socket.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import deque
from collections.abc import Callable
from types import UnionType
from typing import Any, TypeVar

import trio
from trio.lowlevel import cancel_shielded_checkpoint

from transport.codec import DecodeError, Decoder, Encoder
from transport.tensors import Frame
from transport.zmq_socket import ZmqSocket

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
T_contra = TypeVar("T_contra", contravariant=True)

OnBadMessage = Callable[[DecodeError], Any]
"""Told of each bad message once those before it are taken; returns what is to be received in its place, None for
nothing; raises only what ends the receiving."""


class _Channel(trio.abc.AsyncResource):
    def __init__(self, socket: ZmqSocket, owns_socket: bool) -> None:
        self._socket = socket
        self._owns_socket = owns_socket
        self._is_closed = False

    def _check_open(self) -> None:
        if self._is_closed:
            raise trio.ClosedResourceError("this channel is closed")

    async def aclose(self) -> None:
        """Refuse further use, and close the socket where it is owned; never cancelled, idempotent."""
        self._is_closed = True
        if self._owns_socket:
            self._socket.close()
        await cancel_shielded_checkpoint()


class SendChannel(_Channel, trio.abc.SendChannel[T_contra]):
    """Sends messages of one type; several may share one socket."""

    def __init__(self, socket: ZmqSocket, *, to: bytes | None = None, owns_socket: bool = False) -> None:
        """Send on `socket`; to the peer of identity `to`, which a ROUTER needs and no other socket has."""
        super().__init__(socket, owns_socket)
        self._address = [] if to is None else [to]
        self._encoder = Encoder()

    async def send(self, value: T_contra) -> None:
        """Send `value`, in turn with other senders on the socket. Cancelled: not sent.

        Raises:
            TypeError: `value` holds something that cannot be sent.
            trio.BrokenResourceError: The ROUTER does not know the peer.
            trio.ClosedResourceError: The channel or its socket is closed.
        """
        self._check_open()
        buffer = self._socket.take_buffer()
        await self._socket.send([*self._address, *self._encoder.encode(value, buffer)], buffer)

    def send_nowait(self, value: T_contra) -> None:
        """Send `value` now.

        Raises:
            trio.WouldBlock: No peer has connected yet.
            TypeError, trio.BrokenResourceError, trio.ClosedResourceError: As in `send`.
        """
        self._check_open()
        buffer = self._socket.take_buffer()
        self._socket.send_nowait([*self._address, *self._encoder.encode(value, buffer)], buffer)


class _AnyReceiveChannel(_Channel, trio.abc.ReceiveChannel[T_co]):
    def __init__(self, socket: ZmqSocket, on_bad_message: OnBadMessage, owns_socket: bool) -> None:
        super().__init__(socket, owns_socket)
        self._on_bad_message = on_bad_message
        self._undecoded: deque[list[Frame]] = deque()

    @abstractmethod
    def _decode(self, frames: list[Frame]) -> T_co: ...

    async def receive(self) -> T_co:
        """Wait for the next good message; cancelled: it was not taken.

        Raises:
            trio.ClosedResourceError: The channel or its socket is closed, before or meanwhile.
        """
        (value,) = await self.receive_many(1)
        return value

    async def receive_many(self, limit: int = 64) -> list[T_co]:
        """Wait for a good message and return it with what else waits, at most `limit`: one checkpoint for all.

        Raises:
            ValueError: `limit` is below 1.
            trio.ClosedResourceError: The channel or its socket is closed, before or meanwhile.
        """
        self._check_open()
        if self._undecoded:
            await trio.lowlevel.checkpoint()
        while not (values := self._decoded(limit)):
            self._undecoded.extend(await self._socket.receive_many(limit))
        return values

    def receive_nowait(self) -> T_co:
        """Return the next good message that waits.

        Raises:
            trio.WouldBlock: None waits.
            trio.ClosedResourceError: The channel or its socket is closed.
        """
        self._check_open()
        while not (values := self._decoded(1)):
            self._undecoded.append(self._socket.receive_nowait())
        return values[0]

    def _decoded(self, limit: int) -> list[T_co]:
        """Decode at most `limit` messages, as far as the first bad one behind good ones: it is met in the next call."""
        values: list[T_co] = []
        while self._undecoded and len(values) < limit:
            try:
                values.append(self._decode(self._undecoded[0]))
            except DecodeError as error:
                if values:
                    break
                self._undecoded.popleft()
                instead: T_co | None = self._on_bad_message(error)
                if instead is not None:
                    values.append(instead)
            else:
                self._undecoded.popleft()
        return values


class ReceiveChannel(_AnyReceiveChannel[T]):
    """Receives messages of one type from a socket whose peers are not told apart."""

    def __init__(
        self,
        socket: ZmqSocket,
        message_type: type[T] | UnionType,
        *,
        on_bad_message: OnBadMessage,
        owns_socket: bool = False,
    ) -> None:
        """Receive `message_type` on `socket`; write `ReceiveChannel[A | B](socket, A | B, ...)` for a union."""
        super().__init__(socket, on_bad_message, owns_socket)
        self._decoder: Decoder[T] = Decoder(message_type)

    def _decode(self, frames: list[Frame]) -> T:
        return self._decoder.decode(frames)


class RouterReceiveChannel(_AnyReceiveChannel[tuple[bytes, T]]):
    """Receives `(identity, message)` on a ROUTER socket."""

    def __init__(
        self,
        socket: ZmqSocket,
        message_type: type[T] | UnionType,
        *,
        on_bad_message: OnBadMessage,
        owns_socket: bool = False,
    ) -> None:
        """Receive `message_type` on `socket`; write `RouterReceiveChannel[A | B](socket, A | B, ...)` for a union."""
        super().__init__(socket, on_bad_message, owns_socket)
        self._decoder: Decoder[T] = Decoder(message_type)

    def _decode(self, frames: list[Frame]) -> tuple[bytes, T]:
        identity, message = bytes(frames[0]), frames[1:]
        try:
            return identity, self._decoder.decode(message)
        except DecodeError as error:
            raise DecodeError(f"from peer {identity.hex()}: {error}", error.payload) from error
