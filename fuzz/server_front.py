"""A server as the front of a round of fuzz/lifecycle.py, with clients that stream over HTTP and one that pauses."""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import trio

from fuzz.fronts import Front, Pace, Waiter, pace_of, running
from fuzz.http import post


class ServerFront(Front):
    """`serve`, with clients that stream; the last of them pauses it, and waits for them."""

    READY = re.compile(r"ready: .* on http://127\.0\.0\.1:(\d+) .*engine process(?:es)? (\d+)")

    def __init__(
        self, process: trio.Process, pace: Pace, clients: trio.Nursery, num_streams: int, drains: bool
    ) -> None:
        """Clients run in the nursery `clients`."""
        super().__init__(process, pace)
        self._clients = clients
        self._num_streams = num_streams
        self._drains = drains
        self._streams: list[_HttpStream] = []
        self._pause = _HttpStream("pause", self._tell)
        self._port = 0

    def _take(self, line: str) -> None:
        super()._take(line)
        if match := self.READY.search(line):
            self._port, self.engine_pid = int(match[1]), int(match[2])

    async def reach(self, phase: str, after_s: float) -> None:
        """See `Front`."""
        if phase == "start":
            await trio.sleep(after_s * 0.8)
            return
        await self.wait_for(lambda: any("starting: weights" in line for line in self.lines))
        if phase == "load":
            await trio.sleep(after_s * (0.03 if self.pace.step_ms else 2.0))
            return
        await self.wait_for(lambda: self._port)
        assert self._port, "the server did not come up"
        max_tokens = self.pace.drain_tokens if self._drains else 7000 if self.pace.step_ms else 1500
        prompt = "x" * (1000 if self.pace.step_ms else 300)
        for index in range(self._num_streams):
            stream = _HttpStream(f"stream-{index}", self._tell)
            self._streams.append(stream)
            body = {"prompt": prompt, "max_tokens": max_tokens, "stream": True, "ignore_eos": True}
            self._clients.start_soon(stream.run, self._port, post(body))
        if phase == "prefill":
            await trio.sleep(after_s * 0.1)
            return
        await self.wait_for(lambda: all(stream.num_chunks for stream in self._streams))
        self._clients.start_soon(self._pause.run, self._port, post(None, path="/pause?mode=wait"))
        await trio.sleep(after_s * 0.2)
        if phase != "decode":
            self.is_ending = True
            self.process.send_signal(signal.SIGTERM)
            await trio.sleep(after_s * 0.1)

    def codes_of_stop(self, numbers: Sequence[int], *, is_handled: bool) -> frozenset[int]:
        """See `Front`."""
        codes = {0}
        if len(numbers) > 1 or self.is_ending:
            codes |= {128 + number for number in numbers}
        if not is_handled:
            codes |= self.TERM_DEFAULT if numbers[0] == signal.SIGTERM else self.INT_DEFAULT
        return frozenset(codes)

    def codes_of_death(self) -> frozenset[int]:
        """See `Front`."""
        return frozenset({1})

    def waiters(self) -> list[Waiter]:
        """See `Front`."""
        pausing = [self._pause] if self._pause.has_asked else []
        return [Waiter(stream.name, stream.answer, stream.at) for stream in [*self._streams, *pausing]]

    def check_answers(self) -> None:
        """See `Front`."""
        answers = [waiter.answer for waiter in self.waiters()]
        if self.code == 0:
            assert set(answers) <= {"abort", "length", "paused", "503", "refused"}, f"after an orderly stop: {answers}"
        elif self.code == 1:
            assert set(answers) <= {"error", "abort", "length", "paused", "503", "500", "refused"}, (
                f"after a death: {answers}"
            )
            last = self.lines[-1]
            is_pythons_own = last == "KeyboardInterrupt" and self.engine_pid is None  # before our first line
            assert is_pythons_own or "the engine died" in last, f"no cause: {self.lines[-3:]}"
        assert not any("Traceback" in line for line in self.lines if self.code == 0), "a traceback of an orderly stop"

    async def check_goes_on(self) -> None:
        """See `Front`."""
        await self.wait_for(lambda: self._port)
        begun = {stream: stream.num_chunks for stream in self._streams}
        with trio.move_on_after(self.pace.news_s):
            await self.wait_for(lambda: all(stream.num_chunks > num or stream.answer for stream, num in begun.items()))
        held = [stream.name for stream, num in begun.items() if stream.num_chunks == num and not stream.answer]
        assert not held, f"nothing new for {held}"
        assert not any(stream.answer == "error" for stream in self._streams)


class _HttpStream:
    """A client that reads a stream to its end."""

    def __init__(self, name: str, tell: Callable[[], None]) -> None:
        self.name = name
        self.answer: str | None = None
        self.at = 0.0
        self.num_chunks = 0
        self.has_asked = False
        self._tell = tell

    async def run(self, port: int, request: bytes) -> None:
        self.has_asked = True
        received = b""
        try:
            async with await trio.open_tcp_stream("127.0.0.1", port) as stream:
                await stream.send_all(request)
                while data := await stream.receive_some():
                    received = (received + data)[-4000:]
                    self.num_chunks += 1
                    self._tell()
        except (OSError, trio.BrokenResourceError):
            received = received or b"refused"
        self.at = time.monotonic()
        self.answer = _answer_of(received)
        self._tell()


def _answer_of(received: bytes) -> str:
    """Say in one word how a stream ended, by its last words."""
    if received.startswith(b"HTTP/1.1 50"):
        return received[9:12].decode()
    if received in (b"refused", b""):
        return "refused"
    if b'{"status":"paused"}' in received:
        return "paused"
    if b"data: [DONE]" not in received:
        return "cut"
    if b'data: {"error"' in received:
        return "error"
    reasons = re.findall(rb'"finish_reason":"(\w+)"', received)
    return reasons[-1].decode() if reasons else "no reason"


def open_server(
    model: str, folder: Path, num_engines: int, num_streams: int, *, drains: bool
) -> AbstractAsyncContextManager[Front]:
    """Serve `model` with that many streams to come, in `folder`."""
    pace = pace_of(model)
    flags = ["--port", "0", "--max-num-batched-tokens", "64", "--num-threads", "1", "-dp", str(num_engines)]
    flags += ["--null-step-ms", str(pace.step_ms)] if model == "null" else []
    flags += ["--enable-operations", "--shutdown-timeout", "60" if drains else "0"]
    return running(
        ["engine", "serve", model, *flags],
        folder,
        lambda process, nursery: ServerFront(process, pace, nursery, num_streams, drains),
    )
