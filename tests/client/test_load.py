"""Many requests at once, some of which are given up in every way there is: the others never notice."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import trio

import engine
from engine.client.async_llm import AsyncLLM
from engine.client.output_processor import RequestOutput
from engine.sampling_params import OutputKind, SamplingParams
from engine.testing import expected_tokens

HUGE = SamplingParams(temperature=0, max_tokens=5000)


@pytest.fixture
async def llm() -> AsyncIterator[AsyncLLM]:
    async with engine.open_engine("null", isolation="thread") as llm:
        yield llm
        with trio.fail_after(5):
            await llm.wait_for_stats(
                lambda stats: not (llm.num_live or stats.num_running or stats.num_waiting or stats.num_used_blocks)
            )


def prompt_of(number: int) -> list[int]:
    return [65 + number % 26] * (1 + number % 40)


async def ask(llm: AsyncLLM, number: int, params: SamplingParams) -> RequestOutput:
    async with llm.generate(prompt_of(number), params, request_id=str(number)) as stream:
        return await stream.collect()


def assert_whole(output: RequestOutput, number: int, num_tokens: int) -> None:
    expected = expected_tokens(prompt_of(number), HUGE, num_tokens)
    assert [completion.token_ids for completion in output.outputs] == [expected] * len(output.outputs)


@pytest.mark.parametrize("kind", [OutputKind.DELTA, OutputKind.FINAL_ONLY])
async def test_a_hundred_requests_at_once_all_get_their_tokens(llm: AsyncLLM, kind: OutputKind) -> None:
    params = SamplingParams(temperature=0, max_tokens=10, output_kind=kind)

    async def check(number: int) -> None:
        assert_whole(await ask(llm, number, params), number, 10)

    async with trio.open_nursery() as nursery:
        for number in range(100):
            nursery.start_soon(check, number)


async def test_of_a_hundred_the_cancelled_go_and_the_others_get_every_token_of_every_child(llm: AsyncLLM) -> None:
    scopes = [trio.CancelScope() for _ in range(0, 100, 10)]

    async def give_up(number: int, scope: trio.CancelScope) -> None:
        with scope:
            await ask(llm, number, SamplingParams(temperature=0, max_tokens=5000, n=1 + 2 * (number % 20 == 1)))

    async def check(number: int, n: int) -> None:
        assert_whole(await ask(llm, number, SamplingParams(temperature=0, max_tokens=100, n=n)), number, 100)

    async with trio.open_nursery() as nursery:
        for number in range(100):
            if number % 10 == 1:
                nursery.start_soon(give_up, number, scopes[number // 10])
            else:
                nursery.start_soon(check, number, 3 if number % 10 == 2 else 1)
        await llm.wait_for_stats(lambda stats: stats.num_running > 50)
        for scope in scopes:
            scope.cancel()
    assert all(scope.cancelled_caught for scope in scopes)
    assert_whole(await ask(llm, 1, SamplingParams(temperature=0, max_tokens=10)), 1, 10)


async def test_fifty_are_aborted_in_one_call_and_each_is_told(llm: AsyncLLM) -> None:
    async def check(number: int) -> None:
        output = await ask(llm, number, HUGE)
        assert output.outputs[0].finish_reason == "abort"
        assert output.outputs[0].token_ids == expected_tokens(prompt_of(number), HUGE, len(output.outputs[0].token_ids))

    async with trio.open_nursery() as nursery:
        for number in range(50):
            nursery.start_soon(check, number)
        await llm.wait_for_stats(lambda stats: llm.num_live == 50 and stats.num_running > 20)
        assert llm.abort(*map(str, range(50)), "nobody") == 50


async def test_a_hundred_consumers_that_leave_in_mid_stream_leave_nothing_and_their_ids_work_again(
    llm: AsyncLLM,
) -> None:
    async def leave(number: int) -> None:
        taken: list[int] = []
        async with llm.generate(prompt_of(number), HUGE, request_id=str(number)) as stream:
            async for delta in stream:
                taken += delta.token_ids
                if len(taken) >= 20:
                    break
        assert taken == expected_tokens(prompt_of(number), HUGE, len(taken))

    async with trio.open_nursery() as nursery:
        for number in range(100):
            nursery.start_soon(leave, number)
    for number in (0, 99):
        assert_whole(await ask(llm, number, SamplingParams(temperature=0, max_tokens=20)), number, 20)


async def test_a_prompt_that_is_refused_fails_itself_and_the_next_one_works(llm: AsyncLLM) -> None:
    with pytest.raises(ValueError, match=r"vocabulary|token id"):
        await ask_ids(llm, [10**6])
    assert_whole(await ask(llm, 5, SamplingParams(temperature=0, max_tokens=10)), 5, 10)


async def ask_ids(llm: AsyncLLM, token_ids: list[int]) -> None:
    async with llm.generate(token_ids, HUGE):
        pass
