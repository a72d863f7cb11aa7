from __future__ import annotations

import numpy as np
import pytest

from engine.outputs import SchedulerOutput
from engine.request import RequestStatus
from engine.testing import CoreDriver


def rows(plan: SchedulerOutput | None) -> dict[str, int]:
    """Return request id → number of tokens of a plan."""
    assert plan is not None
    assert plan.num_tokens == sum(row.num_tokens for row in plan.requests)
    return {row.request_id: row.num_tokens for row in plan.requests}


def counts(driver: CoreDriver) -> tuple[int, int]:
    """Return how many run and how many wait."""
    stats = driver.core.stats()
    return stats.num_running, stats.num_waiting


def prompt(length: int, first: int = 65) -> list[int]:
    return [first] * length


def make_driver(**settings: object) -> CoreDriver:
    defaults = {"max_num_seqs": 16, "max_num_batched_tokens": 8192, "max_model_len": 4096, "block_size": 16}
    return CoreDriver.of(**{**defaults, "num_gpu_blocks_override": 256, **settings})


def test_all_prompts_that_fit_the_budget_run_at_once_in_order_of_arrival() -> None:
    driver = make_driver()
    for number in range(10):
        driver.add(f"r{number}", prompt(10, 65 + number))
    assert counts(driver) == (0, 10)
    assert rows(driver.step()) == {f"r{number}": 10 for number in range(10)}
    assert counts(driver) == (10, 0)
    assert rows(driver.step()) == {f"r{number}": 1 for number in range(10)}
    driver.abort("r3")
    assert counts(driver) == (9, 0)


@pytest.mark.parametrize("num_steps", [0, 1])
def test_each_end_leaves_one_request_less_whether_it_waits_or_runs(num_steps: int) -> None:
    driver = make_driver()
    for number in range(10):
        driver.add(f"r{number}", prompt(10, 65 + number))
        assert counts(driver) == (0, number + 1)
    for _ in range(num_steps):
        driver.step()
    for number in range(10):
        driver.abort(f"r{number}")
        assert counts(driver) == ((9 - number, 0) if num_steps else (0, 9 - number))
        assert f"r{number}" not in {request.request_id for request in driver.live_requests}
    assert driver.step().finished_request_ids == tuple(f"r{number}" for number in range(10))


@pytest.mark.parametrize("enable_prefix_caching", [False, True])
def test_the_long_prefill_threshold_shares_each_step_among_long_prompts(enable_prefix_caching: bool) -> None:
    driver = make_driver(
        max_num_batched_tokens=1024, long_prefill_token_threshold=400, enable_prefix_caching=enable_prefix_caching
    )
    for number in range(3):
        driver.add(f"r{number}", prompt(800, 65 + number))
    assert rows(driver.step()) == {"r0": 400, "r1": 400, "r2": 224}
    assert rows(driver.step()) == {"r0": 400, "r1": 400, "r2": 224}
    assert rows(driver.step()) == {"r0": 1, "r1": 1, "r2": 352}


def test_a_plan_made_before_the_last_is_committed_decodes_with_a_late_token_beside_the_newcomer() -> None:
    driver = make_driver(max_num_batched_tokens=1024, max_num_seqs=2, max_concurrent_plans=2)
    driver.add("a", prompt(512))
    assert rows(driver.plan()) == {"a": 512}
    driver.add("b", prompt(512, 66), max_tokens=1)
    plan = driver.plan()
    assert rows(plan) == {"a": 1, "b": 512}
    assert [row.num_late for row in plan.requests] == [1, 0]
    driver.finish_step()
    assert rows(driver.plan()) == {"a": 1}


def test_chunked_prefill_fills_the_step_and_without_it_whoever_fits_may_overtake() -> None:
    cases = (
        ({"enable_chunked_prefill": True}, {"a": 800, "b": 224}),
        ({"enable_chunked_prefill": False}, {"a": 800, "c": 10, "d": 10}),
        ({"enable_chunked_prefill": False, "max_overtakes": 0}, {"a": 800}),
    )
    for settings, expected in cases:
        driver = make_driver(max_num_batched_tokens=1024, max_model_len=1024, max_num_seqs=3, **settings)
        for name, length in (("a", 800), ("b", 800), ("c", 10), ("d", 10)):
            driver.add(name, prompt(length, ord(name)))
        assert rows(driver.step()) == expected


