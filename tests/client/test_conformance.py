"""What every face of an engine does, whichever it is: one list of behaviours, run over each row of `FACES`.

A further face is one row there, and an adapter where its calls look different.
"""

from __future__ import annotations

import itertools
import os
import random
import signal
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from typing import Any, ClassVar, NamedTuple, Protocol

import msgspec
import pytest
import trio

from engine.client.asynchronous import AsyncMPClient
from engine.client.client import EngineCoreClient
from engine.client.data_parallel import DPAsyncMPClient
from engine.client.synchronous import SynchronousClient
from engine.config import EngineConfig
from engine.errors import EngineDeadError, QueueFull, UtilityError, UtilityTimeout
from engine.executor.null import NullModelRunner
from engine.launch import make_client
from engine.metrics import SchedulerStats
from engine.outputs import FinishReason, RequestId
from engine.protocol import (
    AbortReason,
    EngineCoreOutputs,
    EngineCoreRequest,
    SessionPart,
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
    Verb,
    WakeUp,
)

GREEDY = SamplingParams(temperature=0, max_tokens=12)
LONG = SamplingParams(temperature=0, max_tokens=4000)
_numbers = itertools.count()


# -- adapters ----------------------------------------------------------------------------------------------------------


class Face(Protocol):
    """What the behaviours need of a face; only waiting looks different from face to face."""

    client: EngineCoreClient

    async def message(self) -> EngineCoreOutputs | None:
        """Wait for the next outputs; None once the engine has stopped."""

    async def call(self, verb: Verb) -> Any:
        """Ask for a verb and wait for its answer."""

    async def shutdown(self) -> None:
        """Stop the engine; what it still says is read by `message`."""


class PlainFace:
    """A face without Trio: its calls block, and nothing else runs here meanwhile."""

    def __init__(self, client: SynchronousClient) -> None:
        self.client = client

    async def message(self) -> EngineCoreOutputs | None:
        await trio.lowlevel.checkpoint()
        return self.client.get_output()

    async def call(self, verb: Verb) -> Any:
        await trio.lowlevel.checkpoint()
        return self.client.call(verb)

    async def shutdown(self) -> None:
        await trio.lowlevel.checkpoint()
        self.client.shutdown()


class TrioFace:
    """A face under Trio: somebody must receive while a call waits."""

    def __init__(self, client: AsyncMPClient) -> None:
        self.client = client
        self._kept: deque[EngineCoreOutputs] = deque()

    async def message(self) -> EngineCoreOutputs | None:
        return self._kept.popleft() if self._kept else await self.client.get_output()

    async def call(self, verb: Verb) -> Any:
        answer, error = None, None
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._receive)
            try:
                answer = await self.client.call(verb)
            except Exception as raised:
                error = raised
            nursery.cancel_scope.cancel()
        if error is not None:
            raise error
        return answer

    async def shutdown(self) -> None:
        self.client.shutdown()
        await trio.lowlevel.checkpoint()

    async def _receive(self) -> None:
        with suppress(EngineDeadError):
            while (message := await self.client.get_output()) is not None:
                self._kept.append(message)


class AlwaysTheLast:
    """A routing rule under which one of several engines behaves like one alone."""

    def choose(self, num_in_flight: Sequence[int]) -> int:
        return len(num_in_flight) - 1


class FaceKind(NamedTuple):
    """A row of `FACES`: how `make_client` is asked for it, and whether its engine can be killed."""

    isolation: str
    is_async: bool
    num_engines: int = 1

    @property
    def has_process(self) -> bool:
        return self.isolation == "process"

    @asynccontextmanager
    async def open(self, **settings: Any) -> AsyncIterator[Face]:
        settings |= {"data_parallel_size": self.num_engines}
        config = EngineConfig(model="null", prefix_hash_seed="x", log_level="error", **settings)
        made = make_client(config, isolation=self.isolation, trio=self.is_async)
        if isinstance(made, SynchronousClient):
            with made:
                yield PlainFace(made)
            return
        async with made as client:
            if isinstance(client, DPAsyncMPClient):  # each behaviour at one engine beside others
                client._routing = AlwaysTheLast()
            face = TrioFace(client)
            try:
                yield face
            finally:
                with trio.CancelScope(shield=True):
                    client.shutdown()
                    await face._receive()


