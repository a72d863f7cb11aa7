"""Bench `abort`: streams over real sockets, all cut at random moments; how long until nothing of them is left.

The end is seen from outside, on `/metrics`, asked again as soon as it has answered: that asks nothing of the engine,
which has to find out by itself. So the times are at most one round trip too long.

Then the same without HTTP, where one can see to a fraction of a millisecond how long the engine holds blocks (see
leaving.py). `one leaves`: of all streams, which run on, one leaves at a moment of a step, and another takes its place.
`left to free` is from the leaving, just before the abort is queued, until its place and blocks are free in the engine;
`beyond its step` the same without the longest step that was under way meanwhile. The bar is on that.

`all leave`: all streams are cancelled at one moment of a step. `left to told` is what a caller sees, of every stream
for itself: from its leaving to the engine's word that no block is in use any more, not even of the stream that left
last. `cancelled to told` has the same end and begins with the cancellation of them all; between the two Trio ends the
tasks before one's own. `seen to free` is the engine's share, by its own clock, from the arrival of the first abort;
`outside the engine` what is left of each stream's time without it.

All but the last may take what is left of a step that was under way, so the time of `one step` is shown beside them, by
the engine's clock too: from one launch to the next, where every stream gets a token.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
import trio
from tqdm import tqdm

from engine.bench.http_client import check, get, open_answer
from engine.bench.leaving import (
    Burst,
    EngineTimes,
    departures_of,
    leave_all,
    leave_one_by_one,
    output_len_of,
    take_traces,
)
from engine.bench.report import Report
from engine.bench.serve import completion_body, read_stream
from engine.bench.server import Server, open_server
from engine.bench.workload import StreamTimes, Workload
from engine.config import EngineConfig
from engine.errors import Cause, ConfigError, EngineDeadError
from engine.launch import open_engine

NUM_BURSTS = 100
"""How often all streams without HTTP are left at once."""
MEASURED_S = 80.0
"""With a model that needs longer there are fewer rounds, which get half of it, departures, which get half of what is
left then or more, and bursts; the report says how many."""
MAX_BEYOND_A_STEP_MS = 3.0
"""How long after its leaving, beyond the step under way, 99 of 100 streams that leave alone may still hold blocks."""
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
    until_s = trio.current_time() + MEASURED_S
    async with open_server(config, url) as server:
        draw = random.Random(cuts.seed)
        idle_s: list[float] = []
        for index in tqdm(range(cuts.num_rounds), desc="Rounds", unit="round", disable=None):
            workload = Workload(cuts.num_streams, input_len, output_len, cuts.seed + index)
            await _cut_all(server, workload, cuts, draw)
            idle_s.append(await _wait_idle(server))
            if trio.current_time() > until_s - MEASURED_S / 2:
                break
        after = StreamTimes()
        one = Workload(1, input_len, min(output_len, 8), cuts.seed)
        await read_stream(server, completion_body(server, one.prompts(server.vocab_size)[0], one), after)
        settings = {"model": server.model} | cuts._asdict() | {"input_len": input_len, "output_len": output_len}
        report = Report("abort", settings)
        report.add("cuts", cuts.num_streams * len(idle_s))
        report.add("answer_after_the_cuts", 1000 * after.whole_s[0], "ms")
        report.add_times("until_idle", idle_s)
    if url is None:
        await _add_leaving(report, config, cuts, input_len, until_s)
    return report


async def _add_leaving(report: Report, config: EngineConfig, cuts: Cuts, input_len: int, until_s: float) -> None:
    """Add how long blocks are held once one stream of many was left, once all were left at once; and their steps.

    No burst begins after `until_s`, no departure in the last quarter of MEASURED_S before it; but the first does.
    """
    draw = random.Random(cuts.seed)
    num_streams = min(cuts.num_streams, config.max_num_seqs * config.data_parallel_size)
    if num_streams < config.data_parallel_size:
        engines = config.data_parallel_size
        raise ConfigError(f"--num-streams {num_streams} cannot be shared by {engines} engines: give at least {engines}")
    num_rows = num_streams // config.data_parallel_size
    bursts: list[Burst] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        async with open_engine(**msgspec.structs.asdict(config) | {"profile_dir": name}) as llm:
            workload = Workload(num_streams, input_len, output_len_of(llm, input_len), cuts.seed)
            await llm.start_profile()
            left_s = await leave_one_by_one(llm, workload, draw, until_s - MEASURED_S / 4)
            await llm.stop_profile()
            alone = take_traces(folder, num_rows)
            await llm.start_profile()
            for index in tqdm(range(NUM_BURSTS), desc="Bursts", unit="burst", disable=None):
                bursts.append(await leave_all(llm, workload._replace(seed=cuts.seed + index), draw))
                if trio.current_time() > until_s:
                    break
            await llm.stop_profile()
        times = take_traces(folder, num_rows)
    departures = departures_of(left_s, alone)
    report.add("departures", len(left_s))
    beyond_ms = 1000 * float(np.percentile(departures.beyond_s, 99))
    report.add("one_leaves_p99_beyond_its_step", beyond_ms, "ms")
    report.add_verdict(f"one_leaves_under_{MAX_BEYOND_A_STEP_MS:g}_ms", beyond_ms < MAX_BEYOND_A_STEP_MS)
    report.add_times("one_leaves_left_to_seen", departures.seen_s)
    report.add_times("one_leaves_left_to_free", departures.free_s)
    report.add_times("one_leaves_beyond_its_step", departures.beyond_s)
    report.add_times("one_leaves_one_step", alone.steps_s)
    _add_bursts(report, bursts, times)


def _add_bursts(report: Report, bursts: Sequence[Burst], times: EngineTimes) -> None:
    """Add what the leaving of all at once was like for the callers, and for the engines by their own clocks."""
    step_s = float(np.median(times.steps_s))
    left_s = [burst.told_s - left_s for burst in bursts for left_s in burst.left_s]
    report.add("bursts", len(bursts))
    report.add("all_leave_p99_beyond_one_step", 1000 * (float(np.percentile(left_s, 99)) - step_s), "ms")
    report.add("all_leave_seen_to_free_p99_in_steps", float(np.percentile(times.seen_to_free_s, 99)) / step_s)
    report.add_verdict("all_leave_free_before_another_step", not any(times.num_steps_between))
    report.add_times("all_leave_left_to_told", left_s)
    report.add_times("all_leave_cancelled_to_told", [burst.told_s - burst.cancelled_s for burst in bursts])
    report.add_times("all_leave_seen_to_free", times.seen_to_free_s)
    if len(times.seen_to_free_s) == len(bursts):  # of several engines each tells its own
        outside_s = [
            burst.told_s - left_s - engine_s
            for burst, engine_s in zip(bursts, times.seen_to_free_s, strict=True)
            for left_s in burst.left_s
        ]
        report.add_times("all_leave_outside_the_engine", outside_s)
    report.add_times("all_leave_one_step", times.steps_s)


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