def test_never_more_than_max_num_seqs_requests_run() -> None:
    driver = make_driver(max_num_seqs=2)
    for name in "abc":
        driver.add(name, prompt(4, ord(name)), max_tokens=2)
    assert rows(driver.step()) == {"a": 4, "b": 4}
    assert rows(driver.step()) == {"a": 1, "b": 1}
    assert rows(driver.step()) == {"c": 4}


def test_equal_prompts_admitted_in_one_step_share_what_that_step_computes() -> None:
    driver = make_driver()
    driver.add("a", prompt(100))
    driver.add("b", prompt(100))
    plan = driver.plan()
    assert rows(plan) == {"a": 100, "b": 4}
    assert plan.requests[1].block_tables[0][:6].tolist() == plan.requests[0].block_tables[0][:6].tolist()
    driver.add("c", prompt(100))
    driver.finish_step()
    assert rows(driver.step()) == {"a": 1, "b": 1, "c": 4}
    driver.run()
    for name in "abc":
        assert driver.completions[name].token_ids == driver.expected(name, 16)
    assert [driver.completions[name].outputs[0].num_cached_tokens for name in "abc"] == [0, 96, 96]


def test_a_block_is_published_by_the_very_row_that_fills_it() -> None:
    driver = make_driver()
    size = driver.core.capacity.block_size
    driver.add("fills", prompt(size), max_tokens=2)
    driver.add("reads", prompt(size + 1), max_tokens=2)
    assert rows(driver.step()) == {"fills": size, "reads": 1}
    driver.run()


def test_a_history_sent_again_computes_only_what_is_behind_its_last_full_block() -> None:
    driver = make_driver()
    driver.add("a", prompt(100), max_tokens=200)
    driver.run()
    driver.add("again", prompt(100) + driver.completions["a"].token_ids)
    assert rows(driver.step()) == {"again": 300 % 16}


def test_a_plan_shows_each_row_where_it_starts_and_what_it_reads() -> None:
    driver = make_driver(max_num_batched_tokens=16, block_size=4, max_model_len=64)
    driver.add("a", list(range(65, 85)), temperature=0.5, seed=3)
    first, second = driver.step(), driver.step()
    for plan, start, num_tokens, samples, num_blocks in ((first, 0, 16, False, 4), (second, 16, 4, True, 5)):
        (row,) = plan.requests
        assert (row.start, row.num_tokens, row.samples, row.num_late) == (start, num_tokens, samples, 0)
        assert row.tokens.tolist() == list(range(65, 85))
        assert (row.tokens.dtype, row.block_tables[0].dtype) == (np.int32, np.int32)
        assert len(row.block_tables[0]) == num_blocks
        assert row.sampling_params.seed == 3
    assert (first.step, second.step) == (1, 2)


def test_what_a_plan_refers_to_does_not_change_while_it_is_in_flight() -> None:
    driver = make_driver(max_concurrent_plans=3, block_size=1, num_gpu_blocks_override=100, max_model_len=90)
    driver.add("a", prompt(30), max_tokens=60)
    seen = []
    while driver.core.has_work:
        while (plan := driver.plan()) is not None:
            seen += [(row.tokens, row.tokens.tolist()) for row in plan.requests]
            seen += [(row.block_tables[0], row.block_tables[0].tolist()) for row in plan.requests]
        driver.finish_step()
    assert len(seen) > 100
    assert all(view.tolist() == values for view, values in seen)


def test_deep_plans_count_their_late_tokens_and_stop_at_the_length_limit() -> None:
    driver = make_driver(max_concurrent_plans=3)
    driver.add("a", prompt(5), max_tokens=3)
    plans = [driver.plan() for _ in range(3)]
    assert [(row.start, row.num_tokens, row.num_late, len(row.tokens)) for plan in plans for row in plan.requests] == [
        (0, 5, 0, 5),
        (5, 1, 1, 5),
        (6, 1, 1, 5),
    ]
    for _ in range(3):
        driver.finish_step()
    assert driver.completions["a"].token_ids == driver.expected("a", 3)

    driver.add("b", prompt(5, 66), max_tokens=2)
    driver.plan()
    driver.plan()
    assert driver.plan() is None  # the plans in flight are certain to reach max_tokens
    driver.run()
    assert driver.completions["b"].token_ids == driver.expected("b", 2)


