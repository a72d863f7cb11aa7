"""The core under Trio, over memory channels and a real worker thread, with steps that are made to fail."""

from __future__ import annotations

import threading
from functools import partial

import pytest
import trio
import trio.testing

from engine.config import EngineConfig
from engine.executor.inline import InlineExecutor
from engine.executor.null import NullModelRunner
from engine.outputs import FinishReason, RequestId, SchedulerOutput
from engine.protocol import (
    AbortRequest,
    ClientMessage,
    EngineCoreRequest,
    EngineDead,
    EngineMessage,
    Pause,
    PauseMode,
    ResetPrefixCache,
    Resume,
    Shutdown,
    StepsRead,
    UtilityCall,
)
from engine.sampling_params import SamplingParams
from engine.server import EngineCoreServer
from engine.testing import expected_tokens
from tests.server_client import GREEDY, FailingRunner, receive_all, running


async def test_the_start_has_one_order_and_ready_comes_last() -> None:
    async with running() as harness:
        assert harness.phases == ["weights", "kv_specs", "profile", "kv_pages", "warm_up", "scheduler", "ready"]


async def test_a_failed_start_is_the_last_word_and_names_its_phase() -> None:
    async with running(max_model_len=4096, num_gpu_blocks_override=2) as harness:
        assert isinstance(harness.last_word, EngineDead)
        assert harness.last_word.cause.type == "ConfigError"
        assert harness.last_word.cause.phase == "profile"


@pytest.mark.parametrize("depth", [1, 2, 3])
async def test_plans_in_flight_give_the_tokens_of_the_definition(depth: int) -> None:
    async with running(depth=depth, max_num_seqs=4, max_num_batched_tokens=16) as harness:
        prompts = {f"r{i}": [65 + i] * (3 * i + 1) for i in range(9)}
        for name, prompt in prompts.items():
            harness.add(name, prompt)
        harness.send(AbortRequest([RequestId("r4")]))
        await harness.read_until(lambda: len(harness.ends) == 9)
        assert harness.ends["r4"].finish_reason is FinishReason.ABORT
        for name, prompt in prompts.items():
            expected = expected_tokens(prompt, GREEDY, 10)
            assert harness.tokens[name] == expected[: len(harness.tokens[name])]
            assert name == "r4" or len(harness.tokens[name]) == 10


@pytest.mark.parametrize("depth", [1, 2])
async def test_a_failed_step_fails_its_requests_and_the_engine_goes_on(depth: int) -> None:
    async with running(lambda step, plan: RuntimeError("bad luck") if step == 3 else None, depth) as harness:
        harness.add("a", [65])
        await harness.read_until(lambda: "a" in harness.ends)
        assert harness.ends["a"].finish_reason is FinishReason.ERROR
        assert harness.ends["a"].error.message == "bad luck"
        harness.add("b", [66])
        await harness.read_until(lambda: "b" in harness.ends)
        assert harness.tokens["b"] == expected_tokens([66], GREEDY, 10)


async def test_a_memory_error_fails_the_newest_request_alone() -> None:
    async with running(lambda step, plan: MemoryError("out of memory") if step == 2 else None) as harness:
        harness.add("old", [65])
        harness.add("new", [66])
        await harness.read_until(lambda: len(harness.ends) == 2)
        assert harness.ends["new"].error.type == "MemoryError"
        assert harness.tokens["old"] == expected_tokens([65], GREEDY, 10)


async def test_two_failed_steps_in_a_row_end_the_engine_with_the_cause() -> None:
    async with running(lambda step, plan: RuntimeError(f"broken {step}")) as harness:
        harness.add("a", [65])
        await harness.read_until(lambda: len(harness.ends) == 1)
        harness.add("b", [66])
        await harness.read_until(lambda: harness.last_word is not None)
        assert isinstance(harness.last_word, EngineDead)
        assert "broken 2" in harness.last_word.cause.message
        assert "FailingRunner" in harness.last_word.cause.traceback or "execute" in harness.last_word.cause.traceback
    assert harness.cause == harness.last_word.cause


async def test_shutdown_gives_each_live_request_its_end_before_the_last_word() -> None:
    async with running(null_step_ms=2) as harness:
        for i in range(5):
            harness.add(f"r{i}", [65 + i], SamplingParams(max_tokens=5000))
        await harness.read_until(lambda: len(harness.tokens) == 5)
        harness.send(Shutdown())
        harness.add("late", [70])
        await harness.read_until(lambda: harness.last_word is not None)
        assert {end.finish_reason for end in harness.ends.values()} == {FinishReason.ABORT}
        assert len(harness.ends) == 6
    assert harness.cause is None


async def test_fifty_requests_sent_during_a_step_are_in_the_next_plan() -> None:
    in_first_step, may_go_on = threading.Event(), threading.Event()
    num_rows = []

    def hold_first_step(step: int, plan: SchedulerOutput) -> None:
        num_rows.append(len(plan.requests))
        if step == 1:
            in_first_step.set()
            may_go_on.wait()

    async with running(hold_first_step, max_num_seqs=64) as harness:
        harness.add("first", [64])
        await trio.to_thread.run_sync(in_first_step.wait)
        for i in range(50):
            harness.add(f"r{i}", [65])
        await trio.testing.wait_all_tasks_blocked()
        may_go_on.set()
        await harness.read_until(lambda: len(harness.ends) == 51)
        assert num_rows[:2] == [1, 51]


