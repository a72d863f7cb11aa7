"""Orders: arrival, priority with places taken, and fair turns among clients."""

from __future__ import annotations

from typing import Any, get_args

import pytest

from engine.config import SchedulingPolicy
from engine.outputs import SchedulerOutput
from engine.request import RequestStatus
from engine.scheduler.admission import MAX_YIELDS
from engine.scheduler.policy import POLICIES, Fair
from engine.testing import CoreDriver


def started(plan: SchedulerOutput | None) -> list[str]:
    """Return the ids of a plan's rows."""
    assert plan is not None
    return [row.request_id for row in plan.requests]


def make_driver(policy: str, **settings: Any) -> CoreDriver:
    defaults = {"max_num_seqs": 2, "max_num_batched_tokens": 64, "max_model_len": 40, "block_size": 4}
    settings = {**defaults, "num_gpu_blocks_override": 40, "watermark": 0.0, **settings}
    return CoreDriver.of(scheduling_policy=policy, **settings)


def prompt(length: int, first: int = 0) -> list[int]:
    return [first, *range(100, 99 + length)]


def test_the_setting_offers_exactly_the_policies_there_are() -> None:
    assert set(get_args(SchedulingPolicy)) == set(POLICIES)


# -- priority ---------------------------------------------------------------------------------------------------------


def test_a_more_urgent_request_takes_the_place_of_the_least_urgent_one_that_runs() -> None:
    driver = make_driver("priority")
    driver.add("low", prompt(4, 1), priority=5, max_tokens=9)
    driver.add("lower", prompt(4, 2), priority=7, max_tokens=9)
    assert started(driver.step()) == ["low", "lower"]
    driver.add("urgent", prompt(4, 3), priority=1, max_tokens=3)
    assert started(driver.step()) == ["low", "urgent"]
    assert driver.core._requests["lower"].status is RequestStatus.PREEMPTED
    driver.run()
    assert driver.core.stats().num_preemptions == 1
    for name, num_tokens in (("low", 9), ("lower", 9), ("urgent", 3)):
        assert driver.completions[name].token_ids == driver.expected(name, num_tokens)


def test_equal_priority_never_takes_a_place_so_that_nobody_plays_ping_pong() -> None:
    driver = make_driver("priority", max_num_seqs=1)
    for name in ("a", "b", "c"):
        driver.add(name, prompt(4, ord(name)), priority=3, max_tokens=6)
        driver.step()
    driver.run()
    assert driver.core.stats().num_preemptions == 0


def test_an_urgent_request_that_lacks_blocks_takes_them_from_as_many_as_it_needs_and_no_more() -> None:
    driver = make_driver("priority", max_num_seqs=8, num_gpu_blocks_override=10)
    for number in range(4):
        driver.add(f"low{number}", prompt(7, number), priority=5, max_tokens=2)
    driver.step()
    driver.add("urgent", prompt(15, 9), priority=1, max_tokens=4)  # four blocks, two are free
    assert started(driver.step()) == ["low0", "low1", "low2", "urgent"]
    driver.run()
    assert driver.core.stats().num_preemptions == 1
    assert driver.completions["low3"].token_ids == driver.expected("low3", 2)


def test_nobody_loses_its_place_in_vain() -> None:
    driver = make_driver("priority", max_num_seqs=8, num_gpu_blocks_override=10)
    driver.add("other", prompt(24, 1), priority=0, max_tokens=4)
    driver.add("low", prompt(7, 2), priority=5, max_tokens=20)
    driver.step()
    driver.add("urgent", prompt(36, 3), priority=1, max_tokens=4)  # more than low could give
    assert started(driver.step()) == ["other", "low"]
    driver.run()
    assert driver.completions["urgent"].token_ids == driver.expected("urgent", 4)


