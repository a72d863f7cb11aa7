"""As much of an HTTP client as a measurement needs: one request a socket, events as they come, cuts of both kinds."""

from __future__ import annotations

import socket
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import h11
import msgspec
import trio

from engine.errors import Cause, ConfigError, EngineDeadError

_CHUNK_BYTES = 1 << 16
_DONE = b"[DONE]"
_EVENT = b"data: "


class Address(NamedTuple):
    """Where a server listens; `path` stands before every route."""

    host: str
    port: int
    path: str

    @classmethod
    def of(cls, url: str) -> Address:
        """Parse `http://host:port[/path]`; raises ConfigError for anything else."""
        try:
            parts = urlsplit(url)
            port = parts.port or 80
        except ValueError:
            parts, port = urlsplit(""), 0
        if parts.scheme != "http" or not parts.hostname:
            raise ConfigError(f"--url must be like http://127.0.0.1:8000, got {url!r}")
        return cls(parts.hostname, port, parts.path.rstrip("/"))


class Answer:
    """One request's answer, to be read once; made by `open_answer`.

    Attributes:
        status: The HTTP status.
    """

    def __init__(self, stream: trio.SocketStream, connection: h11.Connection) -> None:
        """Read from `stream`, which `open_answer` owns."""
        self.status = 0
        self._stream = stream
        self._connection = connection
        self._rest = b""

    async def body(self) -> bytes:
        """Wait for all of it."""
        parts = []
        while (data := await self._data()) is not None:
            parts.append(data)
        return b"".join(parts)

    async def next_event(self) -> bytes | None:
        """Wait for the data of the next server-sent event; None after the last.

        Raises:
            EngineDeadError: The server ended the stream before its last event.
        """
        while True:
            while b"\n" in self._rest:
                line, _, self._rest = self._rest.partition(b"\n")
                if line.startswith(_EVENT):
                    data = line.removeprefix(_EVENT).strip()
                    return None if data == _DONE else data
            more = await self._data()
            if more is None:
                raise _lost("the server ended a stream without [DONE]")
            self._rest += more

    async def start(self) -> None:
        """Read the head."""
        event = await self._next()
        while isinstance(event, h11.InformationalResponse):
            event = await self._next()
        assert isinstance(event, h11.Response)
        self.status = event.status_code

    async def _data(self) -> bytes | None:
        event = await self._next()
        return bytes(event.data) if isinstance(event, h11.Data) else None

    async def _next(self) -> Any:
        try:
            while (event := self._connection.next_event()) is h11.NEED_DATA:
                self._connection.receive_data(await self._stream.receive_some(_CHUNK_BYTES))
        except (h11.RemoteProtocolError, trio.BrokenResourceError) as error:
            raise _lost(f"the server broke off an answer: {error}") from error
        return event


@asynccontextmanager
async def open_answer(address: Address, path: str, body: Any = None, *, resets: bool = False) -> AsyncIterator[Answer]:
    """Ask and give the answer once its head has come; leaving the block closes the socket, with RST if it `resets`.

    GET without a `body`, else POST of it as JSON.

    Raises:
        ConfigError: Nobody listens at `address`.
        EngineDeadError: The server broke off.
    """
    try:
        stream = await trio.open_tcp_stream(address.host, address.port)
    except OSError as error:
        raise ConfigError(f"no server answers at http://{address.host}:{address.port}: {error}") from error
    try:
        if resets:
            stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection = h11.Connection(h11.CLIENT)
        content = b"" if body is None else msgspec.json.encode(body)
        headers = [("Host", f"{address.host}:{address.port}"), ("Connection", "close")]
        headers += [("Content-Type", "application/json"), ("Content-Length", str(len(content)))] if content else []
        head = h11.Request(method="POST" if content else "GET", target=address.path + path, headers=headers)
        data = connection.send(head) or b""
        data += (connection.send(h11.Data(content)) or b"") if content else b""
        await stream.send_all(data + (connection.send(h11.EndOfMessage()) or b""))
        answer = Answer(stream, connection)
        await answer.start()
        yield answer
    finally:
        stream.socket.close()


async def get(address: Address, path: str) -> bytes:
    """Return the body at `path`; any status but 200 raises ConfigError."""
    async with open_answer(address, path) as answer:
        body = await answer.body()
    check(answer.status, body)
    return body


def check(status: int, body: bytes) -> None:
    """Raise ConfigError with the server's own words unless `status` is 200."""
    if status != 200:
        raise ConfigError(f"the server answered {status}: {body[:500].decode(errors='replace')}")


def _lost(message: str) -> EngineDeadError:
    return EngineDeadError(Cause("ServerLost", message))
