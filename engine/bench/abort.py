"""Bench `abort`: streams over real sockets, all cut at random moments; how long until nothing of them is left.

The end is seen from outside, on `/metrics`, asked again as soon as it has answered: that asks nothing of the engine,
which has to find out by itself. So the times are at most one round trip too long.

Then the same without HTTP, where one can see to a fraction of a millisecond how long the engine holds blocks: streams,
a task each, are all cancelled at a moment of a step. `left to free` is what a caller sees, of every stream for itself:
from its leaving, just before its own abort is queued, to the engine's word that no block is in use any more, not even
of the stream that left last. `cancelled to free` has the same end and begins with the cancellation of them all; between
the two Trio ends the tasks before one's own. `seen to free` is the engine's share, by its own clock, from the arrival
of the first abort; `outside the engine` what is left of each stream's time without it. All but the last may take what
is left of a step that was under way, so the time of a step is shown beside them, by the engine's clock too: from one
launch to the next.
"""

from __future__ import annotations

import random
import secrets
import tempfile
from itertools import count, pairwise
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
"""How often the streams without HTTP are left: of fewer a 99th percentile says little."""
MEASURED_S = 80.0
"""With a model that needs longer, rounds, which get half of it, and releases are fewer; the report says how many."""
MAX_BEYOND_A_STEP_MS = 3.0
"""How long after its leaving, beyond the median step, 99 of 100 streams may still hold blocks."""
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
        await _add_releases(report, config, cuts, input_len, until_s)
    return report


async def _add_releases(report: Report, config: EngineConfig, cuts: Cuts, input_len: int, until_s: float) -> None:
    """Add how long blocks are held once their streams, which all run and do not end before, were left; and a step.

    No release begins after `until_s` but the first.
    """
    draw = random.Random(cuts.seed)
    num_streams = min(cuts.num_streams, config.max_num_seqs * config.data_parallel_size)
    releases: list[_Release] = []
    with tempfile.TemporaryDirectory() as folder:
        async with open_engine(**msgspec.structs.asdict(config) | {"profile_dir": folder}) as llm:
            await llm.start_profile()
            for index in tqdm(range(NUM_RELEASES), desc="Releases", unit="release", disable=None):
                workload = Workload(num_streams, input_len, llm.ready.max_model_len - input_len, cuts.seed + index)
                release = _Release(llm, workload)
                await release.run(draw)
                releases.append(release)
                if trio.current_time() > until_s:
                    break
            await llm.stop_profile()
        seen_s, steps_s = _read_traces(Path(folder), num_streams // config.data_parallel_size)
    step_s = float(np.median(steps_s))
    left_s = [release.free_s - left_s for release in releases for left_s in release.left_s]
    report.add("releases", len(releases))
    beyond_ms = 1000 * (float(np.percentile(left_s, 99)) - step_s)
    report.add("left_to_free_p99_beyond_one_step", beyond_ms, "ms")
    report.add_verdict(f"under_{MAX_BEYOND_A_STEP_MS:g}_ms", beyond_ms < MAX_BEYOND_A_STEP_MS)
    report.add("seen_to_free_p99_in_steps", float(np.percentile(seen_s, 99)) / step_s)
    report.add_times("left_to_free", left_s)
    report.add_times("cancelled_to_free", [release.free_s - release.cancelled_s for release in releases])
    report.add_times("seen_to_free", seen_s)
    if len(seen_s) == len(releases):  # of several engines each tells its own
        outside_s = [
            release.free_s - left_s - engine_s
            for release, engine_s in zip(releases, seen_s, strict=True)
            for left_s in release.left_s
        ]
        report.add_times("outside_the_engine", outside_s)
    report.add_times("one_step", steps_s)


class _Release:
    """All streams of a workload, of which none ends before, left at once.

    Attributes:
        cancelled_s: When they were cancelled, by Trio's clock, as all times here.
        left_s: When each was left.
        free_s: When the engine had said that no block was in use any more.
    """

    def __init__(self, llm: AsyncLLM, workload: Workload) -> None:
        """Let `llm` generate for `workload` once it is run."""
        self.cancelled_s = self.free_s = 0.0
        self.left_s: list[float] = []
        self._llm = llm
        self._workload = workload
        self._num_begun = 0
        self._all_began = trio.Event()

    async def run(self, draw: random.Random) -> None:
        """Begin all, let them run for some steps, leave them at a drawn moment of one and wait until all is free."""
        async with trio.open_nursery() as nursery:
            for prompt in self._workload.prompts(self._llm.ready.vocab_size):
                nursery.start_soon(self._read_until_left, prompt)
            await self._all_began.wait()
            began_s, steps = trio.current_time(), count()
            await self._llm.wait_for_stats(lambda _: next(steps) == NUM_TIMED_STEPS)
            await trio.sleep(draw.random() * (trio.current_time() - began_s) / NUM_TIMED_STEPS)
            self.cancelled_s = trio.current_time()
            nursery.cancel_scope.cancel()
        await self._llm.wait_for_stats(lambda stats: not (self._llm.num_live or stats.num_used_blocks))
        self.free_s = trio.current_time()

    async def _read_until_left(self, prompt: list[int]) -> None:
        params = self._workload.params()
        async with self._llm.generate(prompt, params, cache_salt=secrets.token_hex(8)) as stream:
            try:
                await anext(stream)
                self._num_begun += 1
                if self._num_begun == self._workload.num_prompts:
                    self._all_began.set()
                async for _ in stream:
                    pass
            finally:
                self.left_s.append(trio.current_time())


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
