"""The fast driver: seeded histories one after another, until the time is over or one breaks a promise.

History `n` of seed `s` is the same on every machine. One that fails is shrunk, printed as a test, and kept among the
examples, which the test command replays.
"""

from __future__ import annotations

import contextlib
import gc
import math
import random
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from fuzz.coverage import Coverage
from fuzz.history import EXAMPLES, History, Target, replay, write_test
from fuzz.shrink import shrink

PROGRESS_INTERVAL_S = 5.0


class Failure(NamedTuple):
    """A history that broke a promise.

    Attributes:
        history: Settings and operations.
        number: Its number under its seed.
        error: What it raised.
    """

    history: History
    number: int
    error: Exception


class Progress(NamedTuple):
    """How far a run is; `cpu_seconds` are those that it had a processor."""

    num_histories: int
    num_steps: int
    seconds: float
    cpu_seconds: float

    def __str__(self) -> str:
        rate, cpu_rate = (self.num_steps / max(seconds, 1e-9) for seconds in (self.seconds, self.cpu_seconds))
        done = f"{self.num_histories} histories, {self.num_steps} steps in {self.seconds:.1f} s"
        return f"{done}, {rate:.0f} steps/s, {cpu_rate:.0f} per CPU second"


def _silent(progress: Progress) -> None:
    pass


@contextlib.contextmanager
def _collecting_seldom() -> Iterator[None]:
    """Look for cycles a hundred times less often while the block lasts: a history leaves few."""
    thresholds = gc.get_threshold()
    gc.set_threshold(100 * thresholds[0], *thresholds[1:])
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)


class Run:
    """Replays the histories of one seed.

    Attributes:
        progress: How far it is.
        coverage: What the histories have met.
    """

    def __init__(self, target: Target, seed: int, **fixed: Any) -> None:
        """Run `target`; `fixed` settings are not drawn."""
        self.progress = Progress(0, 0, 0.0, 0.0)
        self.coverage = Coverage()
        self._target = target
        self._seed = seed
        self._fixed = fixed

    def find(
        self, max_seconds: float, *, max_histories: float = math.inf, on_progress: Callable[[Progress], None] = _silent
    ) -> Failure | None:
        """Replay until one fails, which is returned, or as many or as long as may be; at least one is replayed."""
        begin = told = time.monotonic()
        begin_cpu = time.process_time()
        with self.coverage.recording_moves(), _collecting_seldom():
            while True:
                failure = self._replay_next()
                now = time.monotonic()
                cpu_seconds = time.process_time() - begin_cpu
                self.progress = self.progress._replace(seconds=now - begin, cpu_seconds=cpu_seconds)
                if failure or now - begin >= max_seconds or self.progress.num_histories >= max_histories:
                    return failure
                if now - told >= PROGRESS_INTERVAL_S:
                    told = now
                    on_progress(self.progress)

    def _replay_next(self) -> Failure | None:
        number, num_steps = self.progress.num_histories, self.progress.num_steps
        history = self._target.draw(random.Random(f"{self._seed}.{number}"), self._fixed)
        simulation = self._target.simulate(history.settings, self.coverage)
        failure = None
        try:
            replay(simulation, history.operations)
        except Exception as error:
            failure = Failure(history, number, error)
        self.progress = self.progress._replace(num_histories=number + 1, num_steps=num_steps + simulation.num_steps)
        return failure


def error_of(target: Target, history: History) -> Exception | None:
    """Return what `history` raises, or None."""
    try:
        replay(target.simulate(history.settings), history.operations)
    except Exception as error:
        return error
    return None


def shrunk(target: Target, failure: Failure) -> History:
    """Return the smallest history found that raises an error of the same type."""
    return shrink(failure.history, lambda history: type(error_of(target, history)) is type(failure.error))


def run(target: Target, minutes: float, seed: int, **fixed: Any) -> int:
    """Run histories until the time is over and report what they met; returns how many steps were made.

    Raises:
        SystemExit: A history broke a promise; it was shrunk, printed as a test, and kept.
    """
    this = Run(target, seed, **fixed)
    failure = this.find(
        60 * minutes,
        on_progress=lambda progress: print(f"{target.name}: {progress}, {this.coverage.summary()}", flush=True),
    )
    if failure is not None:
        _report(target, seed, failure)
        raise SystemExit(1)
    print(f"{target.name}: {this.progress}, clean\n\n{this.coverage.report()}")
    return this.progress.num_steps


def _report(target: Target, seed: int, failure: Failure) -> None:
    print(f"{target.name}: history {failure.number} of seed {seed} broke a promise; shrinking it", flush=True)
    history = shrunk(target, failure)
    error = error_of(target, history)
    assert error is not None
    traceback.print_exception(error)
    name, text = write_test(target, history, f"Found with seed {seed}: {type(error).__name__}: {error}")
    print(f"\n{text}")
    if EXAMPLES.is_dir():
        (EXAMPLES / name).write_text(text)
        print(f"kept as {EXAMPLES / name}")
