"""An engine process whose start or stop is cancelled at any step leaves nothing, and no stream without its end.

    python -m fuzz cancellations --minutes 2 --seed 7

Real processes and sockets. A round takes every step of a start, every step of a stop beside three streams, and both
moments of each; the seed draws their order. The test command takes every few.
"""

from __future__ import annotations

import os
import random
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import trio
import trio.testing

import engine
from engine.client.async_llm import AsyncLLM
from engine.sampling_params import SamplingParams
from fuzz.injection import MOMENTS, Counting, Moment, at_every_step
from fuzz.processes import children

NUM_STREAMS = 3


class Stop:
    """Leaves an engine on which streams run; their readers are not part of what is cancelled.

    Attributes:
        is_left: Whether the stop has begun.
        ends: Why each stream ended.
    """

    def __init__(self, readers: trio.Nursery, **settings: Any) -> None:
        """Open engines of the integer model with `settings`, and read their streams in the nursery `readers`."""
        self.is_left = False
        self.ends: list[str] = []
        self._readers = readers
        self._settings = settings

    async def act(self) -> None:
        """Open an engine and its streams, and leave it."""
        self.is_left = False
        self.ends.clear()
        async with engine.open_engine("null", **self._settings) as llm:
            started = [trio.Event() for _ in range(NUM_STREAMS)]
            for event in started:
                self._readers.start_soon(self._read, llm, event)
            for event in started:
                await event.wait()
            self.is_left = True

    async def check(self) -> None:
        """Check that each stream had its one end."""
        await trio.testing.wait_all_tasks_blocked()  # the readers had no step yet since their streams ended
        assert self.ends == ["abort"] * NUM_STREAMS, self.ends

    async def _read(self, llm: AsyncLLM, is_started: trio.Event) -> None:
        async with llm.generate([65] * 20, SamplingParams(max_tokens=8000)) as stream:
            async for delta in stream:
                is_started.set()
                if delta.finish_reason is not None:
                    self.ends.append(delta.finish_reason.value)


def check_nothing_is_left(folder: Path) -> None:
    """Check that this process has no child and `folder`, where its sockets go, no file."""
    processes = children(os.getpid())
    assert not processes, f"processes are left: {processes}"
    assert not list(folder.iterdir()), f"files are left: {list(folder.iterdir())}"


async def cancel_starts(folder: Path, moment: Moment, *, first: int = 1, every: int = 1) -> int:
    """Cancel the start of an engine process at these steps of any task; returns how often."""

    async def act() -> None:
        async with engine.open_engine("null", log_level="warning"):
            pass

    async def check() -> None:
        check_nothing_is_left(folder)

    return await at_every_step(act, check, Counting(moment, of_all_tasks=True), first=first, every=every)


async def cancel_stops(folder: Path, moment: Moment, *, first: int = 1, every: int = 1) -> int:
    """Cancel the stop of an engine process at these steps of the task that leaves it; returns how often."""
    async with trio.open_nursery() as readers:
        stop = Stop(readers, null_step_ms=1, log_level="warning")

        async def check() -> None:
            await stop.check()
            check_nothing_is_left(folder)

        return await at_every_step(
            stop.act, check, Counting(moment, starts_when=lambda: stop.is_left), first=first, every=every
        )


def run(minutes: float, seed: int) -> int:
    """Cancel starts and stops until the time is over; returns how many.

    Raises:
        AssertionError: Something was left.
    """
    deadline = time.monotonic() + 60 * minutes
    draw = random.Random(seed)
    num_cancelled = 0
    before = tempfile.tempdir
    with tempfile.TemporaryDirectory() as folder:
        tempfile.tempdir = folder
        try:
            while time.monotonic() < deadline:
                acts = [(act, moment) for act in (cancel_starts, cancel_stops) for moment in MOMENTS]
                for act, moment in draw.sample(acts, len(acts)):
                    if num_cancelled and time.monotonic() >= deadline:
                        break
                    num_cancelled += trio.run(partial(act, Path(folder), moment))
                    print(
                        f"cancellations: {num_cancelled} starts and stops were cancelled, nothing was left", flush=True
                    )
        finally:
            tempfile.tempdir = before
    return num_cancelled
