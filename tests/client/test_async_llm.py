"""What holds wherever a stream is cancelled: nothing runs on in the engine, and the next request is answered."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import trio
import trio.testing

import engine
from engine.client.async_llm import AsyncLLM
from engine.protocol import AbortRequest, Resume, StepsRead, UtilityCall
from engine.sampling_params import SamplingParams
from fuzz.injection import cancelled_at
from web.state import ServerState


async def assert_nothing_is_left(llm: AsyncLLM) -> None:
    with trio.fail_after(5):
        await llm.wait_for_stats(
            lambda stats: not (llm.num_live or stats.num_running or stats.num_waiting or stats.num_used_blocks)
        )


@pytest.mark.parametrize("prompt", [[65] * 20, "text that a thread tokenizes"])
async def test_a_stream_cancelled_at_any_checkpoint_leaves_nothing(prompt: list[int] | str) -> None:
    async with engine.open_engine("null", isolation="thread", max_num_seqs=4) as llm:

        async def act() -> None:
            async with llm.generate(prompt, SamplingParams(max_tokens=6, n=2)) as stream:
                async for _ in stream:
                    pass

        step = 1
        while (await cancelled_at(step, act)).was_cancelled:
            await assert_nothing_is_left(llm)
            step += 1
        assert step > 6, "the act has more checkpoints than that"
        await act()


async def test_the_answer_to_a_cancelled_call_is_not_given_to_the_next() -> None:
    async with engine.open_engine("null", isolation="thread") as llm:
        with trio.CancelScope() as scope:
            scope.cancel()
            await llm.reset_prefix_cache()
        assert scope.cancelled_caught
        assert await llm._client.call(Resume()) is None
        assert await llm.reset_prefix_cache() is True


async def test_an_engine_opened_and_cancelled_at_any_checkpoint_leaves_nothing() -> None:
    async def act() -> None:
        async with engine.open_engine("null", isolation="thread") as llm:
            await llm.chat([{"role": "user", "content": "hi"}], SamplingParams(max_tokens=3))

    step = 1
    while (await cancelled_at(step, act)).was_cancelled:
        step += 1
    assert step > 10


async def test_one_labels_abort_does_not_touch_another_request() -> None:
    params = SamplingParams(max_tokens=50, temperature=0)
    async with (
        engine.open_engine("null", isolation="thread", null_step_ms=1) as llm,
        llm.generate([65], params, request_id="a") as ended,
        llm.generate([65], params, request_id="b") as goes_on,
    ):
        llm.abort("a")
        llm.abort("nobody")
        first, second = await ended.collect(), await goes_on.collect()
    assert first.outputs[0].finish_reason == "abort"
    assert len(second.outputs[0].token_ids) == 50


async def test_a_reader_that_comes_late_gets_one_large_delta() -> None:
    async with (
        engine.open_engine("null", isolation="thread") as llm,
        llm.generate([65], SamplingParams(max_tokens=40)) as stream,
    ):
        await llm.wait_for_stats(lambda stats: not (llm.num_live or stats.num_running))
        deltas = [delta async for delta in stream]
    assert [len(delta.token_ids) for delta in deltas] == [40]


async def test_a_request_that_cannot_be_sent_does_not_count_as_live(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(message: object, engine_index: int) -> None:
        raise OverflowError("cannot be sent")

    async with engine.open_engine("null", isolation="process") as llm:
        with monkeypatch.context() as patched:
            patched.setattr(llm._client._connection, "send", refuse)
            with pytest.raises(OverflowError):
                async with llm.generate([65]):
                    pass
        assert llm.num_live == 0


class Recorded:
    """A connection that also keeps what was sent."""

    def __init__(self, connection: Any) -> None:
        self._connection = connection
        self.sent: list[Any] = []

    def send(self, message: Any, engine_index: int = 0) -> None:
        self.sent.append(message)
        self._connection.send(message, engine_index)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._connection, name)


async def test_a_stream_that_is_left_is_told_at_once_others_of_that_moment_together_and_later_sends_after_them() -> (
    None
):
    params = SamplingParams(temperature=0, max_tokens=5000)
    async with engine.open_engine("null", isolation="thread", null_step_ms=1) as llm:
        connection = Recorded(llm._client._connection)
        llm._client._connection = connection
        async with contextlib.AsyncExitStack() as streams:
            for index in range(8):
                await streams.enter_async_context(llm.generate([65 + index], params))
            connection.sent.clear()
            async with llm.generate([64], params):
                pass
            assert isinstance(connection.sent[-1], AbortRequest)
            await trio.testing.wait_all_tasks_blocked()
        await trio.testing.wait_all_tasks_blocked()
        aborts = [message for message in connection.sent if isinstance(message, AbortRequest)]
        assert [len(abort.request_ids) for abort in aborts] == [1, 1, 7]
        async with llm.generate([65], params):
            pass
        assert await llm.reset_prefix_cache() in (True, False)
        kinds = [type(message) for message in connection.sent if not isinstance(message, StepsRead)]
        assert kinds[-2:] == [AbortRequest, UtilityCall]


class CountedLabel(str):
    """A label that counts how often any label is looked at."""

    __slots__ = ()
    num_looks = 0

    def __eq__(self, other: object) -> bool:
        CountedLabel.num_looks += 1
        return super().__eq__(other)

    def __hash__(self) -> int:
        CountedLabel.num_looks += 1
        return super().__hash__()


async def test_ending_all_requests_looks_at_each_a_few_times_however_many_there_are() -> None:
    num_requests = 60
    async with engine.open_engine("null", isolation="thread") as llm, contextlib.AsyncExitStack() as streams:
        state = ServerState(llm)
        for index in range(num_requests):
            label = CountedLabel(f"request-{index}")
            generating = llm.generate([65] * 20, SamplingParams(max_tokens=8000), request_id=label)
            stream = await streams.enter_async_context(generating)
            streams.enter_context(state.answering(lambda label=label: [label]))
        CountedLabel.num_looks = 0
        state.abort_all()
        assert 0 < CountedLabel.num_looks <= 5 * num_requests
        assert (await stream.collect()).outputs[0].finish_reason == "abort"
        await assert_nothing_is_left(llm)
