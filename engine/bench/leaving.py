"""How long an engine holds what callers have left, without HTTP, to a fraction of a millisecond.

Streams, a task each, all run, and end only by being left, at a drawn moment of a step. Times are counted from the
leaving, just before the abort is queued; what the engines do with it, and when, they note in their traces of steps. All
times are those of the system's clock, which this process and theirs share.
"""

from __future__ import annotations

import random
import secrets
import time
from bisect import bisect
from collections import deque
from collections.abc import Sequence
from itertools import count, pairwise
from pathlib import Path
from typing import NamedTuple

import msgspec
import trio
from tqdm import tqdm

from engine.bench.workload import Workload
from engine.client.async_llm import AsyncLLM
from engine.client.stream import Stream
from engine.errors import ConfigError

NUM_DEPARTURES = 400
"""How often one stream of all leaves: of fewer a 99th percentile says little."""
NUM_TIMED_STEPS = 8
MIN_OUTPUT_LEN = 64
"""Tokens that each stream needs to run on while others are begun and left."""


def output_len_of(llm: AsyncLLM, input_len: int) -> int:
    """Return how many tokens `llm` can answer such a prompt with.

    Raises:
        ConfigError: They are so few that streams would end before they are left.
    """
    output_len = llm.ready.max_model_len - input_len
    if output_len < 2 * MIN_OUTPUT_LEN:
        at_least = input_len + 2 * MIN_OUTPUT_LEN
        message = f"streams that run until they are left need a context of {at_least} tokens, and --max-model-len is"
        raise ConfigError(f"{message} {llm.ready.max_model_len}: give more, or a smaller --input-len")
    return output_len


class RunningStream(NamedTuple):
    """One stream and what ends it."""

    stream: Stream
    scope: trio.CancelScope


class RunningStreams:
    """Streams of `llm`, oldest first; each is read by a task of its own until it is left.

    Attributes:
        left_s: When each stream that was left was, just before its abort was queued.
    """

    def __init__(self, llm: AsyncLLM, nursery: trio.Nursery, workload: Workload) -> None:
        """Start with none; `nursery` has the tasks, `workload` says how long an answer may be."""
        self.left_s: list[float] = []
        self._llm = llm
        self._nursery = nursery
        self._workload = workload
        self._running: deque[RunningStream] = deque()

    async def begin(self, prompts: Sequence[list[int]]) -> None:
        """Open a stream for each prompt; return once all run, having got their first tokens."""
        async with trio.open_nursery() as beginning:
            for prompt in prompts:
                beginning.start_soon(self._begin_one, prompt)

    @property
    def may_end(self) -> bool:
        """Whether the oldest is so long that it might come to its own end before it is left."""
        return self._running[0].stream.usage.completion_tokens > self._workload.output_len - MIN_OUTPUT_LEN

    async def leave_oldest(self) -> None:
        """Leave the oldest stream; return once the engine has told that its place is free."""
        self._running.popleft().scope.cancel()
        num_left = len(self._running)
        await self._llm.wait_for_stats(lambda stats: stats.num_running + stats.num_waiting <= num_left)

    async def _begin_one(self, prompt: list[int]) -> None:
        self._running.append(await self._nursery.start(self._read_until_left, prompt))

    async def _read_until_left(self, prompt: list[int], task_status: trio.TaskStatus[RunningStream]) -> None:
        with trio.CancelScope() as scope:
            async with self._llm.generate(prompt, self._workload.params(), cache_salt=secrets.token_hex(8)) as stream:
                try:
                    await anext(stream)
                    task_status.started(RunningStream(stream, scope))
                    async for _ in stream:
                        pass
                finally:
                    self.left_s.append(time.monotonic())


async def leave_one_by_one(llm: AsyncLLM, workload: Workload, draw: random.Random, until_s: float) -> list[float]:
    """Let all streams of a workload run, of which one leaves again and again, and another takes its place.

    Returns when each was left. None is left after `until_s`, by Trio's clock, but the first.
    """
    prompts = workload._replace(num_prompts=workload.num_prompts + NUM_DEPARTURES).prompts(llm.ready.vocab_size)
    async with trio.open_nursery() as nursery:
        streams = RunningStreams(llm, nursery, workload)
        await streams.begin(prompts[: workload.num_prompts])
        step_s = await _time_steps(llm)
        for prompt in tqdm(prompts[workload.num_prompts :], desc="Departures", unit="departure", disable=None):
            if streams.may_end or (streams.left_s and trio.current_time() > until_s):
                break
            await trio.sleep(draw.random() * step_s)
            await streams.leave_oldest()
            await streams.begin([prompt])
        left_s = streams.left_s.copy()
        nursery.cancel_scope.cancel()
    await _wait_free(llm)
    return left_s