def test_under_pressure_the_last_to_come_is_preempted_and_waits_at_the_head() -> None:
    driver = make_driver(block_size=4, num_gpu_blocks_override=6, max_model_len=24, max_num_seqs=3)
    for name in "abc":
        driver.add(name, prompt(8, ord(name)), max_tokens=12)
    driver.add("d", prompt(4, ord("d")), max_tokens=2)
    assert rows(driver.step()) == {"a": 8, "b": 8, "c": 8}
    plan = driver.step()
    assert rows(plan) == {"a": 1, "b": 1}
    assert plan.preempted_request_ids == ("c",)
    assert counts(driver) == (2, 2)
    driver.run()
    for name, length in (("a", 12), ("b", 12), ("c", 12), ("d", 2)):
        assert driver.completions[name].token_ids == driver.expected(name, length)
    ends = sorted("abcd", key=lambda name: driver.completions[name].outputs[-1].step)
    assert ends.index("d") > ends.index("a")
    assert driver.core.stats().num_preemptions >= 1
    assert driver.completions["c"].event_kinds[:4] == ["queued", "scheduled", "preempted", "scheduled"]


def test_a_preempted_request_keeps_its_tokens_and_computes_at_most_one_block_again() -> None:
    driver = make_driver(block_size=4, num_gpu_blocks_override=12, max_model_len=48)
    driver.add("a", prompt(6), max_tokens=30)
    for _ in range(9):
        driver.step()
    known = driver.completions["a"].token_ids
    (request,) = driver.core._scheduler.running
    driver.core._scheduler.preempt(request, 0.0)
    driver.check()
    (row,) = driver.step().requests
    assert row.tokens.tolist() == prompt(6) + known[:9]
    assert row.start == 12
    assert row.num_tokens == 3
    driver.run()
    assert driver.completions["a"].token_ids == driver.expected("a", 30)


def test_a_step_that_preempts_admits_nobody() -> None:
    driver = make_driver(block_size=4, num_gpu_blocks_override=4, max_model_len=16, max_num_seqs=4)
    driver.add("a", prompt(8), max_tokens=8)
    driver.add("b", prompt(8, 66), max_tokens=8)
    driver.step()
    driver.add("c", prompt(1, 67), max_tokens=1)
    plan = driver.step()
    assert plan.preempted_request_ids == ("b",)
    assert rows(plan) == {"a": 1}


def test_nobody_is_preempted_while_plans_in_flight_hold_the_blocks_that_would_help() -> None:
    driver = make_driver(
        block_size=4, num_gpu_blocks_override=5, max_model_len=20, max_num_seqs=3, max_concurrent_plans=2
    )
    driver.add("a", prompt(8), max_tokens=4)
    driver.add("b", prompt(4, 66), max_tokens=4)
    driver.add("c", prompt(8, 67), max_tokens=4)
    assert rows(driver.plan()) == {"a": 8, "b": 4, "c": 8}
    driver.abort("c")
    plan = driver.plan()  # only finished ids: a and b need blocks that the first plan holds for c
    assert rows(plan) == {}
    assert plan.finished_request_ids == ("c",)
    driver.finish_step()
    assert rows(driver.plan()) == {"a": 1, "b": 1}
    driver.run()
    assert driver.core.stats().num_preemptions == 0


def test_the_oldest_request_is_never_preempted() -> None:
    driver = make_driver(block_size=4, num_gpu_blocks_override=3, max_model_len=12, max_num_seqs=2)
    driver.add("a", prompt(4), max_tokens=8)
    driver.add("b", prompt(4, 66), max_tokens=8)
    driver.run()
    for name in "ab":
        assert driver.completions[name].token_ids == driver.expected(name, 8)
    assert "preempted" not in driver.completions["a"].event_kinds


def test_lookups_are_counted_once_however_often_admission_is_tried() -> None:
    driver = make_driver(block_size=4, num_gpu_blocks_override=8, max_model_len=32)
    driver.add("a", prompt(16), max_tokens=9)
    driver.step()
    driver.add("b", prompt(16) + prompt(8, 66), max_tokens=2)
    driver.run()
    stats = driver.core.stats()
    assert stats.prefix_cache_queries == 16 + 24
    assert stats.prefix_cache_hits == 16
    assert driver.completions["b"].outputs[0].num_cached_tokens == 16


