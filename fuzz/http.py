"""Whatever clients do to the port: a stream beside gets its exact text, nothing piles up, and a stop takes no longer.

A served integer model in processes of their own is visited by rude clients: random bytes, half requests, requests
pipelined, headers that come byte by byte, what is known to kill other servers, and streams cut at random moments::

    python -m fuzz http --minutes 5 --seed 7

Checked while it runs: streams beside get the tokens they get alone. Checked at the end: no request runs or waits, no
block is in use, descriptors and memory of the front are what they were, and SIGTERM ends it with code 0 within 2 s.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import signal
import socket
import struct
import sys
import time
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import trio

from engine.sampling_params import SamplingParams
from engine.testing import expected_tokens

HEAD = b"Host: x\r\n"
POST = b"POST /v1/completions HTTP/1.1\r\n" + HEAD + b"Content-Length: 5\r\n\r\nhello"
KILLERS = {
    "pipelined behind HTTP/1.0": [b"GET / HTTP/1.0\r\n\r\n", POST],
    "websocket upgrade and a byte": [
        b"GET / HTTP/1.1\r\n" + HEAD + b"Upgrade: websocket\r\nConnection: Upgrade\r\n"
        b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\nX"
    ],
    "h2c with malformed settings": [
        b"GET / HTTP/1.1\r\n"
        + HEAD
        + b"Upgrade: h2c\r\nConnection: Upgrade, HTTP2-Settings\r\nHTTP2-Settings: A\r\n\r\n"
    ],
    "h2 with prior knowledge": [b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"\0\0\0\4\0\0\0\0\0"],
}
"""What ends hypercorn's own server."""
PIECES = [
    *(piece for pieces in KILLERS.values() for piece in pieces),
    b"GET /health HTTP/1.1\r\n" + HEAD + b"\r\n",
    b"POST /v1/chat/completions HTTP/1.1\r\n" + HEAD + b"Transfer-Encoding: chunked\r\n\r\nZZ\r\n",
    b"POST /v1/chat/completions HTTP/1.1\r\n" + HEAD + b"Content-Length: 2\r\nContent-Type: application/json\r\n\r\n{}",
    b"GET http://[ HTTP/1.1\r\n" + HEAD + b"\r\n",
    b"GET ?x HTTP/1.1\r\n" + HEAD + b"\r\n",
    b"GET / HTTP/1.1\r\nHost: [\r\n\r\n",
    b"CONNECT x:1 HTTP/1.1\r\n" + HEAD + b"\r\n",
    b"GET / HTTP/1.1\r\n" + HEAD + b"Expect: 100-continue\r\nContent-Length: 9\r\n\r\n",
    b"\0\xff\r\n\r\n",
    b"\r\n",
    b"A" * 70_000,
]
"""What rude clients say, whole or cut, in any order."""

NUM_RUDE = 6
BESIDE_TOKENS = 400
STOP_S = 2.0
ZERO_S = 1.0
"""How soon after the last client has left nothing may run, wait or be held."""
MAX_GROWTH_BYTES = 32 * 2**20
WARM_UP = 0.2
"""Share of the time after which memory must not grow any more."""


class Target:
    """A serving process, and what can be seen of it from outside."""

    def __init__(self, process: trio.Process, port: int) -> None:
        """Watch `process`, which listens on `port`."""
        self.process = process
        self.port = port

    async def connect(self) -> trio.SocketStream:
        """Open a connection."""
        return await trio.open_tcp_stream("127.0.0.1", self.port)

    async def ask(self, request: bytes) -> bytes:
        """Send one request that closes its connection; return the whole response."""
        received = b""
        async with await self.connect() as stream:
            await stream.send_all(request)
            while data := await stream.receive_some():
                received += data
        return received

    async def counts(self) -> tuple[float, ...]:
        """Requests running and waiting and the share of blocks in use, as /metrics tells."""
        answer = (await self.ask(get("/metrics"))).decode()
        names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
        return tuple(float(re.findall(rf"^vllm:{name}{{.*}} (.*)$", answer, re.M)[0]) for name in names)

    def resident_bytes(self) -> int:
        """Memory of the front process."""
        return int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def num_descriptors(self) -> int:
        """Open files and sockets of the front process."""
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))


