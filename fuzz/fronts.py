"""Who owns the engine in a round of fuzz/lifecycle.py, in a process: server_front.py or owner_front.py.

Either is brought to a phase, struck, and then held against what the contract says of such a blow.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import NamedTuple

import trio

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


_NULL_PACE = Pace(2, end_s=15, news_s=5, drain_tokens=200)
_REAL_PACE = Pace(0, end_s=30, news_s=30, drain_tokens=12)


def pace_of(model: str) -> Pace:
    """Return how fast `model` is."""
    return _NULL_PACE if model == "null" else _REAL_PACE


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
        self.is_ending = False  # it was asked to before any blow
        self._news = trio.Event()
        self._output_ended = trio.Event()

    # -- to be said by each kind ----------------------------------------------------------------------------------

    @abstractmethod
    async def reach(self, phase: str, after_s: float) -> None:
        """Bring it to a phase and wait a share of that phase, `after_s` of 0 to 1."""

    @abstractmethod
    def codes_of_stop(self, numbers: Sequence[int], *, is_handled: bool) -> frozenset[int]:
        """Exit codes after these signals were sent to the front, beside an end that it was asked for before."""

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

    @contextmanager
    def watch_all(self) -> Iterator[Watched]:
        """Watch all its processes, as they are now."""
        with watching([self.process.pid, *descendants(self.process.pid)]) as self._watched:
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
            case "engine":  # one of several; at an import Python asks ldconfig, which is none
                return [pid for pid in children(front) if "engine_process" in " ".join(command_of(pid))][-1:]
            case "reaper":
                return reapers
            case _:
                return all_of_it

    # -- striking -------------------------------------------------------------------------------------------------

    async def strike(self, pids: list[int], blow: list[str], between_s: float) -> Effect:
        """Send the signals named by `blow` to `pids`, one after another; return what must come of it."""
        numbers = [signal.Signals[f"SIG{name}"] for name in blow]
        front = self.process.pid
        orderly = frozenset({0} if self.is_ending else ())
        is_handled = takes_signal(front, signal.SIGTERM)  # Python has one for SIGINT before we have
        engines = [pid for pid in pids if pid != front and pid in self.find("engine")]
        for index, number in enumerate(numbers):
            if index:
                await trio.sleep(between_s)
            for pid in pids:
                send(pid, number)
        if front in pids and "STOP" not in blow:
            codes = frozenset({-signal.SIGKILL})
            if signal.SIGKILL not in numbers:
                codes = self.codes_of_stop(numbers, is_handled=is_handled)
            return Effect(codes | orderly, dead=front)
        for engine in engines:
            if "STOP" not in blow and await self._dies(engine):
                return Effect(self.codes_of_death() | orderly, dead=engine)
        if self.is_ending:
            return Effect(orderly, dead=front)
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
        if self.code >= 0 or self.code == -signal.SIGINT:  # Python sends itself that one, once all is left
            for waiter in self.waiters():
                late_s = waiter.at - died_at
                assert waiter.answer is not None, f"{waiter.name} was never answered"
                assert late_s < ANSWER_S, f"{waiter.name} was answered {late_s:.2f} s after the death was seen"
        self.check_answers()


@asynccontextmanager
async def running(
    argv: list[str], folder: Path, make: Callable[[trio.Process, trio.Nursery], Front]
) -> AsyncIterator[Front]:
    """Run `python -m argv` in `folder` for the block; what still runs at its end is killed."""
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
