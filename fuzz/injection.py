"""A cancellation at every checkpoint: whatever was under way, nothing of it is left.

An operation is run again and again, its scope cancelled once at the 1st, 2nd, 3rd … step of its task, until it gets
through uncancelled. A step is what a task does between two checkpoints, so this reaches each of them: also those in
clean-up, where a shield delays the cancellation, and those where the task only passes by. Counting the steps of all
tasks instead gives every moment between two steps of anybody: finer, and for engines without threads repeatable.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Literal, NamedTuple

import trio

Moment = Literal["running", "asleep"]
MOMENTS: tuple[Moment, ...] = ("running", "asleep")

Operation = Callable[[], Awaitable[object]]
Check = Callable[[], Awaitable[object]]


class Counting(NamedTuple):
    """Which steps are counted, and when a step is cancelled.

    Attributes:
        moment: Just before the step ("running": a wake-up is on its way) or just after it ("asleep").
        of_all_tasks: Count every task's steps, not only those of the operation's own.
        starts_when: Whether to count by now.
    """

    moment: Moment = "running"
    of_all_tasks: bool = False
    starts_when: Callable[[], bool] = lambda: True


EVERY_STEP = Counting()


class Injection(trio.abc.Instrument):
    """Cancels a scope at the n-th step, of its own task or of any.

    Attributes:
        has_fired: Whether that step came.
    """

    def __init__(self, scope: trio.CancelScope, at_step: int, counting: Counting) -> None:
        """Cancel `scope` at that step; made in the task that runs the operation."""
        self.has_fired = False
        self._scope = scope
        self._left = at_step
        self._counting = counting
        self._task = None if counting.of_all_tasks else trio.lowlevel.current_task()

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        """Count, and cancel before the step."""
        if self._counting.moment == "running":
            self._count(task)

    def after_task_step(self, task: trio.lowlevel.Task) -> None:
        """Count, and cancel after the step."""
        if self._counting.moment == "asleep":
            self._count(task)

    def _count(self, task: trio.lowlevel.Task) -> None:
        if self._task in (None, task) and self._counting.starts_when():
            self._left -= 1
            if self._left == 0:
                self.has_fired = True
                self._scope.cancel()


class Outcome(NamedTuple):
    """What became of an operation.

    Attributes:
        was_cancelled: Whether its cancellation was sent.
        was_cut: Whether it ended because of it.
    """

    was_cancelled: bool
    was_cut: bool


async def cancelled_at(at_step: int, operation: Operation, counting: Counting = EVERY_STEP) -> Outcome:
    """Run `operation`, cancelled at that step."""
    with trio.CancelScope() as scope:
        injection = Injection(scope, at_step, counting)
        trio.lowlevel.add_instrument(injection)
        try:
            await operation()
        finally:
            trio.lowlevel.remove_instrument(injection)
    return Outcome(injection.has_fired, scope.cancelled_caught)


async def at_every_step(
    operation: Operation, check: Check, counting: Counting = EVERY_STEP, *, first: int = 1, every: int = 1
) -> int:
    """Cancel `operation` at step `first`, `first + every`, … and await `check` after each, until it gets through.

    Returns how many cancellations were sent.
    """
    at_step, num_sent = first, 0
    while (await cancelled_at(at_step, operation, counting)).was_cancelled:
        await check()
        at_step += every
        num_sent += 1
    await check()
    return num_sent