def test_without_prefix_caching_no_lookup_is_counted() -> None:
    driver = make_driver(enable_prefix_caching=False)
    driver.add("a", prompt(20))
    driver.add("b", prompt(20))
    driver.run()
    stats = driver.core.stats()
    assert (stats.prefix_cache_queries, stats.prefix_cache_hits) == (0, 0)
    assert (stats.prefix_cache_requests, stats.preempted_prefix_cache_requests) == (0, 0)


@pytest.mark.parametrize("settings", [{"enable_prefix_caching": True}, {"enable_prefix_caching": False}])
@pytest.mark.parametrize("skips", [False, True])
def test_a_first_step_gives_ten_short_prompts_all_their_tokens_whatever_is_cached(
    settings: dict[str, object], skips: bool
) -> None:
    driver = make_driver(**settings)
    for number in range(10):
        driver.add(f"r{number}", prompt(10), skip_reading_prefix_cache=skips)
    plan = driver.step()
    assert rows(plan) == {f"r{number}": 10 for number in range(10)}
    assert plan.finished_request_ids == plan.preempted_request_ids == ()
    assert counts(driver) == (10, 0)


def test_a_lookup_that_had_to_be_tried_again_counts_once_with_what_it_found_in_the_end() -> None:
    driver = make_driver(num_gpu_blocks_override=5, max_model_len=80, watermark=0.0)
    driver.add("first", prompt(33), max_tokens=20)
    driver.step()
    driver.add("again", prompt(33) + prompt(33, 66), max_tokens=2)
    for _ in range(3):
        assert rows(driver.step()) == {"first": 1}  # two are hit of five blocks, two are free: one is missing
    driver.run()
    stats = driver.core.stats()
    assert (stats.prefix_cache_requests, stats.prefix_cache_queries, stats.prefix_cache_hits) == (2, 33 + 66, 32)
    assert driver.completions["again"].outputs[0].num_cached_tokens == 32


@pytest.mark.parametrize("enable_prefix_caching", [True, False])
def test_who_comes_back_after_a_preemption_is_counted_apart_and_nowhere_without_a_cache(
    enable_prefix_caching: bool,
) -> None:
    driver = make_driver(enable_prefix_caching=enable_prefix_caching)
    driver.add("a", prompt(40), max_tokens=4)
    driver.step()
    driver.reset_prefix_cache(reset_running=True)
    driver.step()
    driver.core._scheduler.preempt(driver.core._scheduler.running[0], 0.0)
    driver.run()
    stats = driver.core.stats()
    first = (stats.prefix_cache_requests, stats.prefix_cache_queries, stats.prefix_cache_hits)
    resumed = (
        stats.preempted_prefix_cache_requests,
        stats.preempted_prefix_cache_queries,
        stats.preempted_prefix_cache_hits,
    )
    assert stats.num_preemptions == 2
    assert (first, resumed) == (((1, 40, 0), (2, 41 + 42, 32)) if enable_prefix_caching else ((0, 0, 0), (0, 0, 0)))
    assert driver.completions["a"].outputs[0].num_cached_tokens == 0
    assert driver.completions["a"].token_ids == driver.expected("a", 4)


def test_a_plan_counts_the_leading_blocks_that_all_running_requests_share() -> None:
    driver = make_driver()
    for name in "abc":
        driver.add(name, prompt(40) + prompt(30, ord(name)), max_tokens=8)
    assert driver.step().num_common_prefix_blocks == (2,)
    driver.add("d", prompt(16) + prompt(20, 70), max_tokens=2)
    assert driver.step().num_common_prefix_blocks == (1,)
    driver.add("e", prompt(5, 71), max_tokens=4)
    assert driver.step().num_common_prefix_blocks == (0,)


def test_a_reset_that_cannot_be_done_changes_nothing_and_one_of_the_running_keeps_their_order() -> None:
    driver = make_driver()
    for number in range(10):
        driver.add(f"r{number}", prompt(10, 65 + number))
    driver.step()
    assert not driver.reset_prefix_cache()
    assert counts(driver) == (10, 0)
    assert driver.reset_prefix_cache(reset_running=True)
    assert counts(driver) == (0, 10)
    assert {request.status for request in driver.live_requests} == {RequestStatus.PREEMPTED}
    assert list(rows(driver.step())) == [f"r{number}" for number in range(10)]