FACES = {
    "InprocClient": FaceKind("none", False),
    "SyncMPClient": FaceKind("process", False),
    "AsyncMPClient-process": FaceKind("process", True),
    "AsyncMPClient-channels": FaceKind("thread", True),
    "DPAsyncMPClient": FaceKind("process", True, num_engines=2),
}
Open = Callable[..., AbstractAsyncContextManager[Face]]


@pytest.fixture(params=FACES)
def open_face(request: pytest.FixtureRequest) -> Open:
    return FACES[request.param].open


@pytest.fixture(params=[name for name, kind in FACES.items() if not kind.has_process])
def open_here(request: pytest.FixtureRequest) -> Open:
    """Opens the faces whose runner can be reached from the test."""
    return FACES[request.param].open


@pytest.fixture(params=[name for name, kind in FACES.items() if kind.has_process])
def open_killable(request: pytest.FixtureRequest) -> Open:
    return FACES[request.param].open


# -- what is asked, and what came ------------------------------------------------------------------------------------


def request(prompt: list[int], params: SamplingParams = GREEDY, label: str = "r") -> EngineCoreRequest:
    return EngineCoreRequest(RequestId(f"{label}-0.{next(_numbers)}"), label, prompt, params, 0.0)


class Log:
    """All that a face said of requests; a token or a word after the last one fails at once."""

    def __init__(self, face: Face) -> None:
        self.tokens: dict[RequestId, list[int]] = {}
        self.ends: dict[RequestId, FinishReason] = {}
        self._face = face

    async def read(self) -> bool:
        message = await self._face.message()
        if message is None:
            return False
        for output in message.outputs:
            assert output.request_id not in self.ends, "an output after the terminal one"
            self.tokens.setdefault(output.request_id, []).extend(output.new_token_ids)
            if output.finish_reason is not None:
                self.ends[output.request_id] = output.finish_reason
        return True

    async def read_until(self, reached: Callable[[], bool]) -> None:
        with trio.fail_after(30):
            while not reached():
                assert await self.read()

    async def until_ended(self, *asked: EngineCoreRequest) -> list[FinishReason]:
        await self.read_until(lambda: all(each.request_id in self.ends for each in asked))
        return [self.ends[each.request_id] for each in asked]

    async def until_tokens(self, asked: EngineCoreRequest, number: int = 1) -> None:
        await self.read_until(lambda: len(self.tokens.get(asked.request_id, [])) >= number)

    def has_right_tokens(self, asked: EngineCoreRequest) -> bool:
        """Whether the tokens are the definition's, as far as they go."""
        tokens = self.tokens.get(asked.request_id, [])
        return tokens == expected_tokens(asked.prompt_token_ids, asked.sampling_params, len(tokens))


async def assert_idle_and_well(face: Face, log: Log) -> None:
    """Nothing lives, no block is held, and the next request gets its exact tokens."""
    after = request([77] * 9)
    face.client.add_request(after)
    assert await log.until_ended(after) == [FinishReason.LENGTH]
    assert log.tokens[after.request_id] == expected_tokens([77] * 9, GREEDY, 12)
    assert face.client.num_live == 0
    stats = face.client.stats
    assert (stats.num_running, stats.num_waiting, stats.num_used_blocks) == (0, 0, 0)


# -- requests --------------------------------------------------------------------------------------------------------


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


# -- verbs -----------------------------------------------------------------------------------------------------------


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


class NoVerb(msgspec.Struct, array_like=True, tag=True):
    timeout_s: ClassVar[float] = 10.0


@pytest.mark.parametrize(
    ("verb", "failure"),
    [
        (NoVerb(), "Call to NoVerb failed: ValueError: (engine 0: )?there is no verb"),
        (Pause("sideways"), "Call to Pause failed: ValueError: (engine 0: )?wrong argument"),
        (ListLoras(), "Call to ListLoras failed: NotEnabled"),
        (CollectiveRpc("exec"), "Call to CollectiveRpc failed: ValueError: (engine 0: )?a runner has no method 'exec'"),
    ],
    ids=lambda value: type(value).__name__,
)
async def test_a_verb_that_fails_fails_alone(open_face: Open, verb: Any, failure: str) -> None:
    async with open_face(null_step_ms=1) as face:
        log = Log(face)
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


# -- ends ------------------------------------------------------------------------------------------------------------


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
