"""Several engines behind one face: who gets which request, and that no engine delays, hides or outlives another."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio

import engine
from engine.client.data_parallel import LeastInFlight
from engine.errors import EngineDeadError, InvalidRequest, QueueFull, UtilityError, UtilityTimeout
from engine.metrics import SchedulerStats
from engine.outputs import FinishReason
from engine.protocol import EngineStopped, PauseMode
from engine.sampling_params import SamplingParams
from engine.testing import expected_tokens
from engine.verbs import IsPaused, Sleep

pytestmark = pytest.mark.slow

ENDLESS = SamplingParams(max_tokens=8000)
GREEDY = SamplingParams(temperature=0, max_tokens=24)
FAILING_STEP = """
def failing_execute(self, plan):
    if plan.requests and rank == 1:
        raise RuntimeError("the device is gone")
    return execute(self, plan)
NullModelRunner.execute = failing_execute
"""


@asynccontextmanager
async def open_engines(number: int = 2, **settings: Any) -> AsyncIterator[Any]:
    with trio.fail_after(60):  # a test that hangs fails
        async with engine.open_engine("null", data_parallel_size=number, **settings) as llm:
            yield llm


def num_live(llm: Any) -> list[int]:
    return [face.num_live for face in llm._client.engines]


def halt(pid: int) -> None:
    """Have the child stand still; it does when this returns."""
    os.kill(pid, signal.SIGSTOP)
    os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOWAIT)


async def wait_until_idle(llm: Any) -> None:
    await llm.wait_for_stats(
        lambda stats: not (llm.num_live or stats.num_running or stats.num_waiting or stats.num_used_blocks)
    )


# -- routing ---------------------------------------------------------------------------------------------------------


def test_the_engine_with_the_fewest_requests_is_next_and_equals_take_turns() -> None:
    routing = LeastInFlight()
    assert [routing.choose([0, 0, 0]) for _ in range(6)] == [0, 1, 2, 0, 1, 2]
    assert routing.choose([5, 5, 2]) == 2
    assert routing.choose([1, 1, 1]) == 0
    assert routing.choose([1, 1, 0]) == 2
    assert routing.choose([3, 0, 0]) == 1
    assert routing.choose([3, 0, 0]) == 2


async def test_a_message_of_an_engine_that_there_is_not_is_the_engines_end() -> None:
    async with open_engines() as llm:
        for index in (2, -1):
            with pytest.raises(EngineDeadError, match=f"of engine {index}: the engines are numbered 0 to 1"):
                llm._client.take(EngineStopped(index))


async def test_equal_requests_are_spread_evenly_and_children_too(temporary_folder: Path) -> None:
    async with open_engines(3, null_step_ms=1) as llm:
        assert not os.listdir(temporary_folder), "the sockets are nobody's to enter once all are connected"
        async with trio.open_nursery() as nursery:

            async def hold(params: SamplingParams) -> None:
                async with llm.generate("x", params) as stream:
                    await stream.__anext__()
                    held.append(stream)
                    await trio.sleep_forever()

            held: list[Any] = []
            for _ in range(21):
                nursery.start_soon(hold, ENDLESS)
            await llm.wait_for_stats(lambda stats: stats.num_running == 21)
            assert num_live(llm) == [7, 7, 7]
            assert [stats.num_running for stats in llm.stats_by_engine()] == [7, 7, 7]
            async with llm.generate("y", SamplingParams(max_tokens=8000, n=6)):
                assert num_live(llm) == [9, 9, 9]
            nursery.cancel_scope.cancel()
        await wait_until_idle(llm)
        assert num_live(llm) == [0, 0, 0]


async def test_many_short_requests_are_spread_over_all_engines() -> None:
    async with open_engines(3) as llm:
        async with trio.open_nursery() as nursery:
            for i in range(100):
                nursery.start_soon(llm.chat, [{"role": "user", "content": str(i)}], SamplingParams(max_tokens=10))
        await wait_until_idle(llm)
        served = [stats.prefix_cache_requests for stats in llm.stats_by_engine()]
    assert sum(served) == 100
    assert min(served) > 100 / 4


async def test_a_request_that_asks_for_an_engine_gets_it_and_every_engine_gives_the_same_tokens() -> None:
    params = SamplingParams(temperature=1, seed=7, max_tokens=12)
    async with open_engines() as llm:
        drawn = []
        for rank in (1, 0, 1):
            async with llm.generate(list(b"abc"), GREEDY, data_parallel_rank=rank) as stream:
                assert num_live(llm) == [rank == 0, rank == 1]
                output = await stream.collect()
            assert output.outputs[0].token_ids == expected_tokens(list(b"abc"), GREEDY, 24)
            async with llm.generate(list(b"abc"), params, data_parallel_rank=rank) as stream:
                drawn.append((await stream.collect()).outputs[0].token_ids)
        assert drawn == [drawn[0]] * 3
        async with llm.generate("x", SamplingParams(n=3, max_tokens=8000), data_parallel_rank=1):
            assert num_live(llm) == [0, 3]
        for rank in (-1, 2, True, "1"):
            with pytest.raises(InvalidRequest, match=f"data_parallel_rank is {rank!r}, and .* 0 to 1") as raised:
                async with llm.generate("x", data_parallel_rank=rank):
                    pass
            assert raised.value.param == "data_parallel_rank"
        await wait_until_idle(llm)


async def test_one_engine_alone_has_rank_0_and_no_other() -> None:
    async with engine.open_engine("null", isolation="thread") as llm:
        async with llm.generate("x", GREEDY, data_parallel_rank=0) as stream:
            await stream.collect()
        with pytest.raises(InvalidRequest, match="data_parallel_rank is 1, and the engines are numbered 0 to 0"):
            async with llm.generate("x", data_parallel_rank=1):
                pass


async def test_more_requests_than_all_engines_or_the_one_asked_for_may_hold_are_refused() -> None:
    async with open_engines(max_num_seqs=1, max_num_waiting=1, null_step_ms=1) as llm:
        with pytest.raises(InvalidRequest, match=r"5 completions are asked for, and at most 4 .* on each of 2 engines"):
            async with llm.generate("x", SamplingParams(n=5)):
                pass
        with pytest.raises(InvalidRequest, match=r"at most 2 may run .*, engine 1\)"):
            async with llm.generate("x", SamplingParams(n=3), data_parallel_rank=1):
                pass
        async with llm.generate("x", SamplingParams(n=2, max_tokens=8000), data_parallel_rank=1):
            with pytest.raises(QueueFull, match=r"2 requests are running or waiting, .* over 2 .*, engine 1\)"):
                async with llm.generate("x", data_parallel_rank=1):
                    pass
            async with llm.generate("x", SamplingParams(n=2, max_tokens=8000)):
                assert num_live(llm) == [2, 2]
                with pytest.raises(QueueFull, match=r"4 requests are running .* over 4 .* on each of 2 engines"):
                    async with llm.generate("x"):
                        pass
        await wait_until_idle(llm)


async def test_an_abort_reaches_the_engine_that_has_the_request_and_no_other_request() -> None:
    async with open_engines(null_step_ms=1) as llm, trio.open_nursery() as nursery:
        ends: dict[str, list[Any]] = {}

        async def read(label: str, rank: int) -> None:
            async with llm.generate("x", ENDLESS, request_id=label, data_parallel_rank=rank) as stream:
                ends[label] = [delta.finish_reason async for delta in stream][-1:]

        for label, rank in (("a", 0), ("b", 1), ("c", 0), ("d", 1)):
            nursery.start_soon(read, label, rank)
        await llm.wait_for_stats(lambda stats: stats.num_running == 4)
        llm.abort("b")
        await llm.wait_for_stats(lambda stats: stats.num_running == 3)
        assert num_live(llm) == [2, 1]
        for label in "acd":
            llm.abort(label)
        await wait_until_idle(llm)
    assert ends == {label: [FinishReason.ABORT] for label in "abcd"}


# -- one engine does not delay, hide or outlive another --------------------------------------------------------------


async def test_an_engine_that_stands_still_does_not_delay_the_others() -> None:
    async with open_engines() as llm, trio.open_nursery() as nursery:
        halt(llm.readies[1].pid)
        late: list[Any] = []

        async def read_late(task_status: trio.TaskStatus[None]) -> None:
            async with llm.generate("late", GREEDY, data_parallel_rank=1) as stream:
                task_status.started()
                late.append(await stream.collect())

        await nursery.start(read_late)
        for _ in range(10):
            async with llm.generate("x", GREEDY) as stream:
                assert num_live(llm) == [1, 1], "the one with the fewest in flight is the one that answers"
                await stream.collect()
        assert not late
        os.kill(llm.readies[1].pid, signal.SIGCONT)
    assert late[0].outputs[0].token_ids == expected_tokens(list(b"late"), GREEDY, 24)


async def test_a_killed_engine_ends_every_stream_and_waiter_of_all_engines_with_its_name_and_signal() -> None:
    errors: list[str] = []

    async def expect_death(waiting: Any) -> None:
        with pytest.raises(EngineDeadError) as raised:
            await waiting()
        errors.append(str(raised.value))

    async with open_engines(3, null_step_ms=1) as llm:

        async def read(rank: int) -> None:
            async with llm.generate("x", ENDLESS, data_parallel_rank=rank) as stream:
                await stream.collect()

        async with trio.open_nursery() as nursery:
            for rank in (0, 1, 2) * 4:
                nursery.start_soon(expect_death, lambda rank=rank: read(rank))
            await llm.wait_for_stats(lambda stats: stats.num_running == 12)
            halt(llm.readies[2].pid)  # so that the pause is never complete
            nursery.start_soon(expect_death, lambda: llm.pause(PauseMode.WAIT))
            nursery.start_soon(expect_death, lambda: llm.wait_for_stats(lambda stats: stats.num_running > 99))
            await trio.testing.wait_all_tasks_blocked()
            os.kill(llm.readies[1].pid, signal.SIGKILL)
            with trio.fail_after(5):
                await llm.wait_ended()
        assert not llm.is_healthy
        os.kill(llm.readies[2].pid, signal.SIGCONT)
    assert errors == ["EngineDied: engine-1 was killed by SIGKILL"] * 14


async def test_the_others_stop_in_order_after_a_death(temporary_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.engine_process.TERM_GRACE_S", 600)  # nobody waits for a grace time to be over
    async with open_engines(3) as llm:
        os.kill(llm.readies[1].pid, signal.SIGKILL)
        await llm.wait_ended()


async def test_the_failure_of_one_engines_steps_is_told_with_its_number(change_engines: Any) -> None:
    change_engines(FAILING_STEP)
    async with open_engines(null_step_ms=1) as llm:
        async with llm.generate("x", ENDLESS, data_parallel_rank=1) as stream:
            output = await stream.collect()
            assert output.outputs[0].finish_reason is FinishReason.ERROR  # alone: the first failed step
        with pytest.raises(EngineDeadError, match="RuntimeError: engine 1: the device is gone"):
            async with (
                llm.generate("x", ENDLESS, data_parallel_rank=0) as other,
                llm.generate("x", ENDLESS, data_parallel_rank=1),
            ):
                await other.collect()


async def test_an_engine_that_does_not_stop_is_named_and_the_others_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.launch.STOP_TIMEOUT_S", 0.5)
    monkeypatch.setattr("engine.engine_process.TERM_GRACE_S", 0.1)
    ends: list[Any] = []

    async def read(llm: Any) -> None:
        async with llm.generate("x", ENDLESS, data_parallel_rank=0) as stream:
            ends.extend([delta.finish_reason async for delta in stream][-1:])

    async def stop_engine_and_leave() -> None:
        async with open_engines(3, null_step_ms=1) as llm:
            nursery.start_soon(read, llm)
            await llm.wait_for_stats(lambda stats: stats.num_running == 1)
            halt(llm.readies[1].pid)

    async with trio.open_nursery() as nursery:
        with pytest.raises(EngineDeadError, match=r"engine 1 did not stop within 0\.5 seconds"):
            await stop_engine_and_leave()
    assert ends == [FinishReason.ABORT]


async def test_leaving_the_engines_ends_all_streams_with_abort_and_leaves_nothing(temporary_folder: Path) -> None:
    ends: list[Any] = []

    async def read(llm: Any) -> None:
        async with llm.generate("x", ENDLESS) as stream:
            ends.extend([delta.finish_reason async for delta in stream][-1:])

    async with trio.open_nursery() as nursery, open_engines(3, null_step_ms=1) as llm:
        for _ in range(6):
            nursery.start_soon(read, llm)
        await llm.wait_for_stats(lambda stats: stats.num_running == 6)
    assert ends == [FinishReason.ABORT] * 6


# -- verbs and figures of all engines --------------------------------------------------------------------------------


async def test_verbs_are_asked_of_all_engines() -> None:
    prompt = [70] * 100
    async with open_engines(null_step_ms=1) as llm:
        assert await llm.reset_prefix_cache()
        async with llm.generate(prompt, ENDLESS, data_parallel_rank=1) as stream:
            await stream.__anext__()
            assert not await llm.reset_prefix_cache(), "one of them cannot"
        await wait_until_idle(llm)
        for rank in (0, 1):
            async with llm.generate(prompt, GREEDY, data_parallel_rank=rank) as stream:
                await stream.collect()
        assert await llm.reset_prefix_cache()
        for rank in (0, 1):
            async with llm.generate(prompt, GREEDY, data_parallel_rank=rank) as stream:
                await stream.collect()
                assert stream.num_cached_tokens == 0
        await llm.pause()
        async with llm.generate("x", GREEDY) as first, llm.generate("x", GREEDY) as second:
            await llm.wait_for_stats(lambda stats: stats.num_waiting == 2)
            await llm.resume()
            assert [len((await stream.collect()).outputs[0].token_ids) for stream in (first, second)] == [24, 24]


async def test_a_verb_that_fails_in_one_engine_is_told_with_its_number(change_engines: Any) -> None:
    change_engines(
        "from engine.core import EngineCore\n"
        "def refuse(self, *arguments): raise ValueError('not today')\n"
        "if rank == 1: EngineCore.reset_prefix_cache = refuse\n"
    )
    async with open_engines() as llm:
        with pytest.raises(UtilityError, match="Call to ResetPrefixCache failed: ValueError: engine 1: not today"):
            await llm.reset_prefix_cache()
        async with llm.generate("x", GREEDY, data_parallel_rank=1) as stream:
            await stream.collect()


async def test_what_is_true_of_any_engine_is_told(temporary_folder: Path) -> None:
    async with open_engines() as llm:
        await llm._client.engines[1].call(Sleep(1))
        assert await llm.is_paused()
        assert await llm.is_sleeping()
        await llm.wake_up()
        assert not await llm.is_paused()
        assert not await llm.is_sleeping()


async def test_all_engines_in_which_a_verb_fails_are_told(change_engines: Any) -> None:
    change_engines(
        "from engine.core import EngineCore\n"
        "def refuse(self, *arguments): raise ValueError(f'not today {rank}')\n"
        "if rank != 1: EngineCore.reset_prefix_cache = refuse\n"
    )
    async with open_engines(3) as llm:
        told = "failed: ValueError: engine 0: not today 0; ValueError: engine 2: not today 2"
        with pytest.raises(UtilityError, match=told) as raised:
            await llm.reset_prefix_cache()
        assert raised.value.status_hint == 400
        halt(llm.readies[1].pid)
        with pytest.raises(UtilityTimeout, match=r"engine 1: no answer within 0\.3 seconds"):
            await llm._client.call(IsPaused(), 0.3)
        os.kill(llm.readies[1].pid, signal.SIGCONT)


async def test_engines_may_hold_different_numbers_of_blocks(change_engines: Any) -> None:
    change_engines(
        "def small_start(self, progress):\n"
        "    if rank == 1: self._config = msgspec.structs.replace(self._config, num_gpu_blocks_override=20)\n"
        "    return start(self, progress)\n"
        "NullModelRunner.start = small_start\n"
    )
    async with open_engines(max_model_len=256, num_gpu_blocks_override=30) as llm:
        assert [ready.num_kv_blocks for ready in llm.readies] == [30, 20]
        assert llm.ready.num_kv_blocks == 20
        assert llm.stats().num_kv_blocks == 50


def test_figures_of_engines_add_up() -> None:
    total = SchedulerStats.sum([SchedulerStats(1, 2, 10, 5), SchedulerStats(3, 4, 30, 5)])
    assert (total.num_running, total.num_waiting, total.kv_cache_usage) == (4, 6, 0.25)
