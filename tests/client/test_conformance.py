"""What every face of an engine does with requests and their aborts, whichever face it is."""

from __future__ import annotations

import random

import msgspec
import pytest

from engine.errors import QueueFull
from engine.outputs import FinishReason, RequestId
from engine.protocol import (
    AbortReason,
    EngineCoreRequest,
    SessionPart,
)
from engine.sampling_params import SamplingParams
from engine.testing import expected_tokens
from tests.client.faces import (
    GREEDY,
    LONG,
    Face,
    Log,
    Open,
    assert_idle_and_well,
    request,
)


async def test_every_request_gets_its_tokens_and_one_end_whoever_shares_its_steps(open_face: Open) -> None:
    draw = random.Random(3)
    settings = {"max_num_seqs": 5, "max_num_batched_tokens": 32, "num_gpu_blocks_override": 24, "max_model_len": 128}
    async with open_face(**settings) as face:
        log = Log(face)
        asked = [
            request(
                [draw.randrange(256) for _ in range(draw.randrange(1, 90))],
                SamplingParams(temperature=draw.choice([0, 1]), seed=i, max_tokens=draw.randrange(1, 30)),
            )
            for i in range(24)
        ]
        for each in asked:
            face.client.add_request(each)
        assert await log.until_ended(*asked) == [FinishReason.LENGTH] * 24
        for each in asked:
            params = each.sampling_params
            assert log.tokens[each.request_id] == expected_tokens(each.prompt_token_ids, params, params.max_tokens)
        await assert_idle_and_well(face, log)


async def test_ten_of_twenty_tokens_then_every_second_aborted_right_after_its_add(open_face: Open) -> None:
    params = SamplingParams(temperature=0, max_tokens=20)
    async with open_face(null_step_ms=1) as face:
        for aborts in (False, True):
            log = Log(face)
            asked = [request([i] * 5, params, label=f"request-{i}") for i in range(10)]
            for i, each in enumerate(asked):
                face.client.add_request(each)
                if aborts and i % 2 == 0:
                    face.client.abort_requests([each.request_id], AbortReason.CLIENT)
            await log.until_ended(*asked)
            for i, each in enumerate(asked):
                is_aborted = aborts and i % 2 == 0
                assert (len(log.tokens[each.request_id]) < 20) == is_aborted
                assert log.ends[each.request_id] is (FinishReason.ABORT if is_aborted else FinishReason.LENGTH)
                assert log.has_right_tokens(each)


async def test_requests_beyond_the_limit_are_refused_before_anything_is_sent(open_face: Open) -> None:
    async with open_face(max_num_seqs=1, max_num_waiting=1) as face:
        log = Log(face)
        live = [request([1], LONG), request([2], LONG)]
        for each in live:
            face.client.add_request(each)
        for _ in range(3):
            with pytest.raises(QueueFull, match="max-num-waiting 1"):
                face.client.add_request(request([3]))
        assert face.client.num_live == 2
        face.client.abort_requests([each.request_id for each in live], AbortReason.CLIENT)
        assert await log.until_ended(*live) == [FinishReason.ABORT] * 2
        await assert_idle_and_well(face, log)


async def test_a_request_that_can_never_run_ends_alone_with_the_reason(open_face: Open) -> None:
    async with open_face(max_model_len=64) as face:
        log = Log(face)
        bad, good = request([1] * 100), request([2] * 10)
        for each in (bad, good):
            face.client.add_request(each)
        assert await log.until_ended(bad, good) == [FinishReason.ERROR, FinishReason.LENGTH]
        await assert_idle_and_well(face, log)


async def test_a_sessions_parts_reach_the_engine_that_has_it_and_are_dropped_once_it_has_ended(open_face: Open) -> None:
    async with open_face() as face:
        log = Log(face)
        session = msgspec.structs.replace(request([65] * 9), extras={"session": True})
        face.client.add_request(session)
        await log.until_tokens(session, 12)
        face.client.extend(SessionPart(session.request_id, [66] * 5, GREEDY))
        await log.until_tokens(session, 24)
        assert session.request_id not in log.ends
        face.client.extend(SessionPart(session.request_id, []))
        assert await log.until_ended(session) == [FinishReason.STOP]
        first = expected_tokens([65] * 9, GREEDY, 12)
        known = [*[65] * 9, *first[:-1], *[66] * 5]
        assert log.tokens[session.request_id] == first + expected_tokens(known, GREEDY, 12)
        face.client.extend(SessionPart(session.request_id, [67], GREEDY))
        await assert_idle_and_well(face, log)


# -- aborts ----------------------------------------------------------------------------------------------------------


async def in_waiting(face: Face, log: Log) -> list[EngineCoreRequest]:
    running, waiting = [request([i], LONG) for i in range(2)], request([9], LONG)
    for each in [*running, waiting]:
        face.client.add_request(each)
    for each in running:
        await log.until_tokens(each)
    assert waiting.request_id not in log.tokens
    face.client.abort_requests([waiting.request_id], AbortReason.CLIENT)
    await log.until_ended(waiting)
    assert log.tokens[waiting.request_id] == []
    return running