async def test_an_abort_sent_during_a_step_wins_over_that_steps_token() -> None:
    in_second_step, may_go_on = threading.Event(), threading.Event()

    def hold_second_step(step: int, plan: SchedulerOutput) -> None:
        if step == 2:
            in_second_step.set()
            may_go_on.wait()

    async with running(hold_second_step) as harness:
        harness.add("a", [65])
        await trio.to_thread.run_sync(in_second_step.wait)
        harness.send(AbortRequest([RequestId("a")]))
        await trio.testing.wait_all_tasks_blocked()
        may_go_on.set()
        await harness.read_until(lambda: "a" in harness.ends)
        assert harness.ends["a"].finish_reason is FinishReason.ABORT
        assert harness.tokens["a"] == expected_tokens([65], GREEDY, 1)


async def test_64_aborts_sent_during_a_step_free_all_with_it_in_one_message_and_no_further_step_begins() -> None:
    in_step, may_go_on = threading.Event(), threading.Event()
    num_rows = []

    def hold_fifth_step(step: int, plan: SchedulerOutput) -> None:
        num_rows.append(len(plan.requests))
        if step == 5:
            in_step.set()
            may_go_on.wait()

    names = [f"r{i}" for i in range(64)]
    async with running(hold_fifth_step, max_num_seqs=64) as harness:
        for name in names:
            harness.add(name, [65], SamplingParams(temperature=0, max_tokens=5000))
        await trio.to_thread.run_sync(in_step.wait)
        harness.send(AbortRequest([RequestId(name) for name in names]))
        await trio.testing.wait_all_tasks_blocked()
        may_go_on.set()
        await harness.read_until(lambda: len(harness.ends) == 64)
        assert harness.num_ends_by_message == [64]
        assert harness.stats is not None
        assert harness.stats.num_used_blocks == 0
        assert len(num_rows) == 5


async def test_a_duplicate_id_costs_the_newcomer_alone() -> None:
    async with running() as harness:
        harness.add("same", [65])
        harness.add("same", [66])
        await harness.read_until(lambda: "same" in harness.ends)
        assert harness.tokens["same"] == expected_tokens([65], GREEDY, 10)


async def test_verbs_are_answered_by_their_ids() -> None:
    async with running(null_step_ms=1) as harness:
        harness.add("a", [65] * 40, SamplingParams(max_tokens=5000))
        await harness.read_until(lambda: "a" in harness.tokens)
        harness.send(UtilityCall(1, ResetPrefixCache()))
        harness.send(UtilityCall(2, Pause(PauseMode.KEEP, clear_cache=False)))
        await harness.read_until(lambda: {1, 2} <= harness.results.keys())
        assert harness.results[1].value is False
        harness.send(UtilityCall(3, Pause(PauseMode.WAIT)))
        harness.send(UtilityCall(4, Resume()))
        await harness.read_until(lambda: {3, 4} <= harness.results.keys())
        assert harness.results[3].failure.type == "Resumed"
        harness.send(UtilityCall(5, Pause(PauseMode.ABORT)))
        await harness.read_until(lambda: 5 in harness.results)
        assert harness.ends["a"].finish_reason is FinishReason.ABORT


async def test_a_request_queued_while_paused_can_be_aborted() -> None:
    async with running() as harness:
        harness.send(UtilityCall(1, Pause(PauseMode.WAIT)))
        await harness.read_until(lambda: 1 in harness.results)
        harness.add("queued", [65])
        harness.send(AbortRequest([RequestId("queued")]))
        await harness.read_until(lambda: "queued" in harness.ends)
        assert harness.tokens["queued"] == []


async def test_cancelling_the_server_ends_it_without_a_last_word() -> None:
    config = EngineConfig(model="null")
    executor = InlineExecutor(partial(NullModelRunner, config))
    with trio.move_on_after(0.2) as scope:
        await EngineCoreServer(config, executor, trio.sleep_forever, lambda message: None).run()
    assert scope.cancelled_caught


async def test_a_busy_server_that_is_cancelled_ends_after_the_step_under_way() -> None:
    """The waits for its steps are shielded, and there is always another step."""
    num_steps, scope = 0, trio.CancelScope()

    def cancel_in_the_third(step: int, plan: SchedulerOutput) -> None:
        nonlocal num_steps
        num_steps = step
        if step == 3:
            trio.from_thread.run_sync(scope.cancel, trio_token=token)

    token = trio.lowlevel.current_trio_token()
    config = EngineConfig.of(model="null", max_model_len=100_000)
    client, engine = trio.open_memory_channel[ClientMessage](float("inf"))
    client.send_nowait(EngineCoreRequest(RequestId("a"), "a", [65], SamplingParams(max_tokens=50_000), 0.0))
    client.send_nowait(StepsRead(1 << 40))
    executor = InlineExecutor(partial(FailingRunner, config, cancel_in_the_third))
    with scope:
        await EngineCoreServer(config, executor, partial(receive_all, engine), lambda message: None).run()
    assert scope.cancelled_caught
    assert num_steps <= 4


async def test_a_failure_to_receive_is_the_last_word_with_its_cause() -> None:
    async def fail() -> list[ClientMessage]:
        raise ValueError("this is no message")

    said: list[EngineMessage] = []
    config = EngineConfig(model="null")
    executor = InlineExecutor(partial(NullModelRunner, config))
    cause = await EngineCoreServer(config, executor, fail, said.append).run()
    assert cause is not None
    assert (cause.type, cause.message) == ("ValueError", "this is no message")
    assert said[-1] == EngineDead(cause)


async def test_a_quiet_engine_wakes_for_the_queue_timeout() -> None:
    async with running(queue_timeout=0.05) as harness:
        harness.send(UtilityCall(1, Pause(PauseMode.WAIT)))
        await harness.read_until(lambda: 1 in harness.results)
        harness.add("queued", [65])
        await harness.read_until(lambda: "queued" in harness.ends)
        assert harness.ends["queued"].error.type == "QueueTimeout"
