"""Bench `scheduler`: what the engine's own thinking costs, without a model: `plan` and `commit` on the null runner.

Three cores decode side by side, round by round: one of reference, whose pool is as small as it can be, one with many
times as many requests waiting, and one with a large pool. So a ratio compares what was measured at the same time. What
counts is the processor's time, which others who use the machine do not lengthen as they do the clock's. Prompts differ
in length, so that in each step as many requests as in any other fill a block, publish it and take the next one.
"""

from __future__ import annotations

import gc
import statistics
import time
import tracemalloc
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import count

from engine.bench.report import Report, Table
from engine.config import EngineConfig
from engine.core import EngineCore
from engine.executor.null import VOCAB_SIZE, NullModelRunner
from engine.kv_cache.manager import KVCacheManager
from engine.outputs import RequestId
from engine.protocol import EngineCoreRequest
from engine.request import Request
from engine.sampling_params import SamplingParams

BASE_US, A_REQUEST_US = 60, 3
"""What a step may cost, in microseconds, and each running request in it."""
MAX_RATIO = 1.25
"""How much slower many waiting requests or a large pool may make a step."""
MAX_BLOCK_BYTES = 300
"""What a cached block may cost in memory of the host."""
BLOCK_SIZE = 16
MAX_PROMPT = BLOCK_SIZE + 1
"""Prompts have this many tokens or up to a block less."""
NUM_CACHED = 16384
"""Cached blocks whose memory is measured."""
Times = tuple[float, float]
"""What `plan` and `commit` took."""


@dataclass(frozen=True)
class Sizes:
    """What is compared: requests that run, requests that wait, KV blocks, rounds and steps a round."""

    num_running: int = 256
    num_waiting: int = 100_000
    num_blocks: int = 1_000_000
    num_rounds: int = 15
    num_steps: int = 4

    @property
    def least_blocks(self) -> int:
        """Blocks that all running requests need in all steps."""
        num_tokens = MAX_PROMPT + self.num_rounds * self.num_steps
        return self.num_running * -(-num_tokens // BLOCK_SIZE) + 1


class Decoding:
    """A core that decodes `num_running` requests while `num_waiting` wait, all of short prompts."""

    def __init__(self, policy: str, num_running: int, num_waiting: int, num_blocks: int) -> None:
        """Add the requests and let the first of them compute their prompts."""
        config = EngineConfig.of(
            model="null",
            scheduling_policy=policy,
            max_num_seqs=num_running,
            max_num_batched_tokens=max(num_running * MAX_PROMPT, 512),
            max_num_waiting=num_waiting + num_running,
            num_gpu_blocks_override=num_blocks,
            max_model_len=BLOCK_SIZE * min(16, num_blocks // num_running),
            block_size=BLOCK_SIZE,
        )
        self.runner = NullModelRunner(config)
        self.core = EngineCore(config, self.runner.start(lambda phase, done, total: None))
        params = SamplingParams(temperature=0.0, max_tokens=None)
        for i in range(num_running + num_waiting):
            prompt = [i % VOCAB_SIZE, i // VOCAB_SIZE % VOCAB_SIZE, *range(MAX_PROMPT - 2)][: 2 + i % BLOCK_SIZE]
            self.core.add(EngineCoreRequest(RequestId(f"r{i}"), "", prompt, params, 0.0, client_key=f"c{i % 7}"), 0.0)
        self.step()

    def step(self) -> Times:
        """Make, execute and commit a plan; returns the seconds of this thread that `plan` and `commit` took."""
        began = time.thread_time()
        plan = self.core.plan(0.0)
        planned = time.thread_time()
        assert plan is not None
        self.runner.execute(plan)
        output = self.runner.sample()
        sampled = time.thread_time()
        self.core.commit(plan, output, 0.0)
        self.core.take_outputs()
        return planned - began, time.thread_time() - sampled


def scheduler(policy: str, sizes: Sizes) -> Report:
    """Measure and report each figure beside what it may be at most."""
    few = sizes.least_blocks
    cases = {
        "reference": Decoding(policy, sizes.num_running, 1, few),
        "many_waiting": Decoding(policy, sizes.num_running, sizes.num_waiting, few),
        "large_pool": Decoding(policy, sizes.num_running, 1, sizes.num_blocks),
    }
    gc.collect()
    gc.freeze()  # as a serving engine does: what lives from the start is not walked through again
    rounds = _interleaved(cases, sizes)
    gc.unfreeze()
    settings = {"policy": policy, "num_running": sizes.num_running, "num_waiting": sizes.num_waiting}
    report = Report("scheduler", settings | {"num_blocks": sizes.num_blocks, "least_blocks": few})
    medians: dict[str, Sequence[float]] = {name: _median(map(_median, of_case)) for name, of_case in rounds.items()}
    plan_us, commit_us = medians["reference"]
    both_us = [plan + commit for steps in rounds["reference"] for plan, commit in steps]
    report.add("plan", plan_us, "us")
    report.add("commit", commit_us, "us")
    report.add("mean_of_both", statistics.mean(both_us), "us")
    report.add("max_of_both", max(both_us), "us")
    report.add("limit_of_both", BASE_US + A_REQUEST_US * sizes.num_running, "us")
    report.add("a_running_request_beyond_the_base", (plan_us + commit_us - BASE_US) / sizes.num_running, "us")
    report.add("many_waiting_over_reference", sum(medians["many_waiting"]) / (plan_us + commit_us))
    report.add("large_pool_over_reference", sum(medians["large_pool"]) / (plan_us + commit_us))
    report.add("limit_of_both_ratios", MAX_RATIO)
    report.add("a_cached_block", cached_block_bytes(NUM_CACHED), "bytes")
    report.add("limit_of_a_cached_block", MAX_BLOCK_BYTES, "bytes")
    report.add_table("steps", Table(["plan_us", "commit_us"], medians))
    return report


def _interleaved(cases: dict[str, Decoding], sizes: Sizes) -> dict[str, list[list[Times]]]:
    """Let the cases take turns; returns for each its rounds, and of each of them the steps, in microseconds."""
    rounds: dict[str, list[list[Times]]] = defaultdict(list)
    for number in range(sizes.num_rounds):
        for name in sorted(cases, reverse=number % 2 == 1):
            steps = [cases[name].step() for _ in range(sizes.num_steps)]
            rounds[name].append([(plan_s * 1e6, commit_s * 1e6) for plan_s, commit_s in steps])
    return dict(rounds)


def _median(times: Iterable[Times]) -> Times:
    plan, commit = zip(*times, strict=True)
    return statistics.median(plan), statistics.median(commit)


def cached_block_bytes(num_blocks: int) -> float:
    """Return the memory that pool and prefix cache take for each of `num_blocks` blocks, all cached."""
    tracemalloc.start()
    try:
        manager = KVCacheManager(num_blocks + 1, BLOCK_SIZE, enable_prefix_caching=True, hash_salt=b"")
        blocks_a_prompt, numbers = 64, count()
        for step in range(num_blocks // blocks_a_prompt):
            prompt = [next(numbers) for _ in range(blocks_a_prompt * BLOCK_SIZE)]
            params = SamplingParams(max_tokens=1)
            request = Request(EngineCoreRequest(RequestId("r"), "", prompt, params, 0.0), step, len(prompt) + 1)
            manager.admit(request, manager.match(request))
            manager.grow(request, len(prompt))
            request.num_computed_tokens = len(prompt)
            manager.publish(request, step)
            manager.settle(step)
            manager.release(request, None)
        del request, prompt
        gc.collect()
        return tracemalloc.get_traced_memory()[0] / num_blocks
    finally:
        tracemalloc.stop()
