"""Aborts, ends and preemptions that meet plans in flight: event sequences that went wrong elsewhere.

Where no depth is named, a sequence must hold at each; every token is compared with the request's run alone.
"""

from __future__ import annotations

import random
from typing import Any

import pytest

from engine.outputs import FinishReason, RequestId, SchedulerOutput
from engine.protocol import AbortReason, PauseMode
from engine.request import RequestStatus
from engine.testing import CoreDriver

ALL_DEPTHS = pytest.mark.parametrize("depth", [1, 2, 3, 4])
IN_FLIGHT = pytest.mark.parametrize("depth", [2, 3, 4])
ALL_TOKENS = tuple(range(32, 127))


def make_driver(**settings: Any) -> CoreDriver:
    defaults = {"max_num_seqs": 16, "max_num_batched_tokens": 64, "max_model_len": 64, "block_size": 4}
    return CoreDriver.of(**{**defaults, "num_gpu_blocks_override": 64, **settings})


def prompt(length: int, first: int = 65) -> list[int]:
    return [first] * length


def launch_all(driver: CoreDriver) -> None:
    while driver.plan() is not None:
        pass


def rows(plan: SchedulerOutput | None) -> dict[str, int]:
    assert plan is not None
    return {row.request_id: row.num_tokens for row in plan.requests}


def status_of(driver: CoreDriver, name: str) -> RequestStatus:
    return next(request.status for request in driver.live_requests if request.request_id == name)


def num_used(driver: CoreDriver) -> int:
    return driver.core.stats().num_used_blocks


def assert_empty(driver: CoreDriver) -> None:
    stats = driver.core.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_used_blocks) == (0, 0, 0)
    assert not driver.core.has_work
    assert driver.core.waits_for is None


# Blocks that plans in flight name


@IN_FLIGHT
@pytest.mark.parametrize("way_out", ["abort", "preempt", "stop", "fail"])
def test_whichever_way_a_request_leaves_its_blocks_stay_until_the_last_plan_that_names_them(
    depth: int, way_out: str
) -> None:
    driver = make_driver(max_concurrent_plans=depth)
    driver.add("a", prompt(9), max_tokens=30, stop_token_ids=ALL_TOKENS if way_out == "stop" else ())
    launch_all(driver)
    num_named = num_used(driver)
    if way_out == "abort":
        driver.abort("a")
    elif way_out == "preempt":
        driver.reset_prefix_cache(reset_running=True)
    else:
        driver.finish_step(broken=["a"] if way_out == "fail" else ())
    while len(driver.plans) > 1:
        assert num_used(driver) == num_named
        driver.finish_step()
    assert num_used(driver) == num_named
    driver.finish_step()
    assert num_used(driver) == 0


def test_three_steps_ahead_an_aborted_request_gives_its_blocks_back_with_the_third_result() -> None:
    driver = make_driver(max_concurrent_plans=3)
    driver.add("a", prompt(9))
    assert [rows(driver.plan()) for _ in range(3)] == [{"a": 9}, {"a": 1}, {"a": 1}]
    driver.abort("a")
    (held,) = driver.core._kv_cache._held.items()
    assert (held[0], list(held[1])) == (3, ["a"])
    freed = []
    for _ in range(3):
        driver.finish_step()
        freed.append(num_used(driver) == 0)
    assert freed == [False, False, True]


def test_what_leaves_is_given_back_in_the_order_of_the_plans_that_name_it() -> None:
    driver = make_driver(max_concurrent_plans=3)
    for name in "abc":
        driver.add(name, prompt(13, ord(name)), max_tokens=1)
        assert rows(driver.plan()) == {name: 13}
    driver.abort("c", "a", "b")
    used = [num_used(driver)]
    while driver.plans:
        driver.finish_step()
        used.append(num_used(driver))
    assert used == [12, 8, 4, 0]


def test_without_a_row_in_flight_blocks_are_free_at_once() -> None:
    driver = make_driver()
    driver.add("a", prompt(9))
    driver.step()
    assert num_used(driver) == 3
    driver.abort("a")
    assert num_used(driver) == 0


