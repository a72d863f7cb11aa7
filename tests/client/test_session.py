"""Sessions from the outside: parts in, turns out, over a real engine in this process or in one of its own."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import trio

import engine
from engine.client.async_llm import AsyncLLM
from engine.errors import (
    EngineDeadError,
    EngineStopping,
    InvalidRequest,
    PromptTooLong,
    QueueFull,
    RequestAborted,
)
from engine.outputs import FinishReason, Logprobs
from engine.sampling_params import OutputKind, SamplingParams
from engine.testing import expected_tokens
from fuzz.injection import cancelled_at

GREEDY = SamplingParams(temperature=0, max_tokens=3)
LONG = SamplingParams(temperature=0, max_tokens=4000)
PARTS = [[65] * 9, [66] * 7, [67]]


def open_null(**settings: Any) -> Any:
    defaults: dict[str, Any] = {"isolation": "thread", "log_level": "error", "grammar_answer_time": 60}
    return engine.open_engine("null", **defaults | settings)


def answers(*parts: Sequence[int], max_tokens: int = 3) -> list[list[int]]:
    """Return the tokens of each turn by definition: the last one of a turn gives way to the next part."""
    known: list[int] = []
    turns: list[list[int]] = []
    for part in parts:
        known = [*known[:-1], *part]
        turns.append(expected_tokens(known, GREEDY, max_tokens))
        known += turns[-1]
    return turns


async def assert_nothing_is_left(llm: AsyncLLM) -> None:
    with trio.fail_after(5):
        await llm.wait_for_stats(
            lambda stats: not (llm.num_live or stats.num_running or stats.num_waiting or stats.num_used_blocks)
        )
    assert not llm._slots


@pytest.mark.parametrize("isolation", ["thread", pytest.param("process", marks=pytest.mark.slow)])
async def test_each_part_is_answered_by_a_turn_behind_all_that_came_before(isolation: str) -> None:
    async with open_null(isolation=isolation) as llm:
        async with llm.session(GREEDY, request_id="talk") as session:
            for part, expected in zip(PARTS, answers(*PARTS), strict=True):
                await session.send(part)
                deltas = [delta async for delta in session.turn()]
                assert [i for delta in deltas for i in delta.token_ids] == expected
                assert "".join(delta.text for delta in deltas) == llm.tokenizer.decode(expected)
                assert [delta.finish_reason for delta in deltas if delta.finish_reason] == [FinishReason.LENGTH]
            assert (session.usage.prompt_tokens, session.usage.completion_tokens) == (17, 9)
        await assert_nothing_is_left(llm)


async def test_parts_may_be_sent_ahead_and_their_turns_read_at_any_time() -> None:
    async with open_null() as llm:
        async with llm.session(GREEDY) as session:
            for part in PARTS:
                await session.send(part)
            session.close()
            turns = [session.turn() for _ in PARTS]
            told = [await turn.collect() for turn in reversed(turns)]
        assert [turn.token_ids for turn in reversed(told)] == answers(*PARTS)
        await assert_nothing_is_left(llm)


async def test_text_and_messages_begin_a_session_and_text_goes_on() -> None:
    async with open_null() as llm, llm.session(GREEDY) as session:
        await session.send([{"role": "user", "content": "hi"}])
        first = await session.turn().collect()
        await session.send(" and more", SamplingParams(temperature=0, max_tokens=5, output_kind=OutputKind.CUMULATIVE))
        second = await session.turn().collect()
        start = llm.tokenizer.encode_chat([{"role": "user", "content": "hi"}])
        known = [*start, *first.token_ids[:-1], *llm.tokenizer.encode(" and more")]
        assert second.token_ids == expected_tokens(known, GREEDY, 5)
        assert second.text == llm.tokenizer.decode(second.token_ids)
        with pytest.raises(InvalidRequest, match="later part of a session"):
            await session.send([{"role": "user", "content": "hi"}])


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"n": 2}, "n"),
        ({"stop": ["x"]}, "stop"),
        ({"output_kind": OutputKind.FINAL_ONLY}, "output_kind"),
    ],
)
async def test_what_no_session_obeys_is_refused_by_name(fields: dict[str, Any], name: str) -> None:
    params = SamplingParams(**fields)
    async with open_null() as llm:
        with pytest.raises(InvalidRequest, match=rf"{name} .* cannot be had in a session: .*, so ") as refused:
            async with llm.session(params):
                pass
        assert refused.value.param == name
        async with llm.session(GREEDY) as session:
            await session.send([65])
            with pytest.raises(InvalidRequest, match="session"):
                await session.send([65], params)
            await session.turn().collect()


@pytest.mark.parametrize("isolation", ["thread", pytest.param("process", marks=pytest.mark.slow)])
async def test_each_turn_has_the_form_that_its_part_asks_for(isolation: str) -> None:
    forms = [None, {"regex": "[ab]{4}"}, {"choice": ["yes", "no"]}, None, {"regex": "("}]
    async with open_null(isolation=isolation) as llm, llm.session(GREEDY) as session:
        for form in forms:
            await session.send([65], SamplingParams(temperature=0, max_tokens=9, structured_outputs=form))
        texts = [await session.turn().collect() for _ in forms]
        assert re.fullmatch("[ab]{4}", texts[1].text)
        assert texts[2].text in {"yes", "no"}
        assert [len(texts[0].token_ids), len(texts[3].token_ids)] == [9, 9]
        assert [text.finish_reason for text in texts] == ["length", "stop", "stop", "length", "error"]
        assert texts[4].error is not None
        assert texts[4].error.type == "InvalidGrammar"
        with pytest.raises(RequestAborted):
            await session.send([65])


async def test_each_turn_tells_the_logprobs_of_its_parts_tokens(byte_llama: Path) -> None:
    params = SamplingParams(temperature=0, max_tokens=3, prompt_logprobs=2)
    settings = {
        "isolation": "thread",
        "num_threads": 1,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 16,
        "log_level": "error",
    }
    async with engine.open_engine(str(byte_llama), **settings) as llm:
        async with llm.session(params) as session:
            told, known = [], []
            for part in ([65] * 20, [66, 67, 68], [70] * 40, [69]):
                plain = msgspec.structs.replace(params, prompt_logprobs=None) if part[0] == 70 else params
                await session.send(part, plain)
                turn = session.turn()
                answer = await turn.collect()
                assert (turn.prompt_logprobs is None) == (plain is not params)
                told += [turn.prompt_logprobs] if turn.prompt_logprobs else []
                known = [*known[:-1], *part, *answer.token_ids]
        async with llm.generate(known, msgspec.structs.replace(params, max_tokens=1)) as stream:
            whole = (await stream.collect()).prompt_logprobs
    assert [len(logprobs) for logprobs in told] == [19, 3, 1]
    places = [*range(19), *range(21, 24), 68]
    joined = Logprobs.join(told)
    assert joined.token_ids[:, 0].tolist() == [known[place + 1] for place in places]
    assert (joined.token_ids == whole.token_ids[places]).all()
    assert abs(joined.logprobs - whole.logprobs[places]).max() < 1e-5


async def test_a_part_that_is_refused_costs_the_session_nothing() -> None:
    async with open_null(max_model_len=64, max_num_waiting=1) as llm:
        async with llm.session(GREEDY) as session:
            for wrong in ([65] * 70, "", [999], 5):
                with pytest.raises(InvalidRequest):
                    await session.send(wrong)  # type: ignore[arg-type]
            with pytest.raises(InvalidRequest, match="no part of the session awaits an answer"):
                session.turn()
            await session.send(PARTS[0])
            with pytest.raises(PromptTooLong, match="exceed the context of 64"):
                await session.send([65] * 63)
            assert (await session.turn().collect()).token_ids == answers(PARTS[0])[0]
        await assert_nothing_is_left(llm)


async def test_a_part_that_exceeds_the_context_together_with_the_others_ends_the_session_with_the_numbers() -> None:
    async with open_null(max_model_len=64) as llm:
        async with llm.session(GREEDY) as session:
            await session.send([65] * 40)
            await session.turn().collect()
            await session.send([66] * 40)
            end = await session.turn().collect()
            assert end.finish_reason is FinishReason.ERROR
            assert end.error is not None
            assert "the context holds 64" in end.error.message
            with pytest.raises(RequestAborted, match="has ended"):
                await session.send([65])
        await assert_nothing_is_left(llm)


async def test_more_parts_than_may_wait_are_refused_before_they_are_sent() -> None:
    async with open_null(max_num_waiting=2, null_step_ms=1) as llm:
        async with llm.session(LONG) as session:
            for _ in range(3):
                await session.send([65])
            with pytest.raises(QueueFull, match="--max-num-waiting is 2"):
                await session.send([65])
        await assert_nothing_is_left(llm)


async def test_leaving_early_aborts_and_leaving_what_was_never_used_costs_nothing() -> None:
    async with open_null(null_step_ms=1) as llm:
        async with llm.session(LONG):
            pass
        async with llm.session(LONG) as session:
            await session.send([65])
            async for _ in session.turn():
                break
        await assert_nothing_is_left(llm)


async def test_a_session_cancelled_at_any_checkpoint_leaves_nothing() -> None:
    async with open_null() as llm:

        async def act() -> None:
            async with llm.session(GREEDY) as session:
                for part in ([65] * 5, "text for a thread", [66]):
                    await session.send(part)  # type: ignore[arg-type]
                    async for _ in session.turn():
                        pass

        step = 1
        while (await cancelled_at(step, act)).was_cancelled:
            await assert_nothing_is_left(llm)
            step += 1
        assert step > 6
        await act()


async def test_an_aborted_session_tells_its_reader_and_takes_no_further_part() -> None:
    async with open_null(null_step_ms=1) as llm:
        async with llm.session(LONG, request_id="s") as session:
            for part in PARTS:
                await session.send(part)
            turn = session.turn()
            await anext(turn)
            assert llm.abort("s") == 1
            assert (await turn.collect()).finish_reason is FinishReason.ABORT
            for _ in PARTS[1:]:
                end = await session.turn().collect()
                assert (end.finish_reason, end.token_ids) == (FinishReason.ABORT, [])
            with pytest.raises(RequestAborted):
                await session.send([65])
        await assert_nothing_is_left(llm)


async def test_a_closed_session_takes_no_further_part_and_an_engine_that_drains_closes_them() -> None:
    async with open_null(null_step_ms=1) as llm:
        async with llm.session(GREEDY) as idle, llm.session(SamplingParams(temperature=0, max_tokens=40)) as busy:
            await idle.send([65])
            await idle.turn().collect()
            await busy.send([66])
            turn = busy.turn()
            await anext(turn)
            llm.drain()
            assert len((await turn.collect()).token_ids) == 39
            await assert_nothing_is_left(llm)
            for session, error in ((idle, RequestAborted), (busy, RequestAborted)):
                with pytest.raises(error):
                    await session.send([65])
        with pytest.raises(EngineStopping):
            async with llm.session(GREEDY) as late:
                await late.send([65])
    async with open_null() as llm, llm.session(GREEDY) as session:
        session.close()
        with pytest.raises(InvalidRequest, match="is closed"):
            await session.send([65])


async def test_sessions_beside_requests_under_few_places_all_get_their_tokens() -> None:
    async with open_null(max_num_seqs=2, num_gpu_blocks_override=40, max_model_len=256) as llm:
        told: dict[int, list[list[int]]] = {}

        async def talk(number: int) -> None:
            async with llm.session(GREEDY) as session:
                told[number] = []
                for part in PARTS:
                    await session.send([number, *part])
                    told[number].append((await session.turn().collect()).token_ids)

        async def ask(number: int) -> None:
            async with llm.generate([number] * 30, GREEDY) as stream:
                (output,) = (await stream.collect()).outputs
                assert output.token_ids == expected_tokens([number] * 30, GREEDY, 3)

        async with trio.open_nursery() as nursery:
            for number in range(6):
                nursery.start_soon(talk, number)
                nursery.start_soon(ask, number)
        assert told == {number: answers(*([number, *part] for part in PARTS)) for number in range(6)}
        await assert_nothing_is_left(llm)


@pytest.mark.slow
@pytest.mark.parametrize("num_engines", [1, 2])
async def test_a_death_reaches_who_reads_and_who_would_send(num_engines: int) -> None:
    settings = {"isolation": "process", "data_parallel_size": num_engines, "null_step_ms": 1}
    with trio.fail_after(30):
        async with (
            open_null(**settings) as llm,
            llm.session(LONG) as reading,
            llm.session(GREEDY) as waiting,
        ):
            for _ in range(2):
                await waiting.send([65])
                await waiting.turn().collect()
            await reading.send([65])
            turn = reading.turn()
            await anext(turn)
            os.kill(llm.readies[0].pid, signal.SIGKILL)
            with pytest.raises(EngineDeadError, match="SIGKILL"):
                await turn.collect()
            for session in (reading, waiting):
                with pytest.raises(EngineDeadError, match="SIGKILL"):
                    await session.send([65])
