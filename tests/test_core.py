from __future__ import annotations

import subprocess
import sys

import msgspec
import pytest

from engine.config import EngineConfig
from engine.core import EngineCore, WaitsFor
from engine.errors import ConfigError
from engine.outputs import Capacity, FinishReason, ModelRunnerOutput, RequestId
from engine.protocol import AbortReason, EngineCoreRequest, PauseMode
from engine.sampling_params import SamplingParams
from engine.testing import SIMULATED_FAILURE, CoreDriver, NullModelRunner, run_core

ALL_DEPTHS = pytest.mark.parametrize("depth", [1, 2, 3])


def prompt(length: int, first: int = 65) -> list[int]:
    return [first] * length


def make_driver(**settings: object) -> CoreDriver:
    defaults = {"max_num_seqs": 16, "max_num_batched_tokens": 64, "max_model_len": 64, "block_size": 4}
    return CoreDriver.of(**{**defaults, "num_gpu_blocks_override": 64, **settings})


def launch_all(driver: CoreDriver) -> None:
    while driver.plan() is not None:
        pass


def assert_empty(driver: CoreDriver) -> None:
    stats = driver.core.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_used_blocks) == (0, 0, 0)
    assert not driver.core.has_work
    assert driver.core.plan(0.0) is None
    assert driver.core.waits_for is None
    assert driver.runner._sampled == {}


# Whole lives


@ALL_DEPTHS
def test_every_request_gets_the_tokens_it_gets_alone_and_nothing_is_left(depth: int) -> None:
    driver = make_driver(max_concurrent_plans=depth, num_gpu_blocks_override=16, max_num_batched_tokens=16)
    for number in range(12):
        driver.add(f"r{number}", prompt(3 + 4 * number, 65 + number % 3), max_tokens=12, seed=number, temperature=0.7)
    for name, completion in driver.run().items():
        assert completion.token_ids == driver.expected(name, 12)
        assert completion.finish_reason is FinishReason.LENGTH
        assert completion.event_kinds[:2] == ["queued", "scheduled"]
        assert completion.outputs[0].num_cached_tokens is not None
        assert {output.num_cached_tokens for output in completion.outputs[1:]} == {None}
    assert driver.core.stats().num_preemptions > 0
    assert_empty(driver)


@ALL_DEPTHS
@pytest.mark.parametrize("kind", ["stop_token_ids", "eos_token_ids"])
def test_a_stop_token_ends_a_request_although_later_plans_are_in_flight(depth: int, kind: str) -> None:
    driver = make_driver(max_concurrent_plans=depth)
    driver.add("free", prompt(5), max_tokens=20)
    tokens = driver.run()["free"].token_ids
    stop = tokens[7]
    driver.add("a", prompt(5), max_tokens=20, **{kind: (stop,)})
    completion = driver.run()["a"]
    assert completion.token_ids == tokens[: tokens.index(stop) + 1]
    assert completion.finish_reason is FinishReason.STOP
    assert completion.outputs[-1].stop_reason == (stop if kind == "stop_token_ids" else None)
    assert_empty(driver)


def test_without_max_tokens_the_context_is_the_limit() -> None:
    driver = make_driver()
    driver.add("a", prompt(5), max_tokens=None)
    assert driver.run()["a"].token_ids == driver.expected("a", 59)
    assert driver.completions["a"].finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("length", [62, 63])
def test_a_prompt_that_leaves_room_for_one_token_is_served(length: int) -> None:
    driver = make_driver()
    driver.add("a", prompt(length), max_tokens=16)
    assert driver.run()["a"].token_ids == driver.expected("a", 64 - length)


def test_running_and_waiting_are_counted_as_requests_come_and_go() -> None:
    driver = make_driver()

    def counts() -> tuple[int, int]:
        return driver.core.stats().num_waiting, driver.core.stats().num_running

    driver.add("a", prompt(4))
    assert counts() == (1, 0)
    driver.step()
    assert counts() == (0, 1)
    driver.add("b", prompt(4, 66))
    assert counts() == (1, 1)
    driver.step()
    assert counts() == (0, 2)
    driver.abort("a")
    driver.abort("b")
    assert counts() == (0, 0)
    assert driver.core.has_work
    assert driver.step().finished_request_ids == ("a", "b")
    assert not driver.core.has_work
    driver.add("a", prompt(4))
    assert driver.run()["a"].token_ids == driver.expected("a", 16)