@ALL_DEPTHS
def test_windows_shorter_than_the_plans_in_flight_leave_every_token_right(depth: int) -> None:
    for windows in ((None, 1), (2, 2), (None, 3), (3, 4)):
        driver = make_driver(max_concurrent_plans=depth, windows=windows, block_size=1, num_gpu_blocks_override=400)
        for name in "ab":
            known = driver.completions[RequestId("a")].token_ids[:12] if name == "b" else []
            driver.add(name, prompt(3) + known, max_tokens=20)
            while driver.core.has_work:
                launch_all(driver)
                while driver.plans:
                    driver.finish_step()
            assert driver.completions[RequestId(name)].token_ids == driver.expected(name, 20)


# Aborts


@ALL_DEPTHS
def test_one_burst_of_aborts_leaves_nothing_and_needs_no_further_step_to_be_counted(depth: int) -> None:
    driver = make_driver(max_concurrent_plans=depth, max_num_seqs=5)
    for number in range(20):
        driver.add(f"r{number}", prompt(5 + number, 65 + number))
    driver.step()
    launch_all(driver)
    driver.abort(*(f"r{number}" for number in range(20)), "unknown")
    stats = driver.core.stats()
    assert (stats.num_running, stats.num_waiting) == (0, 0)
    assert {completion.finish_reason for completion in driver.completions.values()} == {FinishReason.ABORT}
    while driver.plans:
        driver.finish_step()
    assert num_used(driver) == 0
    assert len(driver.step().finished_request_ids) == 20
    assert_empty(driver)


def test_who_leaves_the_queue_before_a_place_is_free_computes_nothing() -> None:
    driver = make_driver(max_num_seqs=1)
    driver.add("runs", prompt(5), max_tokens=3)
    driver.step()
    for name in ("gone", "next"):
        driver.add(name, prompt(5, 66))
    driver.abort("gone")
    planned = set()
    while driver.core.has_work:
        plan = driver.step()
        planned |= rows(plan).keys()
    assert planned == {"runs", "next"}
    assert driver.completions["gone"].event_kinds == ["queued"]


@ALL_DEPTHS
@pytest.mark.parametrize("way_out", ["abort", "preempt"])
def test_a_prompt_left_after_its_first_chunk_can_be_sent_again(depth: int, way_out: str) -> None:
    driver = make_driver(max_concurrent_plans=depth, max_num_batched_tokens=16)
    driver.add("a", prompt(42), max_tokens=5)
    assert rows(driver.plan()) == {"a": 16}
    if way_out == "abort":
        driver.abort("a")
    else:
        driver.reset_prefix_cache(reset_running=True)
    driver.add("again", prompt(42), max_tokens=5)
    driver.run()
    assert driver.completions["again"].token_ids == driver.expected("again", 5)
    if way_out == "preempt":
        assert driver.completions["a"].token_ids == driver.expected("a", 5)
    else:
        assert driver.completions["a"].token_ids == []
        assert driver.completions["again"].outputs[0].num_cached_tokens == 16
    assert_empty(driver)


@ALL_DEPTHS
@pytest.mark.parametrize("reason", [AbortReason.CLIENT, AbortReason.STOP_STRING])
def test_an_abort_in_the_step_that_would_end_a_request_wins_and_one_after_it_does_nothing(
    depth: int, reason: AbortReason
) -> None:
    driver = make_driver(max_concurrent_plans=depth)
    for name in ("before", "after"):
        driver.add(name, prompt(5, ord(name[0])), max_tokens=1)
    driver.plan()
    driver.abort("before", reason=reason)
    driver.finish_step()
    driver.abort("after", reason=reason)
    by_stop_string = reason is AbortReason.STOP_STRING
    assert driver.completions["before"].token_ids == []
    assert driver.completions["before"].finish_reason is (FinishReason.STOP if by_stop_string else FinishReason.ABORT)
    assert driver.completions["after"].token_ids == driver.expected("after", 1)
    assert driver.completions["after"].finish_reason is FinishReason.LENGTH
    driver.run()
    assert_empty(driver)


@IN_FLIGHT
@pytest.mark.parametrize("ends", [True, False])
def test_a_token_in_flight_at_a_preemption_is_kept_and_may_end_the_request(depth: int, ends: bool) -> None:
    driver = make_driver(max_concurrent_plans=depth)
    driver.add("a", prompt(5), max_tokens=1 if ends else 6)
    launch_all(driver)
    num_in_flight = len(driver.plans)
    driver.reset_prefix_cache(reset_running=True)
    assert status_of(driver, "a") is RequestStatus.PREEMPTED
    while driver.plans:
        driver.finish_step()
    assert driver.completions["a"].token_ids == driver.expected("a", 1 if ends else num_in_flight)
    if not ends:
        (row,) = driver.plan().requests
        assert (row.start, row.num_tokens) == (0, 5 + num_in_flight)
    driver.run()
    assert driver.completions["a"].token_ids == driver.expected("a", 1 if ends else 6)
    assert driver.completions["a"].finish_reason is FinishReason.LENGTH
    assert_empty(driver)


