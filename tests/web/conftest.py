"""A served engine on a loopback port for every test of the room: real sockets, the null model, nothing in memory."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator, Callable
from typing import Any, NamedTuple

import openai
import pytest
import trio

from engine.config import ServeConfig
from engine.launch import open_engine
from web.listeners import open_listeners
from web.serve import serve
from web.state import ServerState


class Answer(NamedTuple):
    """One HTTP response, read whole."""

    status: int
    headers: dict[str, str]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        """OpenAI's error object; a body of any other form fails the test."""
        (content,) = self.json().values()
        assert self.json().keys() == {"error"}
        assert content.keys() == {"message", "type", "param", "code"}
        return content

    @property
    def events(self) -> list[Any]:
        """The data of a stream's events, decoded; `[DONE]` stays text."""
        blocks = [block for block in self.body.decode().split("\n\n") if block.startswith("data: ")]
        return [block[6:] if block == "data: [DONE]" else json.loads(block[6:]) for block in blocks]


class Served:
    """One running server with its engine."""

    def __init__(self, engine: Any, state: ServerState, listener: trio.SocketListener) -> None:
        self.engine = engine
        self.state = state
        self.listener = listener
        name = listener.socket.getsockname()
        self.path = name if isinstance(name, str) else None
        self.host, self.port = (None, None) if self.path else name
        self.stop = trio.Event()
        self.ended = trio.Event()

    @staticmethod
    def chat(**fields: Any) -> dict[str, Any]:
        """A chat request's body: 5 tokens, whatever they are."""
        return {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 5, "ignore_eos": True} | fields

    @staticmethod
    def http(method: str, path: str, body: Any = None, **headers: str) -> bytes:
        """The bytes of a request; `body` is JSON unless it is bytes already, an empty header is left out."""
        data = b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
        lines = {"Host": "localhost", "Content-Length": str(len(data)), "Content-Type": "application/json"}
        lines |= {name.replace("_", "-"): value for name, value in headers.items()}
        head = "".join(f"{name}: {value}\r\n" for name, value in lines.items() if value)
        return f"{method} {path} HTTP/1.1\r\n{head}\r\n".encode("latin1") + data

    async def connect(self) -> trio.SocketStream:
        if self.path:
            return await trio.open_unix_socket(self.path)
        return await trio.open_tcp_stream(self.host, self.port)

    async def post(self, body: Any, path: str = "/v1/chat/completions", **headers: str) -> Answer:
        return await self.request("POST", path, body, **headers)

    async def request(self, method: str, path: str, body: Any = None, **headers: str) -> Answer:
        """Send one request on a connection of its own and read the response to its end."""
        async with await self.connect() as stream:
            await stream.send_all(self.http(method, path, body, **{"Connection": "close"} | headers))
            received = b""
            while data := await stream.receive_some():
                received += data
        return parse_answer(received)

    async def open_stream(self, **fields: Any) -> trio.SocketStream:
        """Start a chat stream and return its connection, nothing read yet."""
        stream = await self.connect()
        await stream.send_all(self.http("POST", "/v1/chat/completions", self.chat(stream=True, **fields)))
        return stream

    async def with_client(self, use: Callable[[openai.OpenAI], Any]) -> Any:
        """Run `use(client)` with the real, synchronous `openai` client in a thread."""

        def run() -> Any:
            url = f"http://{self.host}:{self.port}/v1"
            with openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=10) as client:
                return use(client)

        return await trio.to_thread.run_sync(run)

    def counts(self) -> tuple[int, int, int]:
        stats = self.engine.stats()
        return stats.num_running, stats.num_waiting, stats.num_used_blocks

    async def wait_counts(self, reached: Callable[[int, int, int], bool]) -> None:
        """Wait until the engine's (running, waiting, used blocks) satisfy `reached`; a test's bound is fail_after."""
        with trio.fail_after(5):
            while not reached(*self.counts()):  # noqa: ASYNC110 - nobody tells when the figures change
                await trio.sleep(0.001)


def parse_answer(received: bytes) -> Answer:
    head, _, body = received.partition(b"\r\n\r\n")
    first, *lines = head.decode("latin1").split("\r\n")
    headers = {name.lower(): value for name, value in (line.split(": ", 1) for line in lines)}
    if headers.get("transfer-encoding") == "chunked":
        body = b"".join(_chunks(body))
    return Answer(int(first.split()[1]), headers, body)


def _chunks(body: bytes) -> Any:
    while body:
        size, _, body = body.partition(b"\r\n")
        yield body[: int(size, 16)]
        body = body[int(size, 16) + 2 :]


@contextlib.asynccontextmanager
async def _open_served(
    *,
    model: str = "null",
    drain_s: float = 0.0,
    max_body_bytes: int = 2**22,
    serve_config: ServeConfig | None = None,
    grammar_answer_time: float = 15,  # however busy the machine is
    **settings: Any,
) -> AsyncIterator[Served]:
    """Serve an engine; leaving it stops the server in order and then the engine."""
    config = serve_config or ServeConfig(port=0)
    with trio.fail_after(20):  # a test that hangs fails
        async with (
            open_engine(model, isolation="thread", grammar_answer_time=grammar_answer_time, **settings) as engine,
            open_listeners(config) as listeners,
            trio.open_nursery() as nursery,
        ):
            state = ServerState(engine, model_name=config.served_model_name)
            served = Served(engine, state, listeners[0])

            async def run(task_status: Any) -> None:
                await serve(
                    engine,
                    listeners,
                    state=state,
                    config=config,
                    drain_s=drain_s,
                    max_body_bytes=max_body_bytes,
                    shutdown_trigger=served.stop.wait,
                    task_status=task_status,
                )
                served.ended.set()

            await nursery.start(run)
            yield served
            served.stop.set()


@pytest.fixture
def open_served() -> Callable[..., contextlib.AbstractAsyncContextManager[Served]]:
    """Opens a server with settings of the test's own."""
    return _open_served


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    """A server of a null engine with a step time of 0, in which forms have time beside all of its steps."""
    async with _open_served() as served:
        yield served
