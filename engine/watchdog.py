"""Ends an engine that hangs: work is pending, and no step has ended for --step-timeout seconds.

Two guards, each of which only waits for a deadline that every step moves::

    the loop turns, a step does not end    Watchdog.run, a task       state to standard error, the engine ends
    the loop itself does not turn          an alarm of the system     stacks to standard error, SIGALRM ends the process

The alarm needs neither the loop nor the interpreter, and belongs to an engine's own process alone. As nothing of ours
has to run when it rings, nothing can ask whether the process itself was stopped meanwhile: whoever stops an engine at
work (SIGSTOP, a debugger) for longer than ALARM_FACTOR times the step's time ends it. A machine that sleeps does not,
for the alarm's clock stands still then.
"""

from __future__ import annotations

import faulthandler
import logging
import math
import signal
from collections.abc import Callable
from typing import NoReturn

import trio

from engine.errors import StepTimeout

logger = logging.getLogger(__name__)

MAX_LATE_S = 1.0
"""A deadline noticed later than that tells of a process that was stopped, not of a step that hangs."""
ALARM_FACTOR = 2
"""The alarm rings after so many times the step's time: the task comes first where it can."""


class Watchdog:
    """Waits for the step that does not end. Its owner says at each turn whether one, or the turn itself, is pending."""

    def __init__(self, timeout_s: float, alarm: Callable[[float], object] = lambda seconds: None) -> None:
        """Allow each step `timeout_s`, 0 for ever; `alarm(seconds)` sets the system's alarm, 0 takes it off."""
        self._timeout_s = timeout_s or math.inf
        self._alarm: Callable[[float], object] = alarm if timeout_s else lambda seconds: None
        self._scope = trio.CancelScope()
        self._deadline = math.inf

    def expect(self, is_pending: bool) -> None:
        """Let the time run while a step is pending, from when it began to be, or from the last step's end."""
        if is_pending != (self._deadline < math.inf):
            self._set(is_pending)

    def step_ended(self) -> None:
        """Begin anew."""
        self._deadline = math.inf

    async def run(self, report: Callable[[], object]) -> NoReturn:
        """Wait until a step does not end, call `report`, raise.

        Raises:
            StepTimeout: A step did not end.
        """
        while True:
            with trio.CancelScope(deadline=self._scope.deadline) as self._scope:
                await trio.sleep_forever()
            late_s = trio.current_time() - self._scope.deadline
            await trio.lowlevel.checkpoint()  # a step that has ended in the same moment says so first
            if trio.current_time() < self._scope.deadline:
                continue
            if late_s < MAX_LATE_S:
                break
            logger.warning("the process stood still for %.1f s: the step gets its time again", late_s)
            self._set(True)
        self._alarm(0)
        report()
        raise StepTimeout(
            f"work is pending and no step has ended for {self._timeout_s:g} seconds (--step-timeout): the engine's "
            "state and the stacks of its threads stand on standard error"
        )

    def _set(self, is_pending: bool) -> None:
        self._deadline = trio.current_time() + self._timeout_s if is_pending else math.inf
        self._scope.deadline = self._deadline
        self._alarm(ALARM_FACTOR * self._timeout_s if is_pending else 0)


def own_alarm() -> Callable[[float], object]:
    """Make SIGALRM write the stacks of all threads and end this process; return what sets the alarm."""
    faulthandler.register(signal.SIGALRM, all_threads=True, chain=True)
    return lambda seconds: signal.setitimer(signal.ITIMER_REAL, seconds)