@IN_FLIGHT
def test_a_preempted_request_comes_back_only_when_its_tokens_in_flight_are_in(depth: int) -> None:
    driver = make_driver(max_concurrent_plans=depth)
    driver.add("a", prompt(5), max_tokens=20)
    for _ in range(4):  # preempted again and again, each time with as much in flight as may be
        launch_all(driver)
        driver.reset_prefix_cache(reset_running=True)
        while driver.plans:
            driver.finish_step()
            if driver.plans:
                assert driver.plan() is None
    driver.run()
    assert driver.completions["a"].token_ids == driver.expected("a", 20)
    assert driver.core.stats().num_preemptions == 4


@ALL_DEPTHS
def test_a_stop_string_seen_while_steps_are_in_flight_frees_the_id_for_use_at_once(depth: int) -> None:
    driver = make_driver(max_concurrent_plans=depth)
    driver.add("a", prompt(5), max_tokens=30)
    driver.step()
    launch_all(driver)
    told = driver.completions["a"].token_ids[:]
    driver.abort("a", reason=AbortReason.STOP_STRING)
    driver.add("a", prompt(7, 66), max_tokens=6)
    driver.run()
    _, first = driver.past[0]
    assert (first.token_ids, first.finish_reason) == (told, FinishReason.STOP)
    assert driver.completions["a"].token_ids == driver.expected("a", 6)
    assert_empty(driver)


# A full pool


@ALL_DEPTHS
def test_where_all_decodes_need_a_block_in_one_step_some_go_on_and_all_end_right(depth: int) -> None:
    driver = make_driver(max_concurrent_plans=depth, num_gpu_blocks_override=8, max_model_len=24, watermark=0.0)
    for name in "abcd":
        driver.add(name, prompt(8, ord(name)), max_tokens=12)
    assert rows(driver.plan()) == dict.fromkeys("abcd", 8)
    assert num_used(driver) == 8
    for _ in range(300):  # far more steps than it takes: one request a time would end sooner
        before = sum(len(completion.token_ids) for completion in driver.completions.values())
        for _ in range(2 * depth + 1):
            launch_all(driver)
            if driver.plans:
                driver.finish_step()
        after = sum(len(completion.token_ids) for completion in driver.completions.values())
        if not driver.core.has_work:
            break
        assert after > before, "no token came although requests run"
    for name in "abcd":
        assert driver.completions[name].token_ids == driver.expected(name, 12)
    assert "preempted" not in driver.completions["a"].event_kinds
    assert_empty(driver)


def test_a_prompt_that_the_pool_can_never_hold_is_refused_and_the_short_ones_behind_it_run() -> None:
    driver = make_driver(num_gpu_blocks_override=49, block_size=16, max_model_len=49 * 16, max_num_batched_tokens=1024)
    driver.add("huge", prompt(63 * 16), max_tokens=4)
    for name in "abc":
        driver.add(name, prompt(10, ord(name)), max_tokens=3)
    (output,) = driver.completions["huge"].outputs
    assert output.error.type == "PromptTooLong"
    assert "the prompt has 1008 tokens and the context holds 784" in output.error.message
    assert rows(driver.step()) == dict.fromkeys("abc", 10)
    driver.run()
    assert_empty(driver)


@ALL_DEPTHS
def test_equal_prompts_in_one_step_keep_their_own_tables_while_decoding_on(depth: int) -> None:
    driver = make_driver(max_concurrent_plans=depth)
    for name in "ab":
        driver.add(name, prompt(11), max_tokens=14, seed=ord(name), temperature=1.0)
    plan = driver.plan()
    assert rows(plan) == {"a": 11, "b": 3}
    first, second = (row.block_tables[0].tolist() for row in plan.requests)
    assert first[:2] == second[:2]
    assert first[2] != second[2]
    for name, completion in driver.run().items():
        assert completion.token_ids == driver.expected(name, 14)


