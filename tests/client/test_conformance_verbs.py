"""What every face of an engine does with verbs, whichever face it is."""

from __future__ import annotations

from typing import Any, ClassVar

import msgspec
import pytest

from engine.errors import EngineDeadError, UtilityError
from engine.metrics import SchedulerStats
from engine.outputs import FinishReason
from engine.protocol import (
    AbortReason,
)
from engine.sampling_params import SamplingParams
from engine.testing import expected_tokens
from engine.verbs import (
    CollectiveRpc,
    DumpTasks,
    GetStats,
    IsPaused,
    IsSleeping,
    ListLoras,
    Pause,
    PauseMode,
    ResetPrefixCache,
    Resume,
    Sleep,
    WakeUp,
)
from tests.client.faces import (
    GREEDY,
    LONG,
    Log,
    Open,
    assert_idle_and_well,
    request,
)


async def test_a_pause_that_keeps_freezes_requests_and_resuming_changes_no_token(open_face: Open) -> None:
    async with open_face(null_step_ms=1) as face:
        log = Log(face)
        running, late = request([1] * 30), request([2])
        face.client.add_request(running)
        await log.until_tokens(running, 2)
        await face.call(Pause(PauseMode.KEEP))
        face.client.add_request(late)
        assert await face.call(ResetPrefixCache(reset_running=True)) is True
        assert not {running.request_id, late.request_id} & log.ends.keys()
        await face.call(Resume())
        assert await log.until_ended(running, late) == [FinishReason.LENGTH] * 2
        for each in (running, late):
            assert log.tokens[each.request_id] == expected_tokens(each.prompt_token_ids, GREEDY, 12)
        await assert_idle_and_well(face, log)


async def test_a_pause_that_waits_lets_the_running_finish_and_the_waiting_wait(open_face: Open) -> None:
    async with open_face(null_step_ms=1, max_num_seqs=1) as face:
        log = Log(face)
        running, waiting = request([1]), request([2])
        face.client.add_request(running)
        await log.until_tokens(running)
        face.client.add_request(waiting)
        await face.call(Pause(PauseMode.WAIT))
        assert await log.until_ended(running) == [FinishReason.LENGTH]
        assert waiting.request_id not in log.tokens
        await face.call(Resume())
        assert await log.until_ended(waiting) == [FinishReason.LENGTH]
        await assert_idle_and_well(face, log)


async def test_a_pause_that_aborts_ends_all_and_what_comes_later_waits_and_can_be_aborted(open_face: Open) -> None:
    async with open_face(null_step_ms=1) as face:
        log = Log(face)
        running, late, later = request([1], LONG), request([2]), request([3])
        face.client.add_request(running)
        await log.until_tokens(running)
        await face.call(Pause(PauseMode.ABORT))
        for each in (late, later):
            face.client.add_request(each)
        face.client.abort_requests([later.request_id], AbortReason.CLIENT)
        assert await log.until_ended(running, later) == [FinishReason.ABORT] * 2
        assert log.tokens[later.request_id] == []
        assert late.request_id not in log.tokens
        await face.call(Resume())
        assert await log.until_ended(late) == [FinishReason.LENGTH]
        await assert_idle_and_well(face, log)


async def test_the_prefix_cache_is_hit_until_it_is_reset_and_not_reset_while_in_use(open_face: Open) -> None:
    async with open_face(null_step_ms=1) as face:
        log = Log(face)
        prompt = [70] * 100
        hits = []
        for resets in (False, False, True):
            if resets:
                assert await face.call(ResetPrefixCache()) is True
            asked = request(prompt)
            before = face.client.stats.prefix_cache_hits
            face.client.add_request(asked)
            await log.until_ended(asked)
            hits.append(face.client.stats.prefix_cache_hits - before)
        assert hits == [0, 96, 0]
        held = request(prompt, LONG)
        face.client.add_request(held)
        await log.until_tokens(held)
        assert await face.call(ResetPrefixCache()) is False
        face.client.abort_requests([held.request_id], AbortReason.CLIENT)
        await log.until_ended(held)


ENDLESS: list[Any] = []
ENDLESS.append(ENDLESS)


class NoVerb(msgspec.Struct, array_like=True, tag=True):
    timeout_s: ClassVar[float] = 10.0


FAILING: list[tuple[Any, str]] = [
    (NoVerb(), "Call to NoVerb failed: ValueError: (engine 0: )?there is no verb"),
    (Pause("sideways"), "Call to Pause failed: ValueError: (engine 0: )?wrong argument"),  # type: ignore[arg-type]
    (ListLoras(), "Call to ListLoras failed: NotEnabled"),
    (CollectiveRpc("exec"), "Call to CollectiveRpc failed: ValueError: (engine 0: )?a runner has no method 'exec'"),
    (CollectiveRpc("ping", [object()]), "Call to CollectiveRpc failed: TypeError"),
    (CollectiveRpc("ping", [2**70]), "Call to CollectiveRpc failed: OverflowError"),
    (CollectiveRpc("ping", ENDLESS), "Call to CollectiveRpc failed: RecursionError"),
]


