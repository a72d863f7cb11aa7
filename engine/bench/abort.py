"""Bench `abort`: streams over real sockets, all cut at random moments; how long until nothing of them is left.

The end is seen from outside, on `/metrics`, asked again as soon as it has answered: that asks nothing of the engine,
which has to find out by itself. So the times are at most one round trip too long.

Then the same without HTTP, where one can see to a fraction of a millisecond how long the engine holds blocks: streams
are left all at once at a moment of a step. `left to free` is what the caller sees, from before it leaves the first to
the engine's word that no block is in use any more; `seen to free` is the engine's share of that, by its own clock, from
the arrival of the first abort. Either may take what is left of a step that was under way, so the time of a step is
shown beside them, by the engine's clock too: from one launch to the next.
"""

from __future__ import annotations

import random
import secrets
import tempfile
from contextlib import AsyncExitStack
from itertools import pairwise
from pathlib import Path
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
from engine.client.async_llm import AsyncLLM
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
    with tempfile.TemporaryDirectory() as folder:
        async with open_engine(**msgspec.structs.asdict(config) | {"profile_dir": folder}) as llm:
            await llm.start_profile()
            left_s = [
                await _release(llm, Workload(cuts.num_streams, input_len, 0, cuts.seed + index), draw)
                for index in range(NUM_RELEASES)
            ]
            await llm.stop_profile()
        seen_s, steps_s = _read_traces(Path(folder), cuts.num_streams // config.data_parallel_size)
    step_s = float(np.median(steps_s))
    report.add("left_to_free_p99_beyond_one_step", 1000 * (float(np.percentile(left_s, 99)) - step_s), "ms")
    report.add("seen_to_free_p99_in_steps", float(np.percentile(seen_s, 99)) / step_s)
    report.add_times("left_to_free", left_s)
    report.add_times("seen_to_free", seen_s)
    report.add_times("one_step", steps_s)


async def _release(llm: AsyncLLM, workload: Workload, draw: random.Random) -> float:
    """Leave all streams of `workload` at a drawn moment of a step; return the seconds until no block was in use."""
    workload = workload._replace(output_len=llm.ready.max_model_len - workload.input_len)
    async with AsyncExitStack() as streams:
        for prompt in workload.prompts(llm.ready.vocab_size):
            generating = llm.generate(prompt, workload.params(), cache_salt=secrets.token_hex(8))
            stream = await streams.enter_async_context(generating)
        await anext(stream)  # the last to come has begun: all decode
        began_s, num_before = trio.current_time(), stream.usage.completion_tokens
        while stream.usage.completion_tokens < num_before + NUM_TIMED_STEPS:
            await anext(stream)
        step_s = (trio.current_time() - began_s) / (stream.usage.completion_tokens - num_before)
        await trio.sleep(draw.random() * step_s)
        left_s = trio.current_time()
    await llm.wait_for_stats(lambda stats: not (llm.num_live or stats.num_used_blocks))
    return trio.current_time() - left_s


def _read_traces(folder: Path, num_rows: int) -> tuple[list[float], list[float]]:
    """Return from the engines' own traces the seconds from aborts to blocks free, and those of steps of `num_rows`."""
    free_s: list[float] = []
    steps_s: list[float] = []
    for path in folder.iterdir():
        events = msgspec.json.decode(path.read_bytes())["traceEvents"]
        steps = [event for event in events if event["tid"] == "steps"]
        for step, following in pairwise(steps):
            if step["args"] == following["args"] == {"num_requests": num_rows, "num_tokens": num_rows}:
                steps_s.append((following["ts"] - step["ts"]) / 1e6)
        aborted_at: float | None = None
        for event in events:
            if event["name"] == "abort" and aborted_at is None:
                aborted_at = event["ts"]
            elif event["name"] == "blocks" and event["args"]["num_used"] == 0 and aborted_at is not None:
                free_s.append((event["ts"] - aborted_at) / 1e6)
                aborted_at = None
    return free_s, steps_s


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
