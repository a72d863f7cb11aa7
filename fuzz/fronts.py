"""Who owns the engine in a round of fuzz/lifecycle.py, in a process: a server, or a program with `open_engine`.

Either is brought to a phase, struck, and then held against what the contract says of such a blow.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractContextManager, asynccontextmanager
from pathlib import Path
from typing import NamedTuple

import trio

from fuzz.http import post
from fuzz.processes import Watched, children, command_of, descendants, files_of, send, takes_signal, watching

ANSWER_S = 1.0
"""How soon after a death is seen every waiter must have its answer."""
FATE_S = 1.0
"""How long to watch whether a signal that may or may not be ignored yet is deadly."""


class Pace(NamedTuple):
    """How fast a model is.

    Attributes:
        step_ms: Time of a step of the integer model.
        end_s: How long an orderly end may take.
        news_s: How soon after a hold-up every stream must have something new.
        drain_tokens: Length of streams that a drain waits for.
    """

    step_ms: float
    end_s: float
    news_s: float
    drain_tokens: int


PACES = {"null": Pace(2, end_s=15, news_s=5, drain_tokens=200)}
REAL_PACE = Pace(0, end_s=30, news_s=30, drain_tokens=12)


class Effect(NamedTuple):
    """What a blow must lead to.

    Attributes:
        codes: Exit codes that the front may have.
        is_harmless: Whether everything must go on.
        dead: The process that died of it, if one did.
    """

    codes: frozenset[int]
    is_harmless: bool = False
    dead: int | None = None


class Waiter(NamedTuple):
    """One who waits for the engine; `answer` and `at` are what it was told in the end, and when."""

    name: str
    answer: str | None
    at: float


class Front(ABC):
    """A process that owns an engine process; opened by `open_server` or `open_owner`."""

    TERM_DEFAULT = frozenset({-signal.SIGTERM})
    INT_DEFAULT = frozenset({-signal.SIGINT, 1, 128 + signal.SIGINT})
    """How Python itself ends, depending on where it is."""

    def __init__(self, process: trio.Process, pace: Pace) -> None:
        """Observe `process`."""
        self.process = process
        self.pace = pace
        self.lines: list[str] = []
        self.code: int | None = None
        self.engine_pid: int | None = None
        self._watched: Watched | None = None
        self._num_stops = 0
        self._news = trio.Event()
        self._output_ended = trio.Event()

    # -- to be said by each kind ----------------------------------------------------------------------------------

    @abstractmethod
    async def reach(self, phase: str, after_s: float) -> None:
        """Bring it to a phase and wait a share of that phase, `after_s` of 0 to 1."""

    @abstractmethod
    def codes_of_stop(self, numbers: list[int], *, is_handled: bool) -> frozenset[int]:
        """Exit codes after these signals were sent to the front, all in all."""

    @abstractmethod
    def codes_of_death(self) -> frozenset[int]:
        """Exit codes after the engine's death."""

    @abstractmethod
    def waiters(self) -> list[Waiter]:
        """All that ever waited, as far as is known from outside."""

    @abstractmethod
    def check_answers(self) -> None:
        """Check what the waiters were told against the exit code."""

    @abstractmethod
    async def check_goes_on(self) -> None:
        """Check that every stream gets something new."""

    # -- watching -------------------------------------------------------------------------------------------------

    async def read(self, stream: trio.abc.ReceiveStream) -> None:
        """Read its output until nobody holds it any more."""
        rest = b""
        async for chunk in stream:
            *lines, rest = (rest + chunk).split(b"\n")
            for line in lines:
                self._take(line.decode(errors="replace"))
            self._tell()
        self._output_ended.set()
        self._tell()

    def _take(self, line: str) -> None:
        self.lines.append(line)

    def _tell(self) -> None:
        self._news.set()
        self._news = trio.Event()

    async def wait_for(self, seen: Callable[[], object]) -> None:
        """Wait until `seen()`, or its output has ended."""
        while not (seen() or self._output_ended.is_set()):
            await self._news.wait()

    def watch_all(self) -> AbstractContextManager[Watched]:
        """Watch all its processes, as they are now."""
        return self._remember(watching([self.process.pid, *descendants(self.process.pid)]))

    @contextlib.contextmanager
    def _remember(self, watching_all: AbstractContextManager[Watched]):  # type: ignore[no-untyped-def]
        with watching_all as self._watched:
            yield self._watched

    def files(self) -> set[str]:
        """Return the paths of its sockets and shared memory."""
        return files_of([self.process.pid, *descendants(self.process.pid)])

    def find(self, target: str) -> list[int]:
        """Return the processes that `target` names, as far as they are there: none where it is not started yet."""
        front = self.process.pid
        all_of_it = [front, *descendants(front)]
        reapers = [pid for pid in children(front) if "-S" in command_of(pid)]
        match target:
            case "front":
                return [front]
            case "engine":
                return [pid for pid in children(front) if pid not in reapers]
            case "reaper":
                return reapers
            case _:
                return all_of_it

    # -- striking -------------------------------------------------------------------------------------------------

    async def strike(self, pids: list[int], blow: list[str], between_s: float) -> Effect:
        """Send the signals named by `blow` to `pids`, one after another; return what must come of it."""
        numbers = [signal.Signals[f"SIG{name}"] for name in blow]
        front = self.process.pid
        is_handled = takes_signal(front, signal.SIGTERM)  # Python has one for SIGINT before we have
        engines = [pid for pid in pids if pid != front and pid in self.find("engine")]
        for index, number in enumerate(numbers):
            if index:
                await trio.sleep(between_s)
            for pid in pids:
                send(pid, number)
        if front in pids and "STOP" not in blow:
            self._num_stops += len(numbers)
            if signal.SIGKILL in numbers:
                may_be_over = frozenset({0} if self._num_stops > len(numbers) else ())
                return Effect(frozenset({-signal.SIGKILL}) | may_be_over, dead=front)
            codes = self.codes_of_stop(
                [*numbers] * (1 if self._num_stops == len(numbers) else 2), is_handled=is_handled
            )
            return Effect(codes, dead=front)
        for engine in engines:
            if "STOP" not in blow and await self._dies(engine):
                codes = self.codes_of_death()
                return Effect(codes | frozenset({0}) if self._num_stops else codes, dead=engine)
        if self._num_stops:
            return Effect(frozenset({0}), dead=front)
        return Effect(frozenset(), is_harmless=True)

    async def _dies(self, pid: int) -> bool:
        assert self._watched is not None
        with trio.move_on_after(FATE_S):
            await self._watched.wait(pid)
            return True
        return False

    async def check_end(self, effect: Effect) -> None:
        """Wait for its end and check code, times and answers."""
        assert self._watched is not None
        began = time.monotonic()
        if effect.dead is not None and effect.dead != self.process.pid:
            await self._watched.wait(effect.dead)
            died_at = time.monotonic()
        with trio.move_on_after(self.pace.end_s) as waiting:
            self.code = await self.process.wait()
        assert not waiting.cancelled_caught, f"the front had not ended {self.pace.end_s:g} s after {effect}"
        if effect.dead in (None, self.process.pid):
            died_at = time.monotonic()
        with trio.move_on_after(ANSWER_S):
            await self._output_ended.wait()
            await self.wait_for(lambda: all(waiter.answer is not None for waiter in self.waiters()))
        took_s = time.monotonic() - began
        assert self.code in effect.codes, (
            f"exit code {self.code}, not one of {sorted(effect.codes)}, after {took_s:.2f} s"
        )
        if self.code >= 0:
            for waiter in self.waiters():
                late_s = waiter.at - died_at
                assert waiter.answer is not None, f"{waiter.name} was never answered"
                assert late_s < ANSWER_S, f"{waiter.name} was answered {late_s:.2f} s after the death was seen"
        self.check_answers()


