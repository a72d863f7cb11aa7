"""Calls of verbs from the client: whoever waits is answered, by a result, a typed error, or the engine's death."""

from __future__ import annotations

import os
import signal

import pytest
import trio
import trio.lowlevel

import engine
from engine.client.async_llm import AsyncLLM
from engine.errors import EngineDeadError, EngineStopping, UtilityError, UtilityTimeout
from engine.sampling_params import SamplingParams
from engine.testing import expected_tokens
from engine.verbs import CollectiveRpc, GetStats, IsPaused, Pause, PauseMode

LONG = SamplingParams(temperature=0, max_tokens=5000)
BOTH = pytest.mark.parametrize("isolation", ["thread", "process"])


async def wait_for_calls(llm: AsyncLLM, number: int) -> None:
    while len(llm._client.waiting_calls) < number:
        await trio.lowlevel.checkpoint()


@BOTH
async def test_every_method_answers_the_same_with_and_without_a_wire(isolation: str) -> None:
    async with engine.open_engine("null", isolation=isolation) as llm:
        await llm.pause("keep")
        assert await llm.is_paused() is True
        await llm.resume()
        await llm.sleep(2, "wait")
        assert await llm.is_sleeping() is True
        (memory,) = await llm.collective_rpc("memory")
        assert memory["kv_cache"] == 0
        await llm.wake_up(["weights", "kv_cache"])
        assert await llm.is_sleeping() is False
        assert await llm.reset_prefix_cache() is True
        assert (await llm.call(GetStats())).num_kv_blocks == llm.ready.num_kv_blocks
        assert "engine 0:" in await llm.dump_tasks()
        for failing in (llm.list_loras(), llm.add_lora("a", "b"), llm.remove_lora(1), llm.pin_lora(1)):
            with pytest.raises(UtilityError, match=r"^Call to \w+Loras? failed: NotEnabled: LoRA is not enabled"):
                await failing
        for failing in (llm.start_profile(), llm.stop_profile(), llm.save_sharded_state("/x")):
            with pytest.raises(UtilityError, match=r"^Call to \w+ failed: (NotEnabled|ValueError): "):
                await failing
        with pytest.raises(UtilityError, match="has no method 'shutdown'"):
            await llm.collective_rpc("shutdown")
        answer = await llm.chat([{"role": "user", "content": "hi"}], SamplingParams(max_tokens=3, temperature=0))
        assert answer.outputs[0].token_ids == expected_tokens(answer.prompt_token_ids, LONG, 3)


async def test_a_wrong_mode_or_tag_is_refused_where_it_is_given() -> None:
    async with engine.open_engine("null", isolation="thread") as llm:
        for wrong in (llm.pause("abrupt"), llm.sleep(1, "abrupt"), llm.wake_up(["everything"])):
            with pytest.raises(ValueError, match="is not a valid"):
                await wrong


@BOTH
async def test_a_call_out_of_time_is_a_timeout_and_its_late_answer_is_given_to_nobody(isolation: str) -> None:
    async with (
        engine.open_engine("null", isolation=isolation, null_step_ms=1) as llm,
        llm.generate([65], LONG) as stream,
    ):
        await stream.__anext__()
        with pytest.raises(UtilityTimeout, match=r"^Call to Pause failed: UtilityTimeout: no answer within 0\.05"):
            await llm.call(Pause(PauseMode.WAIT), timeout_s=0.05)
        llm.abort(stream.request_id)  # now the pause takes effect, and is answered
        assert await llm.call(IsPaused()) is True
        await llm.resume()
        assert llm._client.waiting_calls == []


@BOTH
async def test_after_a_cancelled_call_the_next_gets_its_own_answer(isolation: str) -> None:
    async with (
        engine.open_engine("null", isolation=isolation, null_step_ms=1) as llm,
        llm.generate([65], LONG) as stream,
    ):
        await stream.__anext__()
        with trio.move_on_after(0.05) as scope:
            await llm.pause("wait")
        assert scope.cancelled_caught
        with trio.fail_after(1):
            assert "in thread executor" in (await llm.collective_rpc("ping"))[0]
        await llm.resume()


async def test_the_death_of_the_engine_answers_every_call_within_a_second() -> None:
    deaths: list[EngineDeadError] = []

    async def wait_for_pause(llm: AsyncLLM) -> None:
        with pytest.raises(EngineDeadError, match="SIGKILL") as death:
            await llm.pause("wait")
        deaths.append(death.value)

    async with engine.open_engine("null", isolation="process", null_step_ms=5) as llm:
        async with llm.generate([65], LONG) as stream:
            await stream.__anext__()
            async with trio.open_nursery() as nursery:
                for _ in range(5):
                    nursery.start_soon(wait_for_pause, llm)
                await wait_for_calls(llm, 5)
                os.kill(llm.ready.pid, signal.SIGKILL)
                with trio.fail_after(1):
                    await llm.wait_ended()
            with pytest.raises(EngineDeadError, match="SIGKILL"):
                async for _ in stream:
                    pass
        assert {death.cause.exit_status for death in deaths} == {-signal.SIGKILL}
        for refused in (llm.pause(), llm.call(CollectiveRpc("ping"))):
            with pytest.raises(EngineDeadError, match="SIGKILL"):
                await refused


@BOTH
async def test_a_drain_refuses_calls_and_requests_by_type_and_lets_paused_ones_finish(isolation: str) -> None:
    async with engine.open_engine("null", isolation=isolation) as llm:
        await llm.pause("wait")
        async with llm.generate([65], SamplingParams(temperature=0, max_tokens=10)) as stream:
            llm.drain()
            with pytest.raises(UtilityError, match="EngineStopping") as refusal:
                await llm.resume()
            assert (refusal.value.cause.type, refusal.value.status_hint) == ("EngineStopping", 503)
            with pytest.raises(EngineStopping):
                async with llm.generate([65], LONG):
                    pass
            with trio.fail_after(2):
                output = await stream.collect()
        assert output.outputs[0].token_ids == expected_tokens([65], LONG, 10)


async def test_a_message_that_cannot_be_decoded_costs_itself_alone(caplog: pytest.LogCaptureFixture) -> None:
    async with engine.open_engine("null", isolation="process") as llm:
        sender = llm._client._connection._senders[0]
        for frames in ([b"\xc1"], [b""], [b"\x92\xa7Unknown\x01"], [b"\x91\xabUtilityCall"], [b"x" * 100]):
            sender._socket.send_nowait([*sender._address, *frames])
        assert await llm.is_paused() is False
        answer = await llm.chat([{"role": "user", "content": "hi"}], SamplingParams(max_tokens=3))
        assert len(answer.outputs[0].token_ids) == 3