def test_the_same_calls_give_the_same_plans() -> None:
    def history() -> list[object]:
        driver = make_driver(max_concurrent_plans=2, num_gpu_blocks_override=16)
        for number in range(8):
            driver.add(f"r{number}", prompt(6 + number, 65 + number % 2), max_tokens=9)
        plans = []
        while driver.core.has_work:
            while (plan := driver.plan()) is not None:
                plans.append(repr(plan))
            driver.finish_step()
            driver.abort(f"r{len(plans) // 3}")
        return plans

    first = history()
    assert len(first) > 10
    assert history() == first


def test_salts_of_requests_separate_their_cache_entries() -> None:
    driver = make_driver()
    for name, salt in (("a", "x"), ("b", "x"), ("c", "y"), ("d", None)):
        driver.add(name, prompt(20), cache_salt=salt, max_tokens=1)
        driver.run()
    assert [driver.completions[name].outputs[0].num_cached_tokens for name in "abcd"] == [0, 16, 0, 0]


def test_the_hash_salt_changes_no_decision() -> None:
    plans = []
    for salt in (b"", b"other"):
        driver = make_driver(hash_salt=salt, num_gpu_blocks_override=16)
        for name in "abc":
            driver.add(name, prompt(13), max_tokens=9)
        plans.append([repr(driver.step()) for _ in range(12)])
    assert plans[0] == plans[1]


@ALL_DEPTHS
def test_what_has_left_is_in_no_queue_no_map_and_no_table(depth: int) -> None:
    driver = make_driver(max_concurrent_plans=depth, num_gpu_blocks_override=16)
    for number in range(8):
        driver.add(f"r{number}", prompt(10, 65 + number), max_tokens=10)
    driver.step()
    driver.abort("r0", "r7")
    driver.run()
    core = driver.core
    scheduler, kv_cache = core._scheduler, core._kv_cache
    for left in (
        *(core._requests, core._outputs, core._finished_ids, scheduler.running, scheduler._preempted_ids),
        *(scheduler.waiting._heap, scheduler.waiting._entries, scheduler.in_flight._plans),
        *(kv_cache._tables, kv_cache._held, kv_cache.prefix_cache._published, driver.runner._executed),
    ):
        assert not left
    assert kv_cache.pool.num_free_blocks == 16


# Refusals


@pytest.mark.parametrize(
    ("token_ids", "params", "settings", "message"),
    [
        (prompt(64), {}, {}, "the prompt has 64 tokens and the context holds 64"),
        ([], {}, {}, "the prompt has no tokens"),
        ([1, 256], {}, {}, "from 1 to 256, allowed are 0 to 255"),
        ([1, 2**40], {}, {}, "allowed are 0 to 255"),
        ([-1], {}, {}, "allowed are 0 to 255"),
        ([1], {"n": 2}, {}, "n is 2"),
    ],
)
def test_a_request_that_can_never_run_is_refused_with_the_numbers_and_alone(
    token_ids: list[int], params: dict[str, object], settings: dict[str, object], message: str
) -> None:
    driver = make_driver(**settings)
    driver.add("good", prompt(5))
    driver.add("bad", token_ids, **params)
    (output,) = driver.completions["bad"].outputs
    assert output.finish_reason is FinishReason.ERROR
    assert message in output.error.message
    assert driver.run()["good"].token_ids == driver.expected("good", 16)
    assert_empty(driver)


def test_what_the_pool_can_never_hold_is_refused_at_once_and_what_it_just_holds_runs() -> None:
    config = EngineConfig.of(model="null", block_size=4, max_model_len=64, num_gpu_blocks_override=16)
    runner = NullModelRunner(config)
    capacity = msgspec.structs.replace(runner.start(lambda *_: None), num_kv_blocks=5)
    driver = CoreDriver(EngineCore(config, capacity), runner)
    driver.add("fits", prompt(10), max_tokens=7)
    driver.add("short prompt", prompt(4), max_tokens=None)
    driver.add("long output", prompt(10, 66), max_tokens=8)
    for name, asked in (("short prompt", "prompt of 4 and max_tokens None"), ("long output", "prompt of 10 and")):
        (output,) = driver.completions[name].outputs
        assert output.error.type == "PromptTooLong"
        assert asked in output.error.message
        assert "there are 4" in output.error.message
    assert driver.run()["fits"].token_ids == driver.expected("fits", 7)