def test_a_stream_of_urgent_requests_takes_a_place_only_so_often() -> None:
    driver = make_driver("priority", max_num_seqs=1)
    driver.add("low", prompt(4, 1), priority=9, max_tokens=8)
    low = driver.core._requests["low"]
    for number in range(30):
        driver.add(f"urgent{number}", prompt(2, number), priority=1, max_tokens=1)
        driver.step()
        driver.step()
        if low.is_finished:
            break
    assert low.is_finished
    assert low.num_yields == MAX_YIELDS


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_places_are_taken_with_plans_in_flight_and_every_token_is_right(depth: int) -> None:
    driver = make_driver("priority", max_concurrent_plans=depth, num_gpu_blocks_override=12)
    for number in range(12):
        driver.add(f"r{number}", prompt(3 + number % 5, number), priority=12 - number, max_tokens=7)
        driver.plan()
        if len(driver.plans) == depth:
            driver.finish_step()
    driver.run()
    for name, completion in driver.completions.items():
        assert completion.token_ids == driver.expected(name, 7)


# -- fair -------------------------------------------------------------------------------------------------------------


def test_a_client_with_a_thousand_requests_does_not_delay_one_with_one() -> None:
    driver = make_driver("fair", max_num_seqs=4)
    for number in range(1000):
        driver.add(f"many{number}", prompt(4, number % 256), client_key="greedy", max_tokens=30)
    for _ in range(3):
        driver.step()
    driver.add("single", prompt(4, 7), client_key="modest", max_tokens=3)
    assert "single" in started(driver.step())


def test_clients_take_turns_whatever_one_of_them_has_queued() -> None:
    driver = make_driver("fair", max_num_seqs=1)
    for number in range(5):
        driver.add(f"a{number}", prompt(4, number), client_key="a", max_tokens=1)
    for number in range(3):
        driver.add(f"b{number}", prompt(4, 10 + number), client_key="b", max_tokens=1)
    order = [started(driver.step())[0] for _ in range(8)]
    assert order == ["a0", "b0", "a1", "b1", "a2", "b2", "a3", "a4"]


def test_long_requests_count_for_more_than_short_ones() -> None:
    driver = make_driver("fair", max_num_seqs=1)
    for number in range(3):
        driver.add(f"long{number}", prompt(20, number), client_key="a", max_tokens=1)
    for number in range(6):
        driver.add(f"short{number}", prompt(6, 10 + number), client_key="b", max_tokens=1)
    order = [started(driver.step())[0] for _ in range(9)]
    assert order == ["long0", "short0", "short1", "short2", "long1", "short3", "short4", "short5", "long2"]


def test_a_newcomer_takes_a_place_only_from_a_client_of_which_several_run() -> None:
    driver = make_driver("fair", max_num_seqs=3)
    driver.add("a0", prompt(4, 1), client_key="a", max_tokens=20)
    driver.add("b0", prompt(4, 2), client_key="b", max_tokens=20)
    driver.add("a1", prompt(4, 3), client_key="a", max_tokens=20)
    driver.step()
    driver.add("c0", prompt(4, 4), client_key="c", max_tokens=20)
    assert set(started(driver.step())) == {"a0", "b0", "c0"}
    driver.add("d0", prompt(4, 5), client_key="d", max_tokens=20)
    for _ in range(3):
        assert set(started(driver.step())) == {"a0", "b0", "c0"}  # of none of them two run
    driver.run()
    assert driver.core.stats().num_preemptions == 1
    assert driver.completions["a1"].token_ids == driver.expected("a1", 20)


def test_what_is_known_of_a_client_ends_with_its_last_request() -> None:
    driver = make_driver("fair", max_num_seqs=4)
    policy = driver.core._scheduler._policy
    assert isinstance(policy, Fair)
    for number in range(50):
        driver.add(f"r{number}", prompt(3, number), client_key=f"client {number % 7}", max_tokens=4)
    driver.abort("r3", "r40", "r41")
    driver.run()
    assert not policy._next_start
    assert not policy._num_live
    assert not policy._num_running