class ServerFront(Front):
    """`serve`, with clients that stream."""

    READY = re.compile(r"ready: .* on http://127\.0\.0\.1:(\d+) .*engine process (\d+)")

    def __init__(
        self, process: trio.Process, pace: Pace, clients: trio.Nursery, num_streams: int, drains: bool
    ) -> None:
        """Clients run in the nursery `clients`."""
        super().__init__(process, pace)
        self._clients = clients
        self._num_streams = num_streams
        self._drains = drains
        self._streams: list[_HttpStream] = []
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
        await trio.sleep(after_s * 0.2)
        if phase != "decode":
            self._num_stops += 1
            self.process.send_signal(signal.SIGTERM)
            await trio.sleep(after_s * 0.1)

    def codes_of_stop(self, numbers: list[int], *, is_handled: bool) -> frozenset[int]:
        """See `Front`."""
        codes = {0}
        if len(numbers) > 1:
            codes |= {128 + number for number in numbers}
        if not is_handled:
            codes |= self.TERM_DEFAULT if numbers[0] == signal.SIGTERM else self.INT_DEFAULT
        return frozenset(codes)

    def codes_of_death(self) -> frozenset[int]:
        """See `Front`."""
        return frozenset({1})

    def waiters(self) -> list[Waiter]:
        """See `Front`."""
        return [Waiter(stream.name, stream.answer, stream.at) for stream in self._streams]

    def check_answers(self) -> None:
        """See `Front`."""
        answers = [stream.answer for stream in self._streams]
        if self.code == 0:
            assert set(answers) <= {"abort", "length", "503", "refused"}, f"after an orderly stop: {answers}"
        elif self.code == 1:
            assert set(answers) <= {"error", "abort", "length", "503", "500", "refused"}, f"after a death: {answers}"
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
        self._tell = tell

    async def run(self, port: int, request: bytes) -> None:
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
    if b"data: [DONE]" not in received:
        return "cut"
    if b'data: {"error"' in received:
        return "error"
    reasons = re.findall(rb'"finish_reason":"(\w+)"', received)
    return reasons[-1].decode() if reasons else "no reason"