def test_optional_parts_are_refused_by_name() -> None:
    driver = make_driver()
    params = SamplingParams(temperature=0)
    request = EngineCoreRequest(RequestId("a"), "a", [1], params, arrival_time=0.0, extras={"adapter": "x"})
    driver.core.add(request, 0.0)
    (output,) = driver.core.take_outputs()
    assert "['adapter']" in output.error.message


def test_an_id_in_use_is_refused_to_the_caller_and_its_owner_goes_on() -> None:
    driver = make_driver()
    driver.add("a", prompt(5))
    driver.step()
    with pytest.raises(ValueError, match="'a' is in use"):
        driver.add("a", prompt(7))
    driver.check()
    assert driver.run()["a"].token_ids == driver.expected("a", 16)


def test_without_chunked_prefill_a_step_must_hold_the_whole_context() -> None:
    config = EngineConfig.of(enable_chunked_prefill=False, max_num_batched_tokens=64)
    capacity = Capacity(num_kv_blocks=10, block_size=16, max_model_len=65, vocab_size=9, model_digest="")
    with pytest.raises(ConfigError, match="64 must be at least the context of 65"):
        EngineCore(config, capacity)


# Aborts


@pytest.mark.parametrize(
    ("reason", "finish_reason"),
    [(reason, FinishReason.ABORT) for reason in AbortReason if reason is not AbortReason.STOP_STRING]
    + [(AbortReason.STOP_STRING, FinishReason.STOP)],
)
def test_an_abort_is_answered_at_once_in_every_state(reason: AbortReason, finish_reason: FinishReason) -> None:
    driver = make_driver(max_num_batched_tokens=16, max_num_seqs=2)
    driver.add("decoding", prompt(4), max_tokens=30)
    driver.step()
    driver.add("prefilling", prompt(40, 66))
    driver.add("waiting", prompt(4, 67))
    driver.step()
    driver.abort("decoding", "prefilling", "waiting", "unknown", reason=reason)
    for name in ("decoding", "prefilling", "waiting"):
        assert driver.completions[name].finish_reason is finish_reason
        assert driver.completions[name].outputs[-1].new_token_ids == []
    driver.abort("decoding", "prefilling", "waiting", reason=reason)
    assert len(driver.completions["waiting"].outputs) == 1
    assert sorted(driver.step().finished_request_ids) == ["decoding", "prefilling", "waiting"]
    assert_empty(driver)


def test_tokens_that_come_after_an_abort_are_dropped_one_request_at_a_time() -> None:
    driver = make_driver(max_concurrent_plans=2, max_num_batched_tokens=100)
    order = [0, 8, 3, 1, 6, 4, 2, 5, 7, 9]
    for number in range(10):
        driver.add(f"r{number}", prompt(4, 65 + number), max_tokens=20)
    for number in order:
        launch_all(driver)
        driver.abort(f"r{number}")
        driver.finish_step()
    driver.run()
    for count, number in enumerate(order):
        completion = driver.completions[f"r{number}"]
        assert completion.finish_reason is FinishReason.ABORT
        assert completion.token_ids == driver.expected(f"r{number}", count)
    assert_empty(driver)


@ALL_DEPTHS
def test_blocks_of_an_aborted_request_are_free_once_no_plan_in_flight_names_them(depth: int) -> None:
    driver = make_driver(max_concurrent_plans=depth)
    driver.add("a", prompt(10))
    launch_all(driver)
    driver.abort("a")
    for _ in range(depth):
        assert driver.core.stats().num_used_blocks > 0
        driver.finish_step()
    assert driver.core.stats().num_used_blocks == 0