async def test_a_verb_that_fails_fails_alone(open_face: Open) -> None:
    async with open_face(null_step_ms=1) as face:
        log = Log(face)
        for verb, failure in FAILING:
            beside = request([1])
            face.client.add_request(beside)
            with pytest.raises(UtilityError, match=failure):
                await face.call(verb)
            assert await face.call(IsPaused()) is False
            assert await log.until_ended(beside) == [FinishReason.LENGTH]
            await assert_idle_and_well(face, log)


class NoWord(msgspec.Struct, array_like=True, tag=True):
    timeout_s: ClassVar[float] = 10.0
    what: msgspec.msgpack.Ext = msgspec.msgpack.Ext(9, b"")


async def test_what_the_engine_cannot_decode_is_answered_with_the_reason(open_killable: Open) -> None:
    async with open_killable(null_step_ms=1) as face:
        log = Log(face)
        params = SamplingParams(temperature=0)
        msgspec.structs.force_setattr(params, "temperature", -1.0)
        undecodable, beside = request([1], params), request([2])
        for each in (undecodable, beside):
            face.client.add_request(each)
        assert await log.until_ended(undecodable, beside) == [FinishReason.ERROR, FinishReason.LENGTH]
        with pytest.raises(UtilityError, match=r"Call to NoWord failed: DecodeError: .*unknown msgpack extension 9"):
            await face.call(NoWord())  # type: ignore[arg-type]
        await assert_idle_and_well(face, log)


class Cutting:
    """A decoder to which each message comes without its last byte."""

    def __init__(self, decoder: Any) -> None:
        self._decoder = decoder

    def decode(self, frames: list[Any]) -> Any:
        return self._decoder.decode([bytes(frames[0])[:-1], *frames[1:]])


async def test_what_the_client_cannot_decode_is_the_engines_end_for_whoever_waits(open_killable: Open) -> None:
    async with open_killable(null_step_ms=1) as face:
        log = Log(face)
        asked = request([1], LONG)
        face.client.add_request(asked)
        await log.until_tokens(asked)
        connection: Any = face.client._connection  # type: ignore[attr-defined]
        decoding = getattr(connection, "_receiver", connection)
        decoding._decoder = Cutting(decoding._decoder)
        with pytest.raises(EngineDeadError, match="a message of the engine cannot be decoded"):
            await log.until_ended(asked)
        with pytest.raises(EngineDeadError, match="cannot be decoded"):
            await face.call(GetStats())
        assert log.has_right_tokens(asked)
        assert face.client.num_live == 0


async def test_answers_come_in_their_own_types(open_face: Open) -> None:
    async with open_face() as face:
        assert isinstance(await face.call(GetStats()), SchedulerStats)
        assert isinstance(await face.call(DumpTasks()), str)
        pongs = await face.call(CollectiveRpc("ping"))
        assert len(pongs) == len(face.client.engines)
        assert all("NullModelRunner" in pong for pong in pongs)


async def test_asleep_newcomers_wait_for_the_wake_up_and_get_their_tokens(open_face: Open) -> None:
    async with open_face(null_step_ms=1) as face:
        log = Log(face)
        frozen, late = request([1] * 20), request([2])
        face.client.add_request(frozen)
        await log.until_tokens(frozen, 2)
        await face.call(Sleep(1, PauseMode.KEEP))
        assert await face.call(IsSleeping()) is True
        face.client.add_request(late)
        await face.call(WakeUp())
        assert await log.until_ended(frozen, late) == [FinishReason.LENGTH] * 2
        assert all(map(log.has_right_tokens, (frozen, late)))
        await assert_idle_and_well(face, log)


async def test_the_statistics_follow_the_scheduler(open_face: Open) -> None:
    async with open_face(null_step_ms=1, max_num_seqs=2) as face:
        log = Log(face)
        asked = [request([i] * 20, LONG) for i in range(3)]
        for each in asked:
            face.client.add_request(each)
        await log.until_tokens(asked[1], 2)
        stats = face.client.stats
        assert (stats.num_running, stats.num_waiting) == (2, 1)
        assert 0 < stats.num_used_blocks < stats.num_kv_blocks
        assert stats.num_kv_blocks == sum(engine.ready.num_kv_blocks for engine in face.client.engines)
        face.client.abort_requests([each.request_id for each in asked], AbortReason.CLIENT)
        await log.until_ended(*asked)
        await assert_idle_and_well(face, log)


@pytest.mark.parametrize(
    ("verb", "timeout_s", "error", "reason"),
    [
        (
            "is_paused",
            None,
            TypeError,
            "an object of one of the classes of engine.verbs, as IsPaused.., got 'is_paused'",
        ),
        (IsPaused(), -1.0, ValueError, "timeout_s must be 0 seconds or more, or None for the verb's own, got -1.0"),
        (IsPaused(), float("nan"), ValueError, "got nan"),
    ],
)
async def test_a_call_that_is_none_is_refused_by_itself(
    open_face: Open, verb: Any, timeout_s: float | None, error: type[Exception], reason: str
) -> None:
    async with open_face() as face:
        with pytest.raises(error, match=reason):
            await face.call(verb, timeout_s)
        assert await face.call(IsPaused()) is False