async def in_prefill(face: Face, log: Log) -> list[EngineCoreRequest]:
    beside, long = request([1], LONG), request([7] * 4000, LONG)
    for each in (beside, long):
        face.client.add_request(each)
    await log.until_tokens(beside, 3)
    return [long, beside]


async def in_decode(face: Face, log: Log) -> list[EngineCoreRequest]:
    asked = request([1, 2, 3], LONG)
    face.client.add_request(asked)
    await log.until_tokens(asked, 3)
    return [asked]


async def before_the_engine_saw_it(face: Face, log: Log) -> list[EngineCoreRequest]:
    asked = request([5], LONG)
    face.client.add_request(asked)
    return [asked]


async def twice(face: Face, log: Log) -> list[EngineCoreRequest]:
    (asked,) = await in_decode(face, log)
    face.client.abort_requests([asked.request_id, asked.request_id], AbortReason.CLIENT)
    return [asked]


async def all_of_three_children(face: Face, log: Log) -> list[EngineCoreRequest]:
    children = [request([4] * 20, SamplingParams(seed=i, max_tokens=4000), label="parent") for i in range(3)]
    for child in children:
        face.client.add_request(child)
    await log.until_tokens(children[0], 2)
    return children


async def one_after_the_other(face: Face, log: Log) -> list[EngineCoreRequest]:
    first, *others = await all_of_three_children(face, log)
    face.client.abort_requests([first.request_id], AbortReason.DISCONNECT)
    await log.until_ended(first)
    return others


STATES = [
    in_waiting,
    in_prefill,
    in_decode,
    before_the_engine_saw_it,
    twice,
    all_of_three_children,
    one_after_the_other,
]


async def test_an_abort_in_every_state_gives_one_end_after_right_tokens_and_frees_all(open_face: Open) -> None:
    async with open_face(max_num_seqs=3, max_num_batched_tokens=8, null_step_ms=1) as face:
        for reach in STATES:
            log = Log(face)
            if reach is in_waiting:
                filler = request([3], LONG)
                face.client.add_request(filler)
                await log.until_tokens(filler)
            asked = await reach(face, log)
            if reach is in_waiting:
                asked.append(filler)
            face.client.abort_requests([each.request_id for each in asked], AbortReason.CLIENT)
            assert await log.until_ended(*asked) == [FinishReason.ABORT] * len(asked), reach.__name__
            assert all(map(log.has_right_tokens, asked)), reach.__name__
            await assert_idle_and_well(face, log)


async def test_an_abort_of_what_has_ended_or_never_was_says_nothing(open_face: Open) -> None:
    async with open_face() as face:
        log = Log(face)
        ended = request([1])
        face.client.add_request(ended)
        await log.until_ended(ended)
        for _ in range(2):
            face.client.abort_requests([ended.request_id, RequestId("nobody-0.0")], AbortReason.CLIENT)
        await assert_idle_and_well(face, log)


async def test_a_label_may_be_used_again_at_once_and_its_first_bearers_end_is_not_its_own(open_face: Open) -> None:
    async with open_face(null_step_ms=1) as face:
        log = Log(face)
        first, second = request([6] * 3, LONG, label="same"), request([6] * 3, label="same")
        face.client.add_request(first)
        face.client.abort_requests([first.request_id], AbortReason.CLIENT)
        face.client.add_request(second)
        assert await log.until_ended(first, second) == [FinishReason.ABORT, FinishReason.LENGTH]
        assert log.tokens[second.request_id] == expected_tokens([6] * 3, GREEDY, 12)


async def test_an_abort_that_races_with_the_end_gives_the_one_or_the_other(open_face: Open) -> None:
    draw = random.Random(11)
    reasons = set()
    async with open_face() as face:
        log = Log(face)
        for _ in range(60):
            params = SamplingParams(temperature=0, max_tokens=draw.randrange(1, 5))
            asked = request([draw.randrange(256)], params)
            face.client.add_request(asked)
            await log.until_tokens(asked, draw.randrange(params.max_tokens + 1))
            face.client.abort_requests([asked.request_id], AbortReason.CLIENT)
            (reason,) = await log.until_ended(asked)
            reasons.add(reason)
            assert log.has_right_tokens(asked)
            if reason is FinishReason.LENGTH:
                assert len(log.tokens[asked.request_id]) == params.max_tokens
        await assert_idle_and_well(face, log)
    assert reasons == {FinishReason.ABORT, FinishReason.LENGTH}


async def test_an_abort_during_the_last_forward_beats_the_finish(open_face: Open) -> None:
    async with open_face(null_step_ms=60) as face:
        log = Log(face)
        asked = request([8], SamplingParams(temperature=0, max_tokens=2))
        face.client.add_request(asked)
        await log.until_tokens(asked)
        face.client.abort_requests([asked.request_id], AbortReason.CLIENT)  # the second, last token is on its way
        assert await log.until_ended(asked) == [FinishReason.ABORT]
        assert len(log.tokens[asked.request_id]) == 1


async def test_a_stop_string_found_by_the_client_ends_a_request_with_reason_stop(open_face: Open) -> None:
    async with open_face(null_step_ms=1) as face:
        log = Log(face)
        (asked,) = await in_decode(face, log)
        face.client.abort_requests([asked.request_id], AbortReason.STOP_STRING)
        assert await log.until_ended(asked) == [FinishReason.STOP]
