"""What a step touches: who runs, and no one else, however many wait and however large the pool is."""

from __future__ import annotations

import gc
import sys
from collections import Counter
from collections.abc import Iterable
from types import FrameType
from typing import Any

import pytest

from engine.bench.scheduler import MAX_BLOCK_BYTES, Decoding, Sizes, cached_block_bytes, scheduler
from engine.config import SchedulingPolicy
from engine.kv_cache.block_pool import BlockPool
from engine.kv_cache.manager import KVCacheManager
from engine.request import Request
from engine.scheduler.policy import POLICIES

NUM_RUNNING = 12


def calls_a_step(decoding: Decoding, num_steps: int) -> list[int]:
    """Return how many functions, ours and Python's own, `plan` and `commit` call in each step."""
    counts = []
    count = 0

    def profile(frame: FrameType, event: str, argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    for _ in range(num_steps):
        count = 0
        gc.disable()  # a collection may call others' callbacks
        sys.setprofile(profile)
        try:
            plan = decoding.core.plan(0.0)
        finally:
            sys.setprofile(None)
        assert plan is not None
        decoding.runner.execute(plan)
        output = decoding.runner.sample()
        sys.setprofile(profile)
        try:
            decoding.core.commit(plan, output, 0.0)
        finally:
            sys.setprofile(None)
        gc.enable()
        decoding.core.take_outputs()
        counts.append(count)
    return counts


@pytest.mark.parametrize("policy", POLICIES)
def test_a_step_does_the_same_whether_one_waits_or_thousands_and_whatever_the_pool(policy: SchedulingPolicy) -> None:
    least = NUM_RUNNING * 16 + 1
    steps = {
        (num_waiting, num_blocks): calls_a_step(Decoding(policy, NUM_RUNNING, num_waiting, num_blocks), 40)
        for num_waiting, num_blocks in ((1, least), (5000, least), (1, 100_000))
    }
    reference = steps[1, least]
    assert all(counts == reference for counts in steps.values()), {size: sum(counts) for size, counts in steps.items()}


def test_what_a_step_costs_grows_by_the_same_amount_with_each_request_that_runs() -> None:
    totals = [sum(calls_a_step(Decoding("fcfs", number, 1, 1000), 32)) for number in (4, 8, 16)]
    assert totals[2] - totals[1] == 2 * (totals[1] - totals[0])


def test_a_step_looks_at_the_running_requests_and_takes_the_blocks_that_are_due(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    decoding = Decoding("fcfs", NUM_RUNNING, 500, 1000)
    touched: Counter[str] = Counter()
    moved: list[str] = []
    grow, take, share, release = KVCacheManager.grow, BlockPool.take, BlockPool.share, BlockPool.release

    def counting_grow(self: KVCacheManager, request: Request, num_tokens: int) -> bool:
        touched[request.request_id] += 1
        return grow(self, request, num_tokens)

    def counting_take(self: BlockPool, num_blocks: int) -> list[Any]:
        blocks = take(self, num_blocks)
        moved.extend(map(str, blocks))
        return blocks

    def counting(original: Any) -> Any:
        def counted(self: BlockPool, blocks: Iterable[Any], *rest: Any) -> None:
            moved.extend(map(str, blocks))
            original(self, blocks, *rest)

        return counted

    monkeypatch.setattr(KVCacheManager, "grow", counting_grow)
    monkeypatch.setattr(BlockPool, "take", counting_take)
    monkeypatch.setattr(BlockPool, "share", counting(share))
    monkeypatch.setattr(BlockPool, "release", counting(release))
    blocks_a_step = []
    for _ in range(32):
        touched.clear()
        moved.clear()
        decoding.step()
        assert touched == {f"r{number}": 1 for number in range(NUM_RUNNING)}
        blocks_a_step.append(len(moved))
    assert sorted(blocks_a_step) == [0] * 8 + [1] * 24  # a block a request every sixteen steps, none in the same one


def test_a_cached_block_costs_little_memory() -> None:
    assert cached_block_bytes(4096) <= MAX_BLOCK_BYTES


def test_the_bench_reports_its_figures_beside_their_limits() -> None:
    sizes = Sizes(num_running=4, num_waiting=50, num_blocks=500, num_rounds=3, num_steps=2)
    figures = scheduler("priority", sizes).as_json()["figures"]
    assert figures["limit_of_both_us"] == 60 + 3 * 4
    assert 0 < figures["mean_of_both_us"] <= figures["max_of_both_us"]
    assert all(value > 0 for name, value in figures.items() if name != "a_running_request_beyond_the_base_us")
