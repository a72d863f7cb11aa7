"""One HTTP/1.1 connection on hypercorn's protocol classes, hardened so that no client can hurt its neighbours.

hypercorn 0.18's own Trio connection (`hypercorn.trio.tcp_server.TCPServer`) lets one malformed client end the server,
waits without bound for a client that stops reading, does not notice a client that leaves while pipelined bytes wait,
and keeps a closed keep-alive connection until its idle timer ends. `Connection` takes its place:

* **A barrier.** Whatever goes wrong in a connection ends that connection alone.
* **Bounded sends.** A send may be cancelled, and a client that takes nothing for `SEND_STALL_S` is dropped.
* **A send that fits the socket's buffer does not yield**, which halves the cost of a streamed event.
* **HTTP/1.1 alone.** Upgrades (h2c, websocket) are ignored, as RFC 9110 section 7.8 allows; hypercorn's HTTP/2 buffers
  without bound.
* **Reading never pauses** while a response is under way, so that a client's leaving is noticed at once, in queue,
  prefill and decode, streaming or not. A half-closed client has left. Requests sent ahead are kept up to
  `MAX_PIPELINED_BYTES`; past that they are dropped and the connection closes after its response.
* **Lingering close.** A refusal that comes before the request's body was read still reaches the client.

Everything private of hypercorn that the project leans on is in this file; `tests/web/test_guard.py` says when it moves.
"""

from __future__ import annotations

import contextlib
import logging
import os
from typing import Any

import h11
import trio
from hypercorn.config import Config
from hypercorn.events import Closed, Event, RawData, Updated
from hypercorn.protocol.events import Body, EndBody, Request
from hypercorn.protocol.h11 import STREAM_ID, H11Protocol
from hypercorn.protocol.http_stream import HTTPStream
from hypercorn.trio.task_group import TaskGroup
from hypercorn.trio.worker_context import WorkerContext
from hypercorn.typing import AppWrapper, ConnectionState
from hypercorn.utils import parse_socket_addr

from engine.errors import root_cause
from web.errors import error_body

logger = logging.getLogger(__name__)

SEND_STALL_S = 30.0
"""A client that takes no byte for this long is dropped."""
HEAD_TIMEOUT_S = 30.0
"""The first request's head must be complete this long after connecting."""
LINGER_S = 1.0
"""How long unread input is drained after a refusal, so that closing does not reset the connection."""
MAX_PIPELINED_BYTES = 2**16
"""Bytes kept of requests sent ahead of the response under way."""
RECEIVE_BYTES = 2**16
SEND_BYTES = 2**18


class Connection:
    """One client's connection: requests in turn, each answered by the ASGI `app`.

    Owns `stream` and closes it. `run` ends when the client leaves, when it is idle for too long, after a response that
    cannot be followed by another, or when the server stops.
    """

    def __init__(self, app: AppWrapper, config: Config, context: WorkerContext, stream: trio.SocketStream) -> None:
        """Wrap `stream`; `context.terminated` is set once no further request may follow on any connection."""
        self._app = app
        self._config = config
        self._context = context
        self._stream = stream
        self._sending = trio.Lock()
        self._reading = trio.CancelScope(deadline=trio.current_time() + HEAD_TIMEOUT_S)
        self._is_idle = True
        self._client_left = False

    async def run(self) -> None:
        """Serve the connection to its end; raises nothing but Cancelled."""
        try:
            await self._serve()
        except* (OSError, trio.BrokenResourceError, trio.ClosedResourceError) as failures:
            logger.debug("connection lost: %r", root_cause(failures))
        except* Exception as failures:
            logger.warning("connection dropped: %r", root_cause(failures), exc_info=failures)

    def close_if_idle(self) -> None:
        """End the connection unless a request is under way; then its response is the last."""
        if self._is_idle:
            self._reading.cancel()

    def drop_if_stuck(self) -> None:
        """End the connection if a send waits for the client to read."""
        if self._sending.locked():
            self._drop()

    async def _serve(self) -> None:
        socket = self._stream.socket
        client = parse_socket_addr(socket.family, socket.getpeername())
        server = parse_socket_addr(socket.family, socket.getsockname())
        tasks = _Tasks()
        async with tasks:
            protocol = _Http11Protocol(
                self._app,
                self._config,
                self._context,
                tasks,
                ConnectionState({}),
                False,
                client,
                server,
                self._send_event,
            )
            with self._reading:
                await self._read(protocol)
            protocol.end()
            tasks.cancel()
        if protocol.has_unread_input and not self._client_left:
            await self._linger()

    async def _read(self, protocol: _Http11Protocol) -> None:
        with contextlib.suppress(trio.BrokenResourceError, trio.ClosedResourceError):
            while data := await self._stream.receive_some(RECEIVE_BYTES):
                await protocol.receive(bytes(data))
        self._client_left = True

    async def _send_event(self, event: Event) -> None:
        if isinstance(event, RawData):
            await self._send(event.data)
        elif isinstance(event, Updated):
            self._is_idle = event.idle
            idle_until = trio.current_time() + self._config.keep_alive_timeout
            self._reading.deadline = idle_until if event.idle else float("inf")
        else:
            self._reading.cancel()

    async def _send(self, data: bytes) -> None:
        if not self._sending.locked():
            try:
                num_sent = os.write(self._stream.socket.fileno(), data)
            except BlockingIOError:
                num_sent = 0
            except OSError:
                return self._drop()
            if num_sent == len(data):
                return None
            data = data[num_sent:]
        async with self._sending:
            try:
                for start in range(0, len(data), SEND_BYTES):
                    with trio.fail_after(SEND_STALL_S):
                        await self._stream.send_all(data[start : start + SEND_BYTES])
            except (trio.BrokenResourceError, trio.ClosedResourceError, trio.TooSlowError):
                self._drop()

    def _drop(self) -> None:
        self._client_left = True
        self._reading.cancel()
        self._stream.socket.close()

    async def _linger(self) -> None:
        with (
            trio.move_on_after(LINGER_S),
            contextlib.suppress(trio.BrokenResourceError, trio.ClosedResourceError),
        ):
            await self._stream.send_eof()
            while await self._stream.receive_some(RECEIVE_BYTES):
                pass