@ALL_DEPTHS
@pytest.mark.parametrize("length", [7, 8, 9])
@pytest.mark.parametrize("skips", [False, True])
def test_a_prompt_of_whole_blocks_or_one_token_more_or_less_can_be_sent_twice(
    depth: int, length: int, skips: bool
) -> None:
    driver = make_driver(max_concurrent_plans=depth)
    for name in ("first", "again"):
        driver.add(name, prompt(length), max_tokens=5, skip_reading_prefix_cache=skips)
        driver.run()
        assert driver.completions[RequestId(name)].token_ids == driver.expected(name, 5)
    assert driver.completions["again"].outputs[0].num_cached_tokens == (0 if skips else (length - 1) // 4 * 4)


@ALL_DEPTHS
def test_resumed_requests_whose_length_is_just_behind_a_block_go_on_as_they_are(depth: int) -> None:
    for num_generated in range(1, 9):
        driver = make_driver(max_concurrent_plans=depth)
        driver.add("a", prompt(3), max_tokens=16)
        while len(driver.completions["a"].token_ids) < num_generated:
            driver.step()
        (request,) = driver.core._scheduler.running
        driver.core._scheduler.preempt(request, 0.0)  # what it computed stays cached: as little as one token is left
        driver.run()
        assert driver.completions["a"].token_ids == driver.expected("a", 16)


@ALL_DEPTHS
def test_the_longest_of_prompts_does_not_keep_short_ones_from_starting_where_chunks_are_bounded(depth: int) -> None:
    driver = make_driver(
        **{"max_concurrent_plans": depth, "max_model_len": 2000, "num_gpu_blocks_override": 600},
        **{"max_num_batched_tokens": 64, "long_prefill_token_threshold": 32},
    )
    driver.add("long", prompt(1500), max_tokens=1)
    for number in range(10):
        driver.add(f"s{number}", prompt(4, 66 + number), max_tokens=1)
    for _ in range(4):
        driver.step()
    launch_all(driver)
    while driver.plans:
        driver.finish_step()
    assert all(driver.completions[f"s{number}"].finish_reason is FinishReason.LENGTH for number in range(10))
    assert driver.completions["long"].finish_reason is None


# Pauses and resets between


@IN_FLIGHT
def test_frozen_plans_in_flight_are_taken_in_and_requests_go_on_without_losing_a_token(depth: int) -> None:
    driver = make_driver(max_concurrent_plans=depth)
    driver.add("a", prompt(5), max_tokens=20)
    for _ in range(3):
        launch_all(driver)
        driver.pause(PauseMode.KEEP)
        while driver.plans:
            driver.finish_step()
        assert driver.core.is_paused
        driver.reset_prefix_cache(reset_running=True)
        driver.resume()
    driver.run()
    assert driver.completions["a"].token_ids == driver.expected("a", 20)


# Much of everything


def test_many_short_requests_over_a_tiny_pool_leave_no_more_behind_than_the_pool_holds() -> None:
    driver = make_driver(max_concurrent_plans=2, num_gpu_blocks_override=12, max_model_len=24, hash_salt=b"x")
    drawn = random.Random(5)
    for number in range(400):
        driver.add(
            f"r{number}", [*prompt(4 * drawn.randint(1, 3), 65 + drawn.randint(0, 20)), number % 256], max_tokens=1
        )
        driver.step()
        if number % 3 == 0:
            driver.abort(f"r{number}")
    driver.run()
    core = driver.core
    cache = core._kv_cache.prefix_cache
    assert len(cache._block_of) <= 12
    assert sum(map(len, cache._twins.values())) <= 12
    for left in (core._requests, core._blocked, core._scheduler.waiting._entries, cache._published, core._finished_ids):
        assert not left
    assert_empty(driver)


def test_a_hit_is_on_a_block_that_holds_these_very_tokens_also_under_churn() -> None:
    driver = make_driver(max_concurrent_plans=2, num_gpu_blocks_override=14, max_model_len=40, max_num_seqs=3)
    drawn = random.Random(3)
    history = {first: prompt(6, first) for first in (65, 66, 67, 68)}
    for number in range(40):
        first = drawn.choice(list(history))
        name = f"r{number}"
        driver.add(name, history[first], max_tokens=4)
        if drawn.random() < 0.5:
            continue
        driver.run()
        history[first] = (history[first] + driver.completions[RequestId(name)].token_ids)[:30]
    for name, completion in driver.run().items():
        assert completion.token_ids == driver.expected(name, 4)
    assert driver.core.stats().prefix_cache_hits > 0