def test_what_an_aborted_request_was_computing_can_be_hit_for_its_plan_still_writes() -> None:
    driver = make_driver(max_concurrent_plans=2)
    driver.add("a", prompt(10))
    driver.plan()
    driver.abort("a")
    driver.add("b", prompt(10))
    assert [(row.request_id, row.start) for row in driver.plan().requests] == [("b", 8)]
    assert driver.run()["b"].token_ids == driver.expected("b", 16)


def test_an_id_may_be_used_again_at_once_while_its_first_owner_is_in_flight() -> None:
    driver = make_driver(max_concurrent_plans=2)
    driver.add("a", prompt(10))
    driver.plan()
    driver.abort("a")
    driver.add("a", prompt(9, 66))
    plan = driver.plan()
    assert plan.finished_request_ids == ("a",)
    assert [row.request_id for row in plan.requests] == ["a"]
    assert driver.run()["a"].token_ids == driver.expected("a", 16)
    assert driver.past[0][1].token_ids == []
    assert_empty(driver)


def test_each_end_is_told_exactly_once_also_by_an_empty_plan() -> None:
    driver = make_driver()
    driver.add("a", prompt(4), max_tokens=2)
    driver.add("b", prompt(4, 66), max_tokens=4)
    told = []
    while driver.core.has_work:
        plan = driver.step()
        told.append((len(plan.requests), plan.finished_request_ids))
    assert told == [(2, ()), (2, ()), (1, ("a",)), (1, ()), (0, ("b",))]


# Failures


@ALL_DEPTHS
def test_a_failed_step_ends_all_its_requests_with_the_cause(depth: int) -> None:
    driver = make_driver(max_concurrent_plans=depth)
    driver.add("a", prompt(10))
    driver.add("b", prompt(10, 66))
    driver.plan(fails=True)
    driver.add("c", prompt(10, 67))
    driver.finish_step()
    for name in "ab":
        (output,) = driver.completions[name].outputs
        assert (output.finish_reason, output.error) == (FinishReason.ERROR, SIMULATED_FAILURE)
    assert driver.run()["c"].token_ids == driver.expected("c", 16)
    assert_empty(driver)


@ALL_DEPTHS
def test_blaming_one_request_for_a_failed_step_costs_the_others_nothing_but_time(depth: int) -> None:
    driver = make_driver(max_concurrent_plans=depth, max_num_batched_tokens=8, max_num_seqs=4)
    for name in "abc":
        driver.add(name, prompt(10, ord(name)), max_tokens=12)
    for _ in range(3):
        driver.step()
    while driver.plans:
        driver.finish_step()
    driver.plan(fails=True)
    launch_all(driver)
    driver.finish_step(blamed=["c"])
    driver.run()
    for name in "ab":
        assert driver.completions[name].token_ids == driver.expected(name, 12)
    assert driver.completions["c"].finish_reason is FinishReason.ERROR
    assert_empty(driver)


def test_who_shared_blocks_of_a_failed_step_computes_them_anew() -> None:
    driver = make_driver(max_concurrent_plans=2)
    driver.add("a", prompt(20))
    driver.plan(fails=True)
    driver.add("b", prompt(20))
    assert [(row.request_id, row.start) for row in driver.plan().requests][-1] == ("b", 16)
    driver.finish_step(blamed=["a"])
    assert driver.core.stats().num_preemptions == 1
    while driver.plans:
        driver.finish_step()
    (row,) = driver.plan().requests
    assert (row.request_id, row.start, row.num_tokens) == ("b", 0, 20)
    assert driver.run()["b"].token_ids == driver.expected("b", 16)
    assert_empty(driver)


def test_a_plan_undone_by_an_earlier_failure_is_committed_without_effect_and_its_failure_ends_nobody() -> None:
    for second_fails in (False, True):
        driver = make_driver(max_concurrent_plans=2, max_num_batched_tokens=16)
        driver.add("a", prompt(30), max_tokens=4)
        driver.plan(fails=True)
        driver.plan(fails=second_fails)
        driver.finish_step(blamed=[])
        driver.finish_step()
        assert driver.completions["a"].outputs == []
        (row,) = driver.plan().requests
        assert (row.start, row.num_tokens) == (0, 16)
        assert driver.run()["a"].token_ids == driver.expected("a", 4)