class Burst(NamedTuple):
    """All streams of a workload left at once.

    Attributes:
        cancelled_s: When they were cancelled.
        left_s: When each was left.
        told_s: When its callers had been told that no block was in use any more.
    """

    cancelled_s: float
    left_s: list[float]
    told_s: float


async def leave_all(llm: AsyncLLM, workload: Workload, draw: random.Random) -> Burst:
    """Let all streams run for some steps, leave them at a drawn moment of one and wait until all is free."""
    async with trio.open_nursery() as nursery:
        streams = RunningStreams(llm, nursery, workload)
        await streams.begin(workload.prompts(llm.ready.vocab_size))
        await trio.sleep(draw.random() * await _time_steps(llm))
        cancelled_s = time.monotonic()
        nursery.cancel_scope.cancel()
    await _wait_free(llm)
    return Burst(cancelled_s, streams.left_s, time.monotonic())


class EngineTimes(NamedTuple):
    """What engines noted of their steps, in seconds.

    Attributes:
        steps_s: From one launch to the next, of steps in which every stream got a token.
        steps: From when to when each step was, in order.
        aborts_s: When messages with aborts arrived, in order.
        fewer_s: When there were fewer requests than before, in order: the place and the blocks of some are free.
        seen_to_free_s: From the arrival of the first abort of a burst until no block was in use.
        num_steps_between: How many steps of requests were launched between the arrival of its last abort and that
            moment, a burst.
    """

    steps_s: list[float]
    steps: list[tuple[float, float]]
    aborts_s: list[float]
    fewer_s: list[float]
    seen_to_free_s: list[float]
    num_steps_between: list[int]


def take_traces(folder: Path, num_rows: int) -> EngineTimes:
    """Read, and remove, what every engine has written into `folder`; where all run, a step has `num_rows`."""
    times = EngineTimes([], [], [], [], [], [])
    for path in sorted(folder.iterdir()):
        events = msgspec.json.decode(path.read_bytes())["traceEvents"]
        steps = [event for event in events if event["ph"] == "X" and event["cat"] == "steps"]
        for step, following in pairwise(steps):
            if step["args"] == following["args"] == {"num_requests": num_rows, "num_tokens": num_rows}:
                times.steps_s.append((following["ts"] - step["ts"]) / 1e6)
        times.steps.extend((step["ts"] / 1e6, (step["ts"] + step["dur"]) / 1e6) for step in steps)
        aborted_at: list[float] = []
        num_requests = 0
        for event in events:
            if event["name"] == "abort":
                aborted_at.append(event["ts"])
                times.aborts_s.append(event["ts"] / 1e6)
                continue
            if event["name"] != "load":
                continue
            if event["args"]["num_requests"] < num_requests:
                times.fewer_s.append(event["ts"] / 1e6)
            num_requests = event["args"]["num_requests"]
            if event["args"]["num_used_blocks"] == 0 and aborted_at:
                times.seen_to_free_s.append((event["ts"] - aborted_at[0]) / 1e6)
                launched = [step["ts"] for step in steps if step["args"]["num_requests"]]
                times.num_steps_between.append(sum(aborted_at[-1] < at < event["ts"] for at in launched))
                aborted_at.clear()
        path.unlink()
    for moments in (times.steps, times.aborts_s, times.fewer_s):
        moments.sort()
    return times


class Departures(NamedTuple):
    """What became of streams that left one by one, in seconds from each one's leaving.

    Attributes:
        seen_s: Until its abort had arrived.
        free_s: Until its place and blocks were free.
        beyond_s: The same without the longest step that was under way meanwhile.
    """

    seen_s: list[float]
    free_s: list[float]
    beyond_s: list[float]


def departures_of(left_s: Sequence[float], times: EngineTimes) -> Departures:
    """Find in what engines noted what became of the streams that left at `left_s`, each alone at its moment."""
    departures = Departures([], [], [])
    for at_s in left_s:
        free_at_s = times.fewer_s[bisect(times.fewer_s, at_s)]
        met = (step for step in times.steps[: bisect(times.steps, (free_at_s,))] if step[1] > at_s)
        departures.seen_s.append(times.aborts_s[bisect(times.aborts_s, at_s)] - at_s)
        departures.free_s.append(free_at_s - at_s)
        departures.beyond_s.append(free_at_s - at_s - max((end_s - begin_s for begin_s, end_s in met), default=0.0))
    return departures


async def _time_steps(llm: AsyncLLM) -> float:
    """Wait for some steps and return what one takes, in seconds."""
    began_s, steps = trio.current_time(), count()
    await llm.wait_for_stats(lambda _: next(steps) == NUM_TIMED_STEPS)
    return (trio.current_time() - began_s) / NUM_TIMED_STEPS


async def _wait_free(llm: AsyncLLM) -> None:
    await llm.wait_for_stats(lambda stats: not (llm.num_live or stats.num_used_blocks))
