"""How every face of an engine ends: shut down, by failing steps, by a death; whichever face it is."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
import trio

from engine.config import EngineConfig
from engine.errors import EngineDeadError, UtilityError, UtilityTimeout
from engine.executor.null import NullModelRunner
from engine.launch import make_client
from engine.outputs import FinishReason, RequestId
from engine.protocol import (
    AbortReason,
)
from engine.sampling_params import SamplingParams
from engine.verbs import (
    Pause,
    PauseMode,
    Resume,
    Sleep,
)
from tests.client.faces import (
    GREEDY,
    LONG,
    Log,
    Open,
    assert_idle_and_well,
    request,
)


async def read_out(log: Log) -> None:
    with trio.fail_after(30):
        while await log.read():
            pass


async def test_a_shutdown_gives_each_live_request_its_end_and_takes_nothing_new(open_face: Open) -> None:
    async with open_face(null_step_ms=1, max_num_seqs=2) as face:
        log = Log(face)
        asked = [request([i] * 9, LONG) for i in range(5)]
        for each in asked:
            face.client.add_request(each)
        await log.until_tokens(asked[0])
        await face.shutdown()
        await read_out(log)
        assert [log.ends[each.request_id] for each in asked] == [FinishReason.ABORT] * 5
        assert all(map(log.has_right_tokens, asked))
        assert face.client.num_live == 0
        with pytest.raises(EngineDeadError, match="shut down"):
            face.client.add_request(request([1]))
        with pytest.raises(EngineDeadError, match="shut down"):
            await face.call(Resume())


@pytest.mark.parametrize("mode", PauseMode)
async def test_a_paused_engine_is_shut_down_as_any_other(open_face: Open, mode: PauseMode) -> None:
    async with open_face(null_step_ms=1) as face:
        log = Log(face)
        before, after = request([1], LONG if mode is PauseMode.KEEP else GREEDY), request([2])
        face.client.add_request(before)
        await log.until_tokens(before)
        await face.call(Pause(mode))
        face.client.add_request(after)
        await face.shutdown()
        await read_out(log)
        assert log.ends[after.request_id] is FinishReason.ABORT
        assert log.tokens[after.request_id] == []
        assert before.request_id in log.ends


def fail_steps(monkeypatch: pytest.MonkeyPatch, error: Exception, number: int = 1) -> None:
    """Let the next steps that run a request raise `error`, so many of them."""
    execute, left = NullModelRunner.execute, [number]

    def fail(self: NullModelRunner, plan: Any) -> None:
        if plan.requests and left[0]:
            left[0] -= 1
            raise error
        execute(self, plan)

    monkeypatch.setattr(NullModelRunner, "execute", fail)


async def test_a_step_that_fails_ends_its_requests_and_no_others(
    open_here: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_here(null_step_ms=1, max_num_seqs=1) as face:
        log = Log(face)
        asked, waiting = request([1], LONG), request([2])
        for each in (asked, waiting):
            face.client.add_request(each)
        await log.until_tokens(asked, 2)
        fail_steps(monkeypatch, ZeroDivisionError("a broken step"))
        assert await log.until_ended(asked, waiting) == [FinishReason.ERROR, FinishReason.LENGTH]
        assert all(map(log.has_right_tokens, (asked, waiting)))
        await assert_idle_and_well(face, log)


async def test_a_step_without_memory_costs_its_newest_request_alone(
    open_here: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_here(null_step_ms=1) as face:
        log = Log(face)
        old, newest = request([1] * 9, SamplingParams(temperature=0, max_tokens=300)), request([2], LONG)
        for each in (old, newest):
            face.client.add_request(each)
            await log.until_tokens(each)
        fail_steps(monkeypatch, MemoryError("no room"))
        assert await log.until_ended(newest, old) == [FinishReason.ERROR, FinishReason.LENGTH]
        assert all(map(log.has_right_tokens, (old, newest)))
        await assert_idle_and_well(face, log)


async def test_the_second_step_that_fails_in_a_row_ends_the_engine(
    open_here: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_here(null_step_ms=1, max_num_seqs=1) as face:
        log = Log(face)
        asked, waiting = request([1], LONG), request([2])
        for each in (asked, waiting):
            face.client.add_request(each)
        await log.until_tokens(asked)
        fail_steps(monkeypatch, ZeroDivisionError("a broken step"), 2)
        with trio.fail_after(5), pytest.raises(EngineDeadError, match="a broken step"):
            await read_out(log)
        assert log.ends == {asked.request_id: FinishReason.ERROR}
        assert face.client.num_live == 0
        face.client.abort_requests([waiting.request_id], AbortReason.CLIENT)
        with pytest.raises(EngineDeadError, match="a broken step"):
            face.client.add_request(request([1]))
        with pytest.raises(EngineDeadError, match="a broken step"):
            await face.call(Resume())


async def test_steps_that_fail_during_a_pause_are_no_fault_of_the_call(
    open_here: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_here(null_step_ms=1) as face:
        log = Log(face)
        asked = request([1], LONG)
        face.client.add_request(asked)
        await log.until_tokens(asked)
        fail_steps(monkeypatch, TimeoutError("a broken step"))
        await face.call(Pause(PauseMode.WAIT))
        assert await log.until_ended(asked) == [FinishReason.ERROR]
        await face.call(Resume())
        await assert_idle_and_well(face, log)


async def test_a_verb_that_raises_a_timeout_of_its_own_has_failed(
    open_here: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    def sleep(self: NullModelRunner, level: int) -> None:
        raise TimeoutError("the disk is gone")

    monkeypatch.setattr(NullModelRunner, "sleep", sleep)
    async with open_here() as face:
        with pytest.raises(UtilityError, match="the disk is gone") as failed:
            await face.call(Sleep(1))
        assert not isinstance(failed.value, UtilityTimeout)


async def test_the_death_of_the_engine_answers_every_waiter_with_its_cause(open_killable: Open) -> None:
    async with open_killable(null_step_ms=1) as face:
        log = Log(face)
        for i in range(3):
            face.client.add_request(request([i], LONG))
        assert await log.read()
        os.kill(face.client.ready.pid, signal.SIGKILL)
        with trio.fail_after(5), pytest.raises(EngineDeadError, match="killed by SIGKILL"):
            await read_out(log)
        assert face.client.num_live == 0
        with pytest.raises(EngineDeadError, match="SIGKILL"):
            face.client.add_request(request([1]))
        with pytest.raises(EngineDeadError, match="SIGKILL"):
            await face.call(Resume())
        face.client.abort_requests([RequestId("r-0.0")], AbortReason.CLIENT)


@pytest.mark.parametrize(
    ("isolation", "is_async"), [("none", True), ("thread", False), ("fork", False), ("fork", True)]
)
def test_what_no_face_has_is_refused_with_both_values(isolation: str, is_async: bool) -> None:
    with pytest.raises(ValueError, match=f"isolation='{isolation}' with trio={is_async}"):
        make_client(EngineConfig(model="null"), isolation=isolation, trio=is_async)