def test_a_row_that_fails_alone_ends_alone_and_nobody_hits_what_it_wrote() -> None:
    driver = make_driver()
    driver.add("a", prompt(10))
    driver.add("b", prompt(10, 66))
    driver.plan()
    driver.finish_step(broken=["a"])
    assert driver.completions["a"].outputs[-1].error == SIMULATED_FAILURE
    driver.add("again", prompt(10))
    driver.run()
    assert driver.completions["again"].outputs[0].num_cached_tokens == 0
    assert driver.completions["b"].token_ids == driver.expected("b", 16)
    assert_empty(driver)


def test_who_shares_blocks_of_a_row_that_failed_alone_is_preempted_and_computes_them_itself() -> None:
    driver = make_driver()
    for name in ("a", "b"):
        driver.add(name, prompt(10), max_tokens=4)
    driver.add("other", prompt(10, 66), max_tokens=4)
    plan = driver.plan()
    assert plan is not None
    assert [row.start for row in plan.requests] == [0, 8, 0]  # the second reads what the first computes in this step
    driver.finish_step(broken=["a"])
    plan = driver.plan()
    assert plan is not None
    assert plan.preempted_request_ids == ("b",)
    assert {row.request_id: row.start for row in plan.requests} == {"other": 10, "b": 0}
    driver.run()
    assert driver.completions["a"].finish_reason is FinishReason.ERROR
    for name in ("b", "other"):
        assert driver.completions[name].token_ids == driver.expected(name, 4)
    assert driver.completions["b"].event_kinds.count("preempted") == 1
    assert_empty(driver)


def test_what_a_sharer_has_in_flight_with_and_behind_a_row_that_failed_alone_counts_for_nothing() -> None:
    driver = make_driver(max_concurrent_plans=2)
    for name in ("a", "b"):
        driver.add(name, prompt(10), max_tokens=4)
    driver.plan()
    driver.plan()
    driver.finish_step(broken=["a"])
    assert driver.completions["b"].token_ids == []  # its first token comes from what the failed row has computed
    driver.finish_step()  # and so does its second
    assert driver.completions["b"].token_ids == []
    driver.run()
    assert driver.completions["b"].token_ids == driver.expected("b", 4)
    assert_empty(driver)


def test_plans_end_in_the_order_in_which_they_were_made() -> None:
    driver = make_driver(max_concurrent_plans=2)
    driver.add("a", prompt(10))
    first, second = driver.plan(), driver.plan()
    output = ModelRunnerOutput(step=second.step, sampled_token_ids=[[65]])
    with pytest.raises(ValueError, match="step 2 is not the oldest plan in flight, which is step 1"):
        driver.core.commit(second, output, 0.0)
    with pytest.raises(ValueError, match="step 2 is not the oldest"):
        driver.core.fail(second, SIMULATED_FAILURE)
    with pytest.raises(ValueError, match="a result of step 2 with 1 rows is not that of step 1"):
        driver.core.commit(first, output, 0.0)
    driver.check()
    assert driver.run()["a"].token_ids == driver.expected("a", 16)
    with pytest.raises(ValueError, match="oldest plan in flight, which is none"):
        driver.core.commit(first, output, 0.0)


# Pause, resume, reset


def test_pausing_with_abort_ends_all_and_what_comes_then_waits_for_the_resume() -> None:
    driver = make_driver()
    driver.add("a", prompt(4))
    driver.step()
    driver.add("b", prompt(4, 66))
    driver.core.pause(PauseMode.ABORT)
    driver.check()
    assert {driver.completions[name].finish_reason for name in "ab"} == {FinishReason.ABORT}
    assert driver.core.is_paused
    driver.add("c", prompt(4, 67))
    driver.add("d", prompt(4, 68))
    driver.run()
    assert driver.core.waits_for is WaitsFor.RESUME
    assert driver.core.has_work
    driver.abort("d")
    assert driver.completions["d"].finish_reason is FinishReason.ABORT
    assert driver.completions["d"].token_ids == []
    driver.core.resume()
    assert not driver.core.is_paused
    assert driver.run()["c"].token_ids == driver.expected("c", 16)
    assert_empty(driver)