class OwnerFront(Front):
    """A program with `open_engine` that tells what became of every waiter."""

    async def reach(self, phase: str, after_s: float) -> None:
        """See `Front`."""
        if phase == "start":
            await trio.sleep(after_s * 0.8)
            return
        await self.wait_for(lambda: self._said("phase"))
        if phase == "load":
            await trio.sleep(after_s * (0.03 if self.pace.step_ms else 2.0))
            return
        await self.wait_for(lambda: self._said("ready"))
        if phase == "prefill":
            await trio.sleep(after_s * 0.1)
            return
        await self.wait_for(self._is_under_way)
        await trio.sleep(after_s * 0.2)
        if phase != "decode":
            self._num_stops += 1
            assert self.process.stdin is not None
            await self.process.stdin.aclose()
            await trio.sleep(after_s * 0.1)

    def _said(self, word: str) -> list[list[str]]:
        return [line.split(maxsplit=3) for line in self.lines if line.startswith(f"{word} ")]

    def _is_under_way(self) -> bool:
        """Whether all streams have begun; those that a pause has overtaken wait."""
        is_pausing = any(words[2] == "pause" for words in self._said("waits"))
        return is_pausing or len(self._said("begun")) >= len(self._streams_said())

    def _streams_said(self) -> list[str]:
        return [words[2] for words in self._said("waits") if words[2].startswith("stream")]

    def codes_of_stop(self, numbers: list[int], *, is_handled: bool) -> frozenset[int]:
        """See `Front`."""
        codes = self.TERM_DEFAULT if signal.SIGTERM in numbers else self.INT_DEFAULT
        return codes | frozenset({0}) if self._num_stops > len(numbers) else codes

    def codes_of_death(self) -> frozenset[int]:
        """See `Front`."""
        return frozenset({0})

    def waiters(self) -> list[Waiter]:
        """See `Front`."""
        answers = {words[2]: (words[3], float(words[1])) for words in self._said("answered")}
        return [Waiter(words[2], *answers.get(words[2], (None, 0.0))) for words in self._said("waits")]

    def check_answers(self) -> None:
        """See `Front`."""
        if self.code == 0:
            (left,) = self._said("left")
            assert left[2] == "0", f"{left[2]} descriptors are left open"

    async def check_goes_on(self) -> None:
        """See `Front`."""
        await self.wait_for(lambda: self._said("ready"))
        assert self._said("ready"), "the engine did not come up"
        with trio.move_on_after(self.pace.news_s):
            await self.wait_for(self._is_under_way)
        assert self._is_under_way(), "a stream has not begun"
        assert not self._said("died")


@asynccontextmanager
async def _running(
    argv: list[str], folder: Path, make: Callable[[trio.Process, trio.Nursery], Front]
) -> AsyncIterator[Front]:
    process = await trio.lowlevel.open_process(
        [sys.executable, "-m", *argv],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**os.environ, "TMPDIR": str(folder), "OMP_NUM_THREADS": "1"},
    )
    assert process.stdout is not None
    assert process.stdin is not None
    try:
        async with trio.open_nursery() as nursery:
            front = make(process, nursery)
            nursery.start_soon(front.read, process.stdout)
            yield front
            nursery.cancel_scope.cancel()
    finally:
        if process.poll() is None:
            process.kill()
        with trio.CancelScope(shield=True):
            await process.wait()
            await process.stdin.aclose()
            await process.stdout.aclose()


def open_server(
    model: str, folder: Path, num_streams: int, *, drains: bool
) -> contextlib.AbstractAsyncContextManager[Front]:
    """Serve `model` with that many streams to come, in `folder`."""
    pace = PACES.get(model, REAL_PACE)
    flags = ["--port", "0", "--max-num-batched-tokens", "64", "--num-threads", "1"]
    flags += ["--null-step-ms", str(pace.step_ms)] if model == "null" else []
    flags += ["--shutdown-timeout", "60" if drains else "0"]
    return _running(
        ["engine", "serve", model, *flags],
        folder,
        lambda process, nursery: ServerFront(process, pace, nursery, num_streams, drains),
    )


def open_owner(
    model: str, folder: Path, num_streams: int, *, drains: bool
) -> contextlib.AbstractAsyncContextManager[Front]:
    """Run a program that owns an engine for `model`; it never drains."""
    pace = PACES.get(model, REAL_PACE)
    argv = ["fuzz.owner", model, str(pace.step_ms), str(num_streams), "0.05"]
    return _running(argv, folder, lambda process, nursery: OwnerFront(process, pace))
