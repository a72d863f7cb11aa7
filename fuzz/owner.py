"""A Trio program that owns an engine, for fuzz/lifecycle.py: says on standard output what became of every waiter.

    python -m fuzz.owner MODEL NULL_STEP_MS NUM_ENGINES NUM_STREAMS PAUSE_AFTER_S

It holds streams, asks a verb again and again and, some time later, for a pause that cannot end while they run. It
leaves the engine when it dies or when standard input ends. Lines are `WORD monotonic-time WHAT`.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Awaitable, Callable

import trio

import engine
from engine.client.async_llm import AsyncLLM
from engine.errors import EngineDeadError, RequestAborted, UtilityError, root_cause
from engine.protocol import PauseMode


def say(word: str, what: object) -> None:
    """Tell the fuzzer; a reader that is gone is no reason to end."""
    print(word, time.monotonic(), what, flush=True)


async def _stream(llm: AsyncLLM, index: int) -> None:
    say("waits", f"stream-{index}")
    try:
        async with llm.generate("x" * 400, engine.SamplingParams(max_tokens=7000, ignore_eos=True)) as stream:
            has_begun = False
            async for delta in stream:
                if not has_begun:
                    say("begun", f"stream-{index}")
                    has_begun = True
                if delta.finish_reason is not None:
                    say("answered", f"stream-{index} {delta.finish_reason}")
    except (EngineDeadError, RequestAborted) as end:
        say("answered", f"stream-{index} {type(end).__name__}")


async def _ask_again_and_again(llm: AsyncLLM) -> None:
    say("waits", "utility")
    try:
        while True:
            await llm.reset_prefix_cache()
            await trio.sleep(0.001)
    except (EngineDeadError, UtilityError) as end:
        say("answered", f"utility {type(end).__name__}")


async def _pause(llm: AsyncLLM, after_s: float) -> None:
    await trio.sleep(after_s)
    say("waits", "pause")
    try:
        await llm.pause(PauseMode.WAIT)
        say("answered", "pause done")
    except (EngineDeadError, UtilityError) as end:
        say("answered", f"pause {type(end).__name__}")


async def _wait_until_told() -> None:
    await trio.lowlevel.wait_readable(sys.stdin)


async def _main(model: str, null_step_ms: float, num_engines: int, num_streams: int, pause_after_s: float) -> None:
    before = len(os.listdir("/proc/self/fd"))
    try:
        async with (
            trio.open_nursery() as waiters,
            engine.open_engine(
                model,
                null_step_ms=null_step_ms,
                data_parallel_size=num_engines,
                max_num_batched_tokens=64,
                num_threads=1,
                progress=lambda phase, done, total: say("phase", phase),
            ) as llm,
        ):
            say("ready", llm.ready.pid)
            for index in range(num_streams):
                waiters.start_soon(_stream, llm, index)
            waiters.start_soon(_ask_again_and_again, llm)
            waiters.start_soon(_pause, llm, pause_after_s)
            async with trio.open_nursery() as leaving:
                leaving.start_soon(_first, _wait_until_told, leaving.cancel_scope)
                leaving.start_soon(_first, llm.wait_ended, leaving.cancel_scope)
            say("leaving", "")
    except* EngineDeadError as deaths:
        say("died", root_cause(deaths))
    say("left", len(os.listdir("/proc/self/fd")) - before)


async def _first(wait: Callable[[], Awaitable[object]], scope: trio.CancelScope) -> None:
    await wait()
    scope.cancel()


if __name__ == "__main__":
    trio.run(
        _main,
        sys.argv[1],
        float(sys.argv[2]),
        int(sys.argv[3]),
        int(sys.argv[4]),
        float(sys.argv[5]),
        restrict_keyboard_interrupt_to_checkpoints=True,  # it would cancel the waiters if it hit one of them
    )