@ALL_DEPTHS
def test_pausing_with_wait_lets_the_running_ones_finish_and_admits_nobody(depth: int) -> None:
    driver = make_driver(max_concurrent_plans=depth)
    driver.add("a", prompt(4), max_tokens=8)
    driver.plan()
    driver.add("b", prompt(4, 66), max_tokens=8)
    driver.core.pause(PauseMode.WAIT)
    assert not driver.core.is_paused
    driver.run()
    assert driver.completions["a"].token_ids == driver.expected("a", 8)
    assert driver.core.is_paused
    assert driver.completions["b"].outputs == []
    driver.core.resume()
    assert driver.run()["b"].token_ids == driver.expected("b", 8)


def test_a_request_preempted_while_the_engine_drains_waits_and_holds_nothing_up() -> None:
    driver = make_driver(num_gpu_blocks_override=5, max_model_len=20)
    driver.add("a", prompt(8), max_tokens=12)
    driver.add("b", prompt(8, 66), max_tokens=12)
    driver.step()
    driver.core.pause(PauseMode.WAIT)
    driver.run()
    assert driver.core.is_paused
    assert driver.completions["a"].token_ids == driver.expected("a", 12)
    assert driver.completions["b"].finish_reason is None
    driver.core.resume()
    assert driver.run()["b"].token_ids == driver.expected("b", 12)


@ALL_DEPTHS
def test_pausing_with_keep_freezes_everything_where_it_is(depth: int) -> None:
    driver = make_driver(max_concurrent_plans=depth)
    driver.add("a", prompt(4), max_tokens=20)
    launch_all(driver)
    driver.core.pause(PauseMode.KEEP)
    driver.run()
    assert driver.core.is_paused
    assert driver.completions["a"].token_ids == driver.expected("a", depth)
    assert driver.core.stats().num_running == 1
    assert driver.plan() is None
    assert driver.core.waits_for is WaitsFor.RESUME
    driver.core.resume()
    assert driver.run()["a"].token_ids == driver.expected("a", 20)


def test_ends_are_told_to_the_executor_while_paused() -> None:
    driver = make_driver()
    driver.add("a", prompt(4))
    driver.step()
    driver.core.pause(PauseMode.KEEP)
    driver.abort("a")
    assert driver.step().finished_request_ids == ("a",)
    assert_empty(driver)


def test_an_unknown_pause_mode_is_refused() -> None:
    with pytest.raises(ValueError, match="sleep"):
        make_driver().core.pause("sleep")  # type: ignore[arg-type]


def test_the_prefix_cache_is_reset_only_while_no_block_is_in_use() -> None:
    driver = make_driver()
    driver.add("a", prompt(10), max_tokens=4)
    driver.step()
    assert not driver.core.reset_prefix_cache()
    driver.run()
    assert driver.core.reset_prefix_cache()
    driver.check()
    driver.add("b", prompt(10), max_tokens=4)
    assert driver.run()["b"].outputs[0].num_cached_tokens == 0


@ALL_DEPTHS
def test_resetting_the_running_preempts_all_in_order_and_they_compute_everything_again(depth: int) -> None:
    driver = make_driver(max_concurrent_plans=depth, max_num_batched_tokens=100)
    for number in range(10):
        driver.add(f"r{number}", prompt(10, 65 + number), max_tokens=6)
    driver.step()
    launch_all(driver)
    assert driver.core.reset_prefix_cache(reset_running=True)
    driver.check()
    stats = driver.core.stats()
    assert (stats.num_running, stats.num_waiting) == (0, 10)
    while driver.plans:
        driver.finish_step()
    plan = driver.plan()
    assert [row.request_id for row in plan.requests] == [f"r{number}" for number in range(10)][: len(plan.requests)]
    assert all(row.start == 0 for row in plan.requests)
    assert plan.preempted_request_ids == tuple(f"r{number}" for number in reversed(range(10)))
    for name, completion in driver.run().items():
        assert completion.token_ids == driver.expected(name, 6)
    assert_empty(driver)


# The queue time-out


def queue_driver(**settings: object) -> CoreDriver:
    return make_driver(max_num_seqs=1, queue_timeout=10.0, **settings)  # the driver's clock ticks once a call


