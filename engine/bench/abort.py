"""Bench `abort`: streams over real sockets, all cut at random moments; how long until nothing of them is left.

The end is seen from outside, on `/metrics`, asked again as soon as it has answered: that asks nothing of the engine,
which has to find out by itself. So the times are at most one round trip too long.

Then the same without HTTP, where one can see to a fraction of a millisecond how long the engine holds blocks: streams
are left all at once at a moment of a step, and the next thing the engine says shows whether their blocks are free. It
may take what is left of that step, so the time is shown beside that of a step.
"""

from __future__ import annotations

import random
import secrets
from contextlib import AsyncExitStack
from typing import NamedTuple

import msgspec
import numpy as np
import trio
from tqdm import tqdm

from engine.bench.http_client import check, get, open_answer
from engine.bench.report import Report
from engine.bench.serve import completion_body, read_stream
from engine.bench.server import Server, open_server
from engine.bench.workload import StreamTimes, Workload
from engine.config import EngineConfig
from engine.errors import Cause, EngineDeadError
from engine.launch import open_engine

NUM_TIMED_STEPS = 8
NUM_RELEASES = 100
"""How often the streams without HTTP are left: of fewer a 99th percentile says nothing."""
GIVE_UP_S = 10.0
"""A server that still holds something after so long has leaked it."""
_GAUGES = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")


class Cuts(NamedTuple):
    """How streams are cut.

    Attributes:
        num_streams: Open at once.
        num_rounds: How often.
        within_s: Each is cut at a moment drawn from this time after the round's start, by FIN or by RST.
        seed: The same seed draws the same moments.
    """

    num_streams: int
    num_rounds: int
    within_s: float
    seed: int


async def abort(config: EngineConfig, url: str | None, cuts: Cuts, input_len: int, output_len: int) -> Report:
    """Cut all streams, round after round, and report the times until running, waiting and used blocks were 0.

    Raises:
        EngineDeadError: Something was still held after `GIVE_UP_S`, or the request after the cuts failed.
    """
    async with open_server(config, url) as server:
        draw = random.Random(cuts.seed)
        idle_s: list[float] = []
        for index in tqdm(range(cuts.num_rounds), desc="Rounds", unit="round", disable=None):
            workload = Workload(cuts.num_streams, input_len, output_len, cuts.seed + index)
            await _cut_all(server, workload, cuts, draw)
            idle_s.append(await _wait_idle(server))
        after = StreamTimes()
        one = Workload(1, input_len, min(output_len, 8), cuts.seed)
        await read_stream(server, completion_body(server, one.prompts(server.vocab_size)[0], one), after)
        settings = {"model": server.model} | cuts._asdict() | {"input_len": input_len, "output_len": output_len}
        report = Report("abort", settings)
        report.add("cuts", cuts.num_streams * cuts.num_rounds)
        report.add_times("until_idle", idle_s)
        report.add_times("answer_after_the_cuts", after.whole_s)
    if url is None:
        await _add_releases(report, config, cuts, input_len)
    return report


async def _add_releases(report: Report, config: EngineConfig, cuts: Cuts, input_len: int) -> None:
    """Add how long blocks are held once their streams, of which none ends before, were left; and how long a step is."""
    draw = random.Random(cuts.seed)
    free_s: list[float] = []
    steps_s: list[float] = []
    async with open_engine(**msgspec.structs.asdict(config)) as llm:
        for index in range(NUM_RELEASES):
            workload = Workload(cuts.num_streams, input_len, llm.ready.max_model_len - input_len, cuts.seed + index)
            async with AsyncExitStack() as streams:
                for prompt in workload.prompts(llm.ready.vocab_size):
                    generating = llm.generate(prompt, workload.params(), cache_salt=secrets.token_hex(8))
                    stream = await streams.enter_async_context(generating)
                await anext(stream)  # the last to come has begun: all decode
                began_s, num_before = trio.current_time(), stream.usage.completion_tokens
                while stream.usage.completion_tokens < num_before + NUM_TIMED_STEPS:
                    await anext(stream)
                num_steps = stream.usage.completion_tokens - num_before
                steps_s.append((trio.current_time() - began_s) / num_steps)
                await trio.sleep(draw.random() * steps_s[-1])
            left_s = trio.current_time()
            await llm.wait_for_stats(lambda stats: not (llm.num_live or stats.num_used_blocks))
            free_s.append(trio.current_time() - left_s)
    report.add("beyond_one_step_p99", 1000 * float(np.percentile(free_s, 99) - np.median(steps_s)), "ms")
    report.add_times("blocks_free", free_s)
    report.add_times("one_step", steps_s)


async def _cut_all(server: Server, workload: Workload, cuts: Cuts, draw: random.Random) -> None:
    async with trio.open_nursery() as nursery:
        for prompt in workload.prompts(server.vocab_size):
            after_s, resets = draw.uniform(0, cuts.within_s), draw.random() < 0.5
            nursery.start_soon(_cut_one, server, workload, prompt, after_s, resets)


async def _cut_one(server: Server, workload: Workload, prompt: list[int], after_s: float, resets: bool) -> None:
    body = completion_body(server, prompt, workload)
    with trio.move_on_after(after_s):
        async with open_answer(server.address, "/v1/completions", body, resets=resets) as answer:
            if answer.status != 200:
                check(answer.status, await answer.body())
            while await answer.next_event() is not None:
                pass


async def _wait_idle(server: Server) -> float:
    """Return the seconds until every gauge was 0."""
    began_s = trio.current_time()
    while any(gauges := await _gauges(server)):
        if trio.current_time() - began_s > GIVE_UP_S:
            held = ", ".join(f"{name} {value:g}" for name, value in zip(_GAUGES, gauges, strict=True))
            raise EngineDeadError(Cause("Leaked", f"{GIVE_UP_S:g} s after the last cut the server still holds {held}"))
    return trio.current_time() - began_s


async def _gauges(server: Server) -> list[float]:
    values = dict.fromkeys(_GAUGES, 0.0)
    for line in (await get(server.address, "/metrics")).decode().splitlines():
        name = line.partition("{")[0]
        if name in values:
            values[name] += float(line.rpartition(" ")[2])
    return list(values.values())
