"""What SIGINT and SIGTERM do to a program: the first asks it to stop, the second cancels it, the third ends it.

The handler itself does nothing: Trio's receiver hands the signal to a task. Only where no task takes any, because the
loop stands still, does the handler of the third one end the process. What signals do before and after is in
engine/early_signals.py, so that none falls between.
"""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from types import FrameType

import trio

from engine.early_signals import mark_begun
from engine.task_tree import answer_signals

logger = logging.getLogger(__name__)

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)
AT_ONCE_S = 0.3
"""What a cancelled body may take for its clean-up after the second signal: a step that is stuck is not waited for."""


def take_none(number: int) -> bool:
    """Leave every signal its usual meaning."""
    return False


async def run_until_stopped(
    body: Callable[[trio.Event], Awaitable[int]], takes: Callable[[int], bool] = take_none
) -> int:
    """Run `body(stop)` and return its exit code; `stop` is set by the first signal.

    A second signal cancels the body, whatever it is waiting for, and makes the exit code 128 + signal; after
    `AT_ONCE_S`, or a third signal, the process ends on the spot, and with it its children (transport/spawn.py).
    A signal for which `takes(number)` returns True has been dealt with and is not counted.
    """
    stop = trio.Event()
    scope = trio.CancelScope()
    exit_code = num_untaken = 0

    async def watch(signals: AsyncIterator[int]) -> None:
        nonlocal exit_code, num_untaken
        num_signals = 0
        async for number in signals:
            num_untaken = 0
            if takes(number):
                continue
            num_signals += 1
            name = signal.Signals(number).name
            if num_signals == 1:
                logger.info("%s: stopping (again to stop at once)", name)
                stop.set()
            elif num_signals == 2:
                logger.warning("%s: stopping at once", name)
                exit_code = 128 + number
                scope.cancel()
                nursery.start_soon(_exit_after, AT_ONCE_S, exit_code)
            else:
                os._exit(128 + number)

    with trio.open_signal_receiver(*STOP_SIGNALS) as signals:
        hand_over = signal.getsignal(signal.SIGTERM)
        assert callable(hand_over)

        def handle(number: int, frame: FrameType | None) -> None:
            nonlocal num_untaken
            num_untaken += 1
            if num_untaken == 3:
                os._exit(128 + number)
            hand_over(number, frame)

        for number in STOP_SIGNALS:
            signal.signal(number, handle)
        mark_begun()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(watch, signals)
            await nursery.start(answer_signals)
            with scope:
                exit_code = await body(stop)
            nursery.cancel_scope.cancel()
    return exit_code


async def _exit_after(grace_s: float, exit_code: int) -> None:
    await trio.sleep(grace_s)
    os._exit(exit_code)