def test_a_request_never_admitted_within_the_queue_timeout_ends_with_its_cause() -> None:
    driver = queue_driver()
    driver.add("runs", prompt(4), max_tokens=50)
    driver.step()
    driver.add("waits", prompt(4), max_tokens=5)
    assert driver.core.next_deadline == driver.now + 10.0
    while "waits" not in driver.completions or driver.completions[RequestId("waits")].finish_reason is None:
        assert driver.now < 30.0
        driver.step()
    completion = driver.completions[RequestId("waits")]
    assert completion.finish_reason is FinishReason.ERROR
    assert completion.outputs[-1].error.type == "QueueTimeout"
    assert "--queue-timeout 10.0" in completion.outputs[-1].error.message
    assert driver.run()[RequestId("runs")].token_ids == driver.expected("runs", 50)
    assert_empty(driver)


def test_what_was_admitted_is_never_timed_out_also_not_while_preempted() -> None:
    driver = make_driver(queue_timeout=10.0, num_gpu_blocks_override=17, enable_prefix_caching=False)
    for name in "abcdef":
        driver.add(name, prompt(4), max_tokens=40)
    driver.plan()
    assert driver.core.next_deadline == float("inf")
    driver.finish_step()
    for name, completion in driver.run().items():
        assert completion.token_ids == driver.expected(name, 40)
    assert driver.core.stats().num_preemptions > 0


def test_the_deadline_is_that_of_the_oldest_that_still_waits() -> None:
    driver = queue_driver()
    for name in ("runs", "first", "second"):
        driver.add(name, prompt(4), max_tokens=50)
    driver.plan()
    assert driver.core.next_deadline == 12.0
    driver.abort("first")
    assert driver.core.next_deadline == 13.0
    driver.abort("second", "runs")
    assert driver.core.next_deadline == float("inf")
    driver.run()
    assert not driver.core._queue_deadlines
    assert_empty(driver)


def test_a_paused_engine_times_its_queue_out_too() -> None:
    driver = queue_driver()
    driver.core.pause(PauseMode.WAIT)
    driver.add("waits", prompt(4), max_tokens=5)
    assert driver.core.plan(driver.core.next_deadline - 0.1) is None
    assert driver.core.waits_for is WaitsFor.RESUME
    plan = driver.core.plan(driver.core.next_deadline)
    assert plan.finished_request_ids == ("waits",)
    (output,) = driver.core.take_outputs()
    assert output.error.type == "QueueTimeout"
    driver.core.check_invariants()


def test_without_a_queue_timeout_nothing_is_remembered() -> None:
    driver = make_driver(max_num_seqs=1)
    driver.add("runs", prompt(4))
    driver.add("waits", prompt(4))
    assert driver.core.next_deadline == float("inf")


def test_run_core_drives_a_core_of_the_callers_own() -> None:
    config = EngineConfig.of(model="null")
    runner = NullModelRunner(config)
    core = EngineCore(config, runner.start(lambda *_: None))
    core.add(EngineCoreRequest(RequestId("a"), "a", [65], SamplingParams(), arrival_time=0.0), 0.0)
    assert len(run_core(core, runner)["a"].token_ids) == 16


def test_the_pure_wing_reaches_neither_torch_nor_trio_nor_asyncio() -> None:
    code = "import engine.core, engine.executor.null, engine.testing, sys; print(*sys.modules)"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert {"torch", "trio", "asyncio", "transformers"}.isdisjoint(answer.stdout.split())


def test_more_requests_than_may_run_or_wait_are_refused_with_the_numbers() -> None:
    driver = CoreDriver.of(max_num_seqs=2, max_num_waiting=3)
    for number in range(6):
        driver.add(f"r{number}", [65, number], max_tokens=2)
    (refused,) = driver.completions["r5"].outputs
    assert refused.error is not None
    assert refused.error.type == "QueueFull"
    assert "--max-num-seqs 2 and --max-num-waiting 3" in refused.error.message
    driver.run()
    driver.add("r6", [65], max_tokens=2)
    assert driver.run()["r6"].token_ids == driver.expected("r6", 2)