def get(path: str) -> bytes:
    """Return a request for `path` that closes its connection."""
    return f"GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode()


def post(body: dict[str, Any] | None, *, path: str = "/v1/completions", close: bool = True) -> bytes:
    """Return a completions request, or one without a body to another `path`."""
    data = b"" if body is None else json.dumps(body).encode()
    head = f"Host: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n"
    return f"POST {path} HTTP/1.1\r\n{head}{'Connection: close' if close else 'X: y'}\r\n\r\n".encode() + data


@contextlib.asynccontextmanager
async def serving(*arguments: str, wait_until_ready: bool = True) -> AsyncIterator[Target]:
    """Serve the integer model in the background; what still runs at the end is killed."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    argv = [sys.executable, "-m", "engine", "serve", "null", "--port", str(port), "--log-level", "error", *arguments]
    async with trio.open_nursery() as nursery:
        process = await nursery.start(partial(trio.run_process, argv, check=False))
        try:
            target = Target(process, port)
            if wait_until_ready:
                await _wait_until_ready(target)
            yield target
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.kill()


async def _wait_until_ready(target: Target) -> None:
    with trio.fail_after(60):
        while target.process.poll() is None:
            with contextlib.suppress(OSError):
                if b"HTTP/1.1 200" in await target.ask(
                    b"GET /health HTTP/1.1\r\nConnection: close\r\n" + HEAD + b"\r\n"
                ):
                    return
            await trio.sleep(0.05)
    raise RuntimeError("the server ended before it was ready")


class Visitors:
    """Clients, polite and rude, until the time is over."""

    def __init__(self, target: Target, seed: int, deadline: float) -> None:
        """Visit `target` until the monotonic time `deadline`; everything drawn comes from `seed`."""
        self._target = target
        self._draw = random.Random(seed)
        self._deadline = deadline
        self.num_rude = 0
        self.num_cut = 0
        self.num_beside = 0

    def _goes_on(self) -> bool:
        return time.monotonic() < self._deadline

    async def stream_beside(self) -> None:
        """Stream again and again, and compare each answer with what the model says by definition."""
        prompt = list(b"a stream beside")
        params = SamplingParams(temperature=0, max_tokens=BESIDE_TOKENS)
        expected = bytes(expected_tokens(prompt, params, BESIDE_TOKENS)).decode()
        body = {"prompt": prompt, "temperature": 0, "max_tokens": BESIDE_TOKENS, "stream": True, "ignore_eos": True}
        while self._goes_on():
            answer = await self._target.ask(post(body))
            events = [json.loads(data) for data in re.findall(rb"data: ({.*})", answer)]
            text = "".join(event["choices"][0]["text"] for event in events)
            assert text == expected, f"a stream beside was touched: {answer[-500:]!r}"
            assert b"data: [DONE]" in answer
            self.num_beside += 1

    async def rude_client(self) -> None:
        """Say something rude, in one of many ways, and leave in one of many ways."""
        ways = [
            self._say_pieces,
            self._say_pieces,
            self._trickle_head,
            self._say_noise,
            self._cut_stream,
            self._cut_stream,
        ]
        while self._goes_on():
            with contextlib.suppress(OSError, trio.BrokenResourceError):
                async with await self._target.connect() as stream:
                    await self._draw.choice(ways)(stream)
                    self._leave(stream)
            self.num_rude += 1

    async def _say_pieces(self, stream: trio.SocketStream) -> None:
        for piece in self._draw.choices(PIECES, k=self._draw.randint(1, 5)):
            end = self._draw.randint(1, len(piece)) if self._draw.random() < 0.3 else len(piece)
            await stream.send_all(piece[:end])
        await self._listen(stream, 0.02)

    async def _say_noise(self, stream: trio.SocketStream) -> None:
        await stream.send_all(self._draw.randbytes(self._draw.randint(1, 5000)))
        await self._listen(stream, 0.02)

    async def _trickle_head(self, stream: trio.SocketStream) -> None:
        for byte in self._draw.choice(PIECES)[:20]:
            await stream.send_all(bytes([byte]))
            await trio.sleep(0.01)

    async def _cut_stream(self, stream: trio.SocketStream) -> None:
        body = {"prompt": "x" * self._draw.randint(1, 300), "max_tokens": self._draw.randint(1, 2000)}
        body |= {"stream": self._draw.random() < 0.7, "n": self._draw.randint(1, 3), "ignore_eos": True}
        request = post(body, close=False) * self._draw.randint(1, 2)
        end = self._draw.randint(1, len(request)) if self._draw.random() < 0.2 else len(request)
        await stream.send_all(request[:end])
        await self._listen(stream, self._draw.random() * 0.1)
        self.num_cut += 1

    async def _listen(self, stream: trio.SocketStream, longest_s: float) -> None:
        with trio.move_on_after(longest_s):
            while await stream.receive_some():
                pass

    def _leave(self, stream: trio.SocketStream) -> None:
        way = self._draw.random()
        if way < 0.3:  # reset
            stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        elif way < 0.5:
            stream.socket.shutdown(socket.SHUT_WR)


async def _cut_64(target: Target) -> float:
    """Open 64 streams, cut all at once; return the seconds until nothing of them is left."""
    streams = [await target.connect() for _ in range(64)]
    for stream in streams:
        await stream.send_all(post({"prompt": "x", "max_tokens": 8000, "stream": True, "ignore_eos": True}))
    for stream in streams:
        await stream.receive_some()
    started = time.monotonic()
    for stream in streams:
        stream.socket.close()
    await _wait_nothing_left(target)
    return time.monotonic() - started


async def _wait_nothing_left(target: Target) -> None:
    with trio.fail_after(ZERO_S):
        while any(await target.counts()):  # noqa: ASYNC110 - nobody tells another process when the figures change
            await trio.sleep(0.01)


async def _fuzz(minutes: float, seed: int) -> int:
    async with serving("--null-step-ms", "2") as target:
        cut_s = await _cut_64(target)
        num_descriptors = target.num_descriptors()
        duration_s = 60 * minutes
        visitors = Visitors(target, seed, time.monotonic() + duration_s)
        warm_bytes = 0
        async with trio.open_nursery() as nursery:
            nursery.start_soon(visitors.stream_beside)
            for _ in range(NUM_RUDE):
                nursery.start_soon(visitors.rude_client)
            await trio.sleep(WARM_UP * duration_s)
            warm_bytes = target.resident_bytes()
        await _wait_nothing_left(target)
        growth_bytes = target.resident_bytes() - warm_bytes
        assert growth_bytes < MAX_GROWTH_BYTES, f"the front grew by {growth_bytes} bytes"
        left = target.num_descriptors() - num_descriptors
        assert left <= 0, f"{left} descriptors are left open"
        started = time.monotonic()
        target.process.send_signal(signal.SIGTERM)
        with trio.fail_after(STOP_S):
            code = await target.process.wait()
        stop_s = time.monotonic() - started
        assert code == 0, f"exit code {code}"
    print(
        f"http: {visitors.num_rude} rude clients, {visitors.num_cut} cut requests, {visitors.num_beside} streams beside"
    )
    print(f"64 streams cut at once were gone after {cut_s:.3f} s; the stop took {stop_s:.3f} s")
    print(f"the front grew by {growth_bytes / 2**20:.1f} MiB from {warm_bytes / 2**20:.0f} MiB on: clean")
    return visitors.num_rude


def run(minutes: float, seed: int) -> int:
    """Visit a server until the time is over; returns how many rude clients came.

    Raises:
        AssertionError: A promise was broken.
    """
    return trio.run(_fuzz, minutes, seed)
