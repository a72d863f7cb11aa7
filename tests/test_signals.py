"""The first signal asks, the second cancels, and a program may take some for itself."""

from __future__ import annotations

import os
import signal

import trio

from engine.signals import run_until_stopped


def send(number: int) -> None:
    os.kill(os.getpid(), number)


async def test_the_first_signal_asks_the_body_to_stop() -> None:
    async def body(stop: trio.Event) -> int:
        send(signal.SIGTERM)
        await stop.wait()
        return 7

    assert await run_until_stopped(body) == 7


async def test_a_second_signal_cancels_the_body() -> None:
    async def body(stop: trio.Event) -> int:
        send(signal.SIGTERM)
        await stop.wait()
        send(signal.SIGINT)
        await trio.sleep_forever()
        return 7

    assert await run_until_stopped(body) == 128 + signal.SIGINT


async def test_a_signal_that_was_taken_is_not_counted() -> None:
    taken: list[int] = []
    was_taken = trio.Event()

    def takes(number: int) -> bool:
        taken.append(number)
        was_taken.set()
        return len(taken) == 1

    async def body(stop: trio.Event) -> int:
        send(signal.SIGINT)
        await was_taken.wait()
        assert not stop.is_set()
        send(signal.SIGINT)
        await stop.wait()
        return 7

    assert await run_until_stopped(body, takes) == 7
    assert taken == [signal.SIGINT, signal.SIGINT]