class _Tasks(TaskGroup):
    """The tasks of one connection: the request under way, and the reading of what was sent ahead."""

    def cancel(self) -> None:
        """Cancel them all; the request under way learns in this way that its client has left."""
        assert self._nursery is not None  # entered
        self._nursery.cancel_scope.cancel()


class _Http11Protocol(H11Protocol):
    """hypercorn's HTTP/1.1 without upgrades, which goes on taking bytes in while a response is under way."""

    connection: h11.Connection

    def __init__(self, *args: Any) -> None:
        """Take what `H11Protocol` takes."""
        super().__init__(*args)
        self._parsing = trio.Lock()
        self._drops_input = False

    @property
    def has_unread_input(self) -> bool:
        """Whether the client may still be sending what nobody will read."""
        return self._drops_input or self.connection.their_state in {h11.SEND_BODY, h11.ERROR}

    async def receive(self, data: bytes) -> None:
        """Take in bytes from the client; drop what is sent too far ahead, and what follows it."""
        if self._is_paused and len(self.connection.trailing_data[0]) + len(data) > MAX_PIPELINED_BYTES:
            self._drops_input = True
        if not self._drops_input:
            self.connection.receive_data(data)
            await self._handle_events()

    def end(self) -> None:
        """Let the request under way write no apology when it is cancelled."""
        if self.stream is not None:
            self.stream.closed = True

    @property
    def _is_paused(self) -> bool:
        return self.connection.their_state not in {h11.IDLE, h11.SEND_BODY}

    async def _handle_events(self) -> None:
        async with self._parsing:
            while await self._handle_next_event():
                pass

    async def _handle_next_event(self) -> bool:
        """Handle one event; return whether another may follow at once."""
        if self._is_paused:
            return False
        try:
            event = self.connection.next_event()
        except h11.RemoteProtocolError as error:
            await self._refuse(error)
            return False
        if isinstance(event, h11.Request):
            await self.send(Updated(idle=False))
            await self._create_stream(event)
            if self.connection.they_are_waiting_for_100_continue:
                await self._send_h11_event(h11.InformationalResponse(status_code=100, headers=[]))
        elif self.stream is not None and isinstance(event, h11.Data):
            await self.stream.handle(Body(stream_id=STREAM_ID, data=bytes(event.data)))
        elif self.stream is not None and isinstance(event, h11.EndOfMessage):
            await self.stream.handle(EndBody(stream_id=STREAM_ID))
        else:
            return False
        return True

    async def _create_stream(self, request: h11.Request) -> None:
        self.stream = HTTPStream(
            self.app,
            self.config,
            self.context,
            self.task_group,
            self.ssl,
            self.client,
            self.server,
            self.stream_send,
            STREAM_ID,
        )
        await self.stream.handle(
            Request(
                stream_id=STREAM_ID,
                headers=list(request.headers),
                http_version=request.http_version.decode("ascii"),
                method=request.method.decode("ascii").upper(),
                raw_path=request.target,
                state=self.connection_state,
            )
        )
        self.keep_alive_requests += 1

    async def _maybe_recycle(self) -> None:
        if self._drops_input:
            await self._close_stream()
            await self.send(Closed())
            return
        await super()._maybe_recycle()
        if self.connection.their_state is h11.IDLE and self.connection.trailing_data[0]:
            self.task_group.spawn(self._handle_events)

    async def _refuse(self, error: h11.RemoteProtocolError) -> None:
        if self.connection.our_state in {h11.IDLE, h11.SEND_RESPONSE}:
            body = error_body(error.error_status_hint, f"not a valid HTTP/1.1 request: {error}")
            headers = [
                ("content-type", "application/json"),
                ("content-length", str(len(body))),
                ("connection", "close"),
            ]
            await self._send_h11_event(h11.Response(status_code=error.error_status_hint, headers=headers))
            await self._send_h11_event(h11.Data(data=body))
            await self._send_h11_event(h11.EndOfMessage())
        await self.send(Closed())
