"""Whatever dies, is stopped or is asked to end, at whatever moment: every waiter learns at once, and nothing is left.

    python -m fuzz lifecycle --minutes 10 --seed 7 [--model smollm2] [--rounds 500]

A round is a server (`serve`) or a program that owns an engine (fuzz/owner.py), in real processes, with streams open and
a pause that waits for them, in the program also verbs. Of the integer model there may be two engines. At a drawn moment
of a phase it strikes: a signal, or two, to the front, an engine, the reapers, or all of them. Checked each time:

- once a process is seen to have died, every waiter has its answer within a second: its terminal event, or an error
  with the cause; after an end that was asked for in order, never an error;
- the front ends by itself, in time, with the exit code that the contract gives for what happened;
- what changes nothing (a stop and a continue, a signal that is ignored) costs no stream anything;
- then no process of it lives, no socket, shared memory or temporary file of it is there, no descriptor is left open;
  what a front left that a signal ended before it had a reaper, the next start removes.
"""

from __future__ import annotations

import os
import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import trio

from fuzz.fronts import Front
from fuzz.owner_front import open_owner
from fuzz.server_front import open_server

PHASES = ("start", "load", "prefill", "decode", "drain", "stop")
TARGETS = ("front", "engine", "reaper", "all")
WEIGHTS = (4, 4, 1, 3)
BLOWS = ("KILL", "TERM", "TERM TERM", "INT", "STOP CONT")
FRONTS = {"server": open_server, "owner": open_owner}
NUM_AT_ONCE = 3
ROUND_S = 300.0
"""A round that takes longer hangs."""
GONE_S = 2.0
"""How soon after the front's end every process of it must have ended."""

NEXT_START = [sys.executable, "-c", "from engine.handshake import open_socket_folder\nwith open_socket_folder(): pass"]
"""What each start begins with: it removes what dead owners left."""


class Case(NamedTuple):
    """What a round does; every time in seconds."""

    front: str
    phase: str
    target: str
    blow: str
    num_engines: int
    num_streams: int
    after_s: float
    between_s: float

    @classmethod
    def drawn(cls, draw: random.Random, max_engines: int = 2) -> Case:
        """Draw one; what would only be a stop asked for twice over is left out."""
        while True:
            (target,), blow = draw.choices(TARGETS, WEIGHTS), draw.choice(BLOWS)
            if not (target == "all" and blow == "KILL"):  # nobody is left who could be asked anything
                break
        front = draw.choice(list(FRONTS))
        return cls(
            front,
            draw.choice(PHASES),
            target,
            blow,
            num_engines=draw.randint(1, max_engines),
            num_streams=draw.randint(0, 6),
            after_s=draw.random() ** 2,
            between_s=draw.random() * 0.3,
        )


class Chaos:
    """Rounds until the time is over or enough were done; several at once."""

    def __init__(self, draw: random.Random, model: str, deadline: float, max_rounds: int | None) -> None:
        """Draw cases from `draw` until the monotonic time `deadline`."""
        self._draw = draw
        self._model = model
        self._deadline = deadline
        self._max_rounds = max_rounds
        self.num_begun = 0
        self.covered: Counter[tuple[str, str, str, str]] = Counter()

    async def run(self) -> None:
        """Play rounds, `NUM_AT_ONCE` at a time."""
        async with trio.open_nursery() as nursery:
            for _ in range(NUM_AT_ONCE):
                nursery.start_soon(self._play)

    async def _play(self) -> None:
        while time.monotonic() < self._deadline and self.num_begun != self._max_rounds:
            self.num_begun += 1
            number, case = self.num_begun, Case.drawn(self._draw, 2 if self._model == "null" else 1)
            try:
                await play(case, self._model)
            except BaseException as error:
                error.add_note(f"in round {number}: {case}")
                raise
            self.covered[case.front, case.phase, case.target, case.blow] += 1
            num_done = self.covered.total()
            if num_done % 20 == 0:
                print(f"lifecycle: {num_done} rounds, {len(self.covered)} kinds of them, clean so far", flush=True)

    def table(self) -> str:
        """Return how often each blow hit each process in each phase."""
        lines = [f"{'phase':8} {'blow':10}" + "".join(f"{target:>8}" for target in TARGETS)]
        for phase in PHASES:
            for blow in BLOWS:
                counts = [sum(self.covered[front, phase, target, blow] for front in FRONTS) for target in TARGETS]
                lines.append(f"{phase:8} {blow:10}" + "".join(f"{count:8}" for count in counts))
        return "\n".join(lines)


async def play(case: Case, model: str) -> None:
    """Play one round.

    Raises:
        AssertionError: A promise was broken; says what was seen.
    """
    with tempfile.TemporaryDirectory(prefix="lifecycle-") as folder:
        opening = FRONTS[case.front](
            model, Path(folder), case.num_engines, case.num_streams, drains=case.phase == "drain"
        )
        async with opening as front:
            try:
                with trio.fail_after(ROUND_S):
                    await _play(case, front, folder)
            except BaseException as error:
                error.add_note("\n".join(["what the front said last:", *front.lines[-30:]]))
                raise
        left = os.listdir(folder)
        assert not left, f"files are left: {left}"


async def _play(case: Case, front: Front, folder: str) -> None:
    await front.reach(case.phase, case.after_s)
    struck, reapers = front.find(case.target), front.find("reaper")
    with front.watch_all() as watched:
        files = front.files()
        effect = await front.strike(struck, case.blow.split(), case.between_s)
        if effect.is_harmless:
            await front.check_goes_on()
            effect = await front.strike(front.find("front"), ["TERM"], 0.0)
        await front.check_end(effect)
        await watched.check_ended(GONE_S)
    if not reapers and front.code is not None and front.code < 0:
        await trio.run_process(NEXT_START, env={**os.environ, "TMPDIR": folder})
    _check_gone(files)


def _check_gone(files: set[str]) -> None:
    left = [path for path in files if os.path.exists(path)]
    assert not left, f"sockets or shared memory are left: {left}"


def run(minutes: float, seed: int, model: str = "null", rounds: int | None = None) -> int:
    """Play rounds until the time is over, or `rounds` of them; returns how many.

    Raises:
        AssertionError: A promise was broken.
    """
    chaos = Chaos(random.Random(seed), model, time.monotonic() + 60 * minutes, rounds)
    try:
        trio.run(chaos.run)
    finally:
        print(chaos.table(), file=sys.stderr)
    print(f"lifecycle: {chaos.covered.total()} rounds on {model}: every waiter was answered, nothing was left")
    return chaos.covered.total()
