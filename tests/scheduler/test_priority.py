"""The priority policy in the scenarios of the reference, and any policy under a blast of requests."""

from __future__ import annotations

import random
from typing import Any

import pytest

from engine.outputs import RequestId, SchedulerOutput
from engine.protocol import EngineCoreRequest
from engine.request import RequestStatus
from engine.sampling_params import SamplingParams
from engine.scheduler.admission import MAX_YIELDS
from engine.scheduler.policy import POLICIES
from engine.testing import CoreDriver


def make_driver(**settings: Any) -> CoreDriver:
    defaults = {"max_num_seqs": 16, "max_num_batched_tokens": 8192, "max_model_len": 64, "block_size": 16}
    defaults |= {"num_gpu_blocks_override": 256, "scheduling_policy": "priority", "watermark": 0.0}
    return CoreDriver.of(**{**defaults, **settings})


def prompt(length: int, first: int = 65) -> list[int]:
    return [first] * length


def rows(plan: SchedulerOutput | None) -> dict[str, int]:
    assert plan is not None
    return {row.request_id: row.num_tokens for row in plan.requests}


def status_of(driver: CoreDriver, name: str) -> RequestStatus:
    return next(request.status for request in driver.live_requests if request.request_id == name)


@pytest.mark.parametrize(
    ("priorities", "order"),
    [([2, 0, 1], "bca"), ([1, 1, 1], "abc"), ([3, 2, 1, 0], "dcba"), ([5, -1, 5, -1], "bdac")],
)
def test_the_most_urgent_starts_first_and_among_equals_who_came_first(priorities: list[int], order: str) -> None:
    driver = make_driver()
    for name, priority in zip("abcd", priorities, strict=False):
        driver.add(name, prompt(10, ord(name)), priority=priority)
    assert list(rows(driver.step())) == list(order)
    assert list(rows(driver.step())) == list(order)
    driver.run()


def test_arrival_is_the_order_in_which_requests_were_added_whatever_clocks_say() -> None:
    driver = make_driver()
    params = SamplingParams(temperature=0.0)
    for name, arrival_time in (("a", 3.0), ("b", 1.0), ("c", 2.0)):
        request = EngineCoreRequest(RequestId(name), name, prompt(10), params, arrival_time=arrival_time)
        driver.core.add(request, -arrival_time)
    assert list(rows(driver.step())) == ["a", "b", "c"]


def test_under_pressure_the_least_urgent_loses_its_blocks() -> None:
    driver = make_driver(num_gpu_blocks_override=5)
    driver.add("low", prompt(32), priority=5, max_tokens=8)
    driver.step()
    driver.add("high", prompt(31, 66), priority=0, max_tokens=8)
    assert rows(driver.step()) == {"low": 1, "high": 31}
    assert driver.core.stats().num_used_blocks == 5
    driver.step()
    plan = driver.step()  # the 33rd token of the urgent one needs a third block
    assert plan is not None
    assert (rows(plan), plan.preempted_request_ids) == ({"high": 1}, ("low",))
    assert status_of(driver, "low") is RequestStatus.PREEMPTED
    for name, completion in driver.run().items():
        assert completion.token_ids == driver.expected(name, 8)


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_who_lost_its_blocks_goes_on_with_all_its_tokens_once_the_urgent_one_is_done(policy: str) -> None:
    driver = make_driver(num_gpu_blocks_override=4, scheduling_policy=policy, enable_prefix_caching=False)
    driver.add("high", prompt(32, 66), priority=0, max_tokens=4)
    driver.add("low", prompt(30), priority=1, max_tokens=8)
    assert rows(driver.step()) == {"high": 32, "low": 30}
    assert driver.core.stats().num_used_blocks == 4
    assert driver.step().preempted_request_ids == ("low",)
    assert driver.completions["low"].token_ids == driver.expected("low", 1)
    for _ in range(2):
        assert rows(driver.step()) == {"high": 1}
    plan = driver.step()
    (row,) = plan.requests
    assert (row.request_id, row.start, row.num_tokens) == ("low", 0, 31)
    assert row.tokens.tolist() == prompt(30) + driver.completions["low"].token_ids[:1]
    assert driver.run()["low"].token_ids == driver.expected("low", 8)
    assert driver.core.stats().num_preemptions == 1


def test_where_there_is_room_an_urgent_newcomer_takes_nobodys_place() -> None:
    driver = make_driver()
    for name in "ab":
        driver.add(name, prompt(30, ord(name)), priority=9)
    driver.step()
    driver.add("c", prompt(30, 67), priority=0)
    plan = driver.step()
    assert list(rows(plan)) == ["a", "b", "c"]
    driver.run()
    assert driver.core.stats().num_preemptions == 0


def test_where_requests_are_at_their_most_a_more_urgent_one_takes_a_place_and_an_equal_one_waits() -> None:
    for priority, expected in ((0, {"a": 1, "c": 30}), (9, {"a": 1, "b": 1})):
        driver = make_driver(max_num_seqs=2)
        for name in "ab":
            driver.add(name, prompt(30, ord(name)), priority=9)
        driver.step()
        driver.add("c", prompt(30, 67), priority=priority)
        plan = driver.step()
        assert rows(plan) == expected
        assert plan.preempted_request_ids == (("b",) if priority == 0 else ())
        for name, completion in driver.run().items():
            assert completion.token_ids == driver.expected(name, 16)


@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize("policy", sorted(POLICIES))
@pytest.mark.parametrize("seed", range(3))
def test_a_blast_of_requests_of_any_urgency_and_length_ends_with_every_token_right(
    policy: str, depth: int, seed: int
) -> None:
    drawn = random.Random(f"{policy} {depth} {seed}")
    driver = make_driver(
        **{"scheduling_policy": policy, "max_concurrent_plans": depth, "num_gpu_blocks_override": 24},
        **{"block_size": 4, "max_num_seqs": 6, "max_num_batched_tokens": 32, "watermark": 0.05},
    )
    lengths = {}
    for number in range(30):
        name = f"r{number}"
        lengths[name] = drawn.randint(1, 20)
        driver.add(
            name,
            prompt(drawn.randint(1, 40), 65 + drawn.randint(0, 2)),
            priority=drawn.randint(0, 3),
            client_key=drawn.choice("xyz"),
            max_tokens=lengths[name],
        )
        for _ in range(drawn.choice([0, 0, 1, 3])):
            driver.step()
    assert driver.run().keys() == lengths.keys()
    for name, completion in driver.completions.items():
        assert completion.token_ids == driver.expected(name, lengths[name])
        assert completion.event_kinds.count("preempted") <= MAX_YIELDS
    stats = driver.core.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_used_blocks) == (0, 0, 0)
    assert stats.num_preemptions > 0
