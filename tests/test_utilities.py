"""Verbs of a running engine: each is answered under its id, alone, whatever runs, sleeps, stops or fails beside it."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing

from engine import verbs
from engine.core import EngineCore
from engine.errors import ExecutorDead
from engine.executor import runner_verbs
from engine.executor.null import NullModelRunner
from engine.metrics import SchedulerStats
from engine.outputs import FinishReason, RequestId, SchedulerOutput
from engine.protocol import AbortRequest, Drain, EngineDead, EngineStopped, Shutdown, UtilityCall
from engine.sampling_params import SamplingParams
from engine.testing import expected_tokens
from engine.verbs import PauseMode, SleepTag, value_of
from tests.server_client import GREEDY, Harness, running

LONG = SamplingParams(temperature=0, max_tokens=5000)
THIRTY = SamplingParams(temperature=0, max_tokens=30)


@pytest.fixture
def held_ping(monkeypatch: pytest.MonkeyPatch) -> tuple[threading.Event, threading.Event]:
    """Events of a runner that is asked for `ping`: it is at it, and it may answer."""
    inside, may_go_on = threading.Event(), threading.Event()

    def wait(runner: object) -> str:
        inside.set()
        may_go_on.wait()
        return "done"

    monkeypatch.setitem(runner_verbs._METHODS, "ping", wait)
    return inside, may_go_on


async def ask(harness: Harness, verb: Any) -> Any:
    """Ask for `verb` and return its answer as a client does."""
    result = await harness.call(verb)
    return value_of(verb, result.value, result.failure)


async def assert_serves(harness: Harness, name: str = "after") -> None:
    harness.add(name, [66])
    await harness.read_until(lambda: name in harness.ends)
    assert harness.tokens[name] == expected_tokens([66], GREEDY, 10)


async def kv_bytes(harness: Harness) -> int:
    (memory,) = await ask(harness, verbs.CollectiveRpc("memory"))
    return int(memory["kv_cache"])


# -- a call fails alone ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sent", "failure"),
    [
        (["Frobnicate"], "ValueError: there is no verb Frobnicate;"),
        (["Pause", "abrupt"], "ValueError: wrong argument: Invalid enum value 'abrupt'"),
        (verbs.Pause("abrupt"), "ValueError: wrong argument: Invalid enum value 'abrupt'"),  # type: ignore[arg-type]
        (
            verbs.CollectiveRpc("shutdown"),
            "ValueError: a runner has no method 'shutdown'; known are capacity, memory, ping",
        ),
        (verbs.CollectiveRpc("ping", [object()]), "TypeError: Encoding objects of type object is unsupported"),
        (verbs.SaveShardedState("/nowhere"), "ValueError: the null model has no weights to save"),
        (verbs.StopProfile(), "NotEnabled: there is nowhere to write a profile"),
        *((verb, "NotEnabled: LoRA is not enabled") for verb in (verbs.ListLoras(), verbs.AddLora("a", "b"))),
        *((verb, "NotEnabled: LoRA is not enabled") for verb in (verbs.RemoveLora(1), verbs.PinLora(1))),
    ],
    ids=str,
)
async def test_a_wrong_call_is_answered_under_its_id_and_hurts_nobody(sent: Any, failure: str) -> None:
    async with running(null_step_ms=1) as harness:
        harness.add("beside", [65], THIRTY)
        result = await harness.call(sent)
        assert str(result.failure).startswith(failure)
        assert await ask(harness, verbs.ResetPrefixCache()) in {True, False}
        await harness.read_until(lambda: "beside" in harness.ends)
        assert harness.tokens["beside"] == expected_tokens([65], THIRTY, 30)


@pytest.mark.parametrize("value", [object(), {"x": 1j}, 2**80])
async def test_an_answer_that_cannot_be_sent_fails_its_call_alone(monkeypatch: pytest.MonkeyPatch, value: Any) -> None:
    monkeypatch.setitem(runner_verbs._METHODS, "ping", lambda runner: value)
    async with running() as harness:
        result = await harness.call(verbs.CollectiveRpc("ping"))
        assert result.failure is not None
        assert result.failure.type in {"TypeError", "OverflowError"}
        await assert_serves(harness)


async def test_what_a_runner_raises_fails_the_call_with_type_message_and_traceback(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(runner: object) -> None:
        raise MemoryError("no room for that")

    monkeypatch.setitem(runner_verbs._METHODS, "ping", fail)
    async with running() as harness:
        result = await harness.call(verbs.CollectiveRpc("ping"))
        assert str(result.failure) == "MemoryError: no room for that"
        assert "in fail" in result.failure.traceback
        await assert_serves(harness)


async def test_a_worker_lost_in_a_verb_is_the_engines_end(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running() as harness:

        async def lose(verb: object) -> None:
            raise ExecutorDead(harness_cause)

        harness_cause = (await harness.call(["Frobnicate"])).failure
        monkeypatch.setattr(harness.server._executor, "call", lose)
        harness.send(UtilityCall(1, verbs.CollectiveRpc("ping")))
        await harness.read_until(lambda: harness.last_word is not None)
        assert isinstance(harness.last_word, EngineDead)
        assert harness.last_word.cause.type == "ExecutorDead"


async def test_an_engine_that_fails_says_so_though_its_runner_is_at_a_verb(
    held_ping: tuple[threading.Event, threading.Event], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(core: EngineCore, request_ids: object, reason: object) -> None:
        raise RuntimeError("broken")

    inside, may_go_on = held_ping
    async with running() as harness:
        harness.send(UtilityCall(1, verbs.CollectiveRpc("ping")))
        await trio.to_thread.run_sync(inside.wait)
        monkeypatch.setattr(EngineCore, "abort", fail)
        harness.send(AbortRequest([RequestId("anybody")]))
        try:
            await harness.read_until(lambda: harness.last_word is not None)
        finally:
            may_go_on.set()
        assert isinstance(harness.last_word, EngineDead)
        assert harness.last_word.cause.message == "broken"


async def test_a_slow_verb_of_the_runner_holds_steps_up_but_neither_aborts_nor_other_verbs(
    held_ping: tuple[threading.Event, threading.Event],
) -> None:
    inside, may_go_on = held_ping
    async with running() as harness:
        harness.send(UtilityCall(1, verbs.CollectiveRpc("ping")))
        await trio.to_thread.run_sync(inside.wait)
        assert await ask(harness, verbs.IsPaused()) is False
        await ask(harness, verbs.Pause(PauseMode.WAIT))
        harness.add("waits", [65])
        harness.send(AbortRequest([RequestId("waits")]))
        await harness.read_until(lambda: "waits" in harness.ends)
        assert harness.ends["waits"].finish_reason is FinishReason.ABORT
        assert 1 not in harness.results
        may_go_on.set()
        await harness.read_until(lambda: 1 in harness.results)
        assert harness.results[1].value == ["done"]


async def test_answers_bear_the_ids_of_their_calls_whatever_order_they_come_in() -> None:
    async with running() as harness:
        for call_id in range(50):
            harness.send(UtilityCall(call_id, verbs.IsPaused() if call_id % 2 else verbs.CollectiveRpc("capacity")))
        await harness.read_until(lambda: len(harness.results) == 50)
        for call_id, result in harness.results.items():
            assert result.value is False if call_id % 2 else result.value[0]["vocab_size"] == 256


# -- what each verb answers ------------------------------------------------------------------------------------------


async def test_stats_are_those_of_now() -> None:
    async with running(null_step_ms=1) as harness:
        harness.add("a", [65] * 40, LONG)
        await harness.read_until(lambda: "a" in harness.tokens)
        stats = await ask(harness, verbs.GetStats())
        assert isinstance(stats, SchedulerStats)
        assert stats.num_running == 1


async def test_a_dump_says_first_what_one_asks_first_and_then_shows_the_tree() -> None:
    async with running(null_step_ms=1) as harness:
        harness.add("a", [65] * 40, LONG)
        await harness.read_until(lambda: "a" in harness.tokens)
        await ask(harness, verbs.Pause(PauseMode.KEEP, clear_cache=False))
        text = await ask(harness, verbs.DumpTasks())
        state, _, tree = text.partition("tasks of process")
        assert "engine 0:" in state
        assert "alive, paused (keep); last step " in state
        assert "queues: 1 running, 0 waiting, 0 messages in the inbox, 0 in the outbox" in state
        assert "calls: 0 wait for a pause, 0 for the runner" in state
        assert "no step is possible: the core waits for resume" in state
        assert "StepLoop.run" in tree
        assert "EngineCoreServer._receive_task" in tree


async def test_a_profile_is_a_chrome_trace_of_the_steps_between_its_start_and_stop(tmp_path: Path) -> None:
    async with running(profile_dir=str(tmp_path / "profiles")) as harness:
        await assert_serves(harness, "before")
        await ask(harness, verbs.StartProfile())
        assert "stop it first" in str((await harness.call(verbs.StartProfile())).failure)
        await assert_serves(harness, "profiled")
        path = Path(await ask(harness, verbs.StopProfile()))
        assert "start one first" in str((await harness.call(verbs.StopProfile())).failure)
        await assert_serves(harness, "after")
    assert path.parent == tmp_path / "profiles"
    trace = json.loads(await trio.Path(path).read_text())
    steps = [event for event in trace["traceEvents"] if event["ph"] == "X" and event["cat"] == "steps"]
    assert sum(event["args"]["num_requests"] for event in steps) == 10
    assert all(event["dur"] >= 0 and {"name", "pid", "ts", "args"} <= event.keys() for event in steps)
    names = {event["tid"]: event["args"]["name"] for event in trace["traceEvents"] if event["ph"] == "M"}
    assert all(names[event["tid"]] == event["cat"] for event in trace["traceEvents"])
    assert trace["otherData"] == {"num_steps": len(steps), "num_kept": len(steps)}


# -- pauses ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("clear_cache", [True, False])
@pytest.mark.parametrize("mode", PauseMode)
async def test_a_pause_toggles_is_idempotent_and_clears_the_cache_if_asked(mode: PauseMode, clear_cache: bool) -> None:
    async with running() as harness:
        harness.add("fills the cache", [65] * 64)
        await harness.read_until(lambda: len(harness.ends) == 1)
        for _ in range(2):
            await ask(harness, verbs.Pause(mode, clear_cache))
            assert await ask(harness, verbs.IsPaused()) is True
        for _ in range(2):
            await ask(harness, verbs.Resume())
            assert await ask(harness, verbs.IsPaused()) is False
        harness.add("again", [65] * 64)
        await harness.read_until(lambda: len(harness.ends) == 2)
        assert harness.tokens["again"] == expected_tokens([65] * 64, GREEDY, 10)
        assert (harness.stats.prefix_cache_hits == 0) is clear_cache


async def test_a_pause_by_abort_ends_who_runs_and_who_waits_and_a_newcomer_waits_for_the_resume() -> None:
    async with running(null_step_ms=1, max_num_seqs=1) as harness:
        harness.add("runs", [65], LONG)
        harness.add("queued", [67], LONG)
        await harness.read_until(lambda: "runs" in harness.tokens)
        await ask(harness, verbs.Pause(PauseMode.ABORT))
        await harness.read_until(lambda: len(harness.ends) == 2)
        assert {end.finish_reason for end in harness.ends.values()} == {FinishReason.ABORT}
        assert harness.tokens["queued"] == []
        harness.add("new", [66])
        assert (await ask(harness, verbs.GetStats())).num_waiting == 1
        await ask(harness, verbs.Resume())
        await harness.read_until(lambda: "new" in harness.ends)
        assert harness.tokens["new"] == expected_tokens([66], GREEDY, 10)


async def test_a_pause_by_wait_returns_only_when_the_running_one_has_completed() -> None:
    async with running(null_step_ms=1) as harness:
        harness.add("runs", [65], THIRTY)
        await harness.read_until(lambda: "runs" in harness.tokens)
        await ask(harness, verbs.Pause(PauseMode.WAIT))
        assert harness.tokens["runs"] == expected_tokens([65], THIRTY, 30)


@pytest.mark.parametrize("clear_cache", [True, False])
async def test_a_pause_by_keep_takes_no_step_and_costs_no_token(clear_cache: bool) -> None:
    async with running(null_step_ms=1, depth=2) as harness:
        for i in range(3):
            harness.add(f"r{i}", [65 + i] * 20, THIRTY)
        await harness.read_until(lambda: len(harness.tokens) == 3)
        await ask(harness, verbs.Pause(PauseMode.KEEP, clear_cache))
        frozen = {name: len(tokens) for name, tokens in harness.tokens.items()}
        for _ in range(5):
            await ask(harness, verbs.IsPaused())
        assert {name: len(tokens) for name, tokens in harness.tokens.items()} == frozen
        await ask(harness, verbs.Resume())
        await harness.read_until(lambda: len(harness.ends) == 3)
        for i in range(3):
            assert harness.tokens[f"r{i}"] == expected_tokens([65 + i] * 20, THIRTY, 30)


async def test_a_late_request_does_not_delay_a_pause_by_wait() -> None:
    async with running(null_step_ms=1) as harness:
        harness.add("runs", [65], THIRTY)
        await harness.read_until(lambda: "runs" in harness.tokens)
        harness.send(UtilityCall(1, verbs.Pause(PauseMode.WAIT)))
        harness.add("late", [66], LONG)
        await harness.read_until(lambda: 1 in harness.results)
        assert "late" not in harness.tokens
        harness.send(AbortRequest([RequestId("late")]))
        await ask(harness, verbs.Resume())


# -- sleep -----------------------------------------------------------------------------------------------------------


async def test_asleep_the_pages_are_given_back_and_newcomers_wait_for_the_wake_up() -> None:
    async with running() as harness:
        await assert_serves(harness, "before")
        assert await kv_bytes(harness) > 0
        await ask(harness, verbs.Sleep(1))
        assert await kv_bytes(harness) == 0
        assert await ask(harness, verbs.IsSleeping()) is True
        harness.add("waits", [66])
        assert (await ask(harness, verbs.GetStats())).num_waiting == 1
        await ask(harness, verbs.WakeUp())
        await harness.read_until(lambda: "waits" in harness.ends)
        assert harness.tokens["waits"] == expected_tokens([66], GREEDY, 10)
        assert await ask(harness, verbs.IsSleeping()) is False
        assert await kv_bytes(harness) > 0


@pytest.mark.parametrize("level", [1, 2])
async def test_frozen_requests_sleep_too_and_go_on_with_their_exact_tokens(level: int) -> None:
    async with running(null_step_ms=1, depth=2) as harness:
        for i in range(3):
            harness.add(f"r{i}", [65 + i] * 20, THIRTY)
        await harness.read_until(lambda: len(harness.tokens) == 3)
        await ask(harness, verbs.Sleep(level, PauseMode.KEEP))
        assert await kv_bytes(harness) == 0
        await ask(harness, verbs.WakeUp())
        await harness.read_until(lambda: len(harness.ends) == 3)
        for i in range(3):
            assert harness.tokens[f"r{i}"] == expected_tokens([65 + i] * 20, THIRTY, 30)


async def test_level_0_pauses_and_keeps_the_cache_and_its_tag_wakes_it() -> None:
    async with running() as harness:
        harness.add("fills the cache", [65] * 64)
        await harness.read_until(lambda: len(harness.ends) == 1)
        await ask(harness, verbs.Sleep(0))
        assert await ask(harness, verbs.IsSleeping()) is True
        assert await kv_bytes(harness) > 0
        await ask(harness, verbs.WakeUp([SleepTag.SCHEDULING]))
        harness.add("again", [65] * 64)
        await harness.read_until(lambda: len(harness.ends) == 2)
        assert harness.stats.prefix_cache_hits > 0


async def test_scheduling_resumes_only_when_nothing_sleeps_any_more() -> None:
    async with running() as harness:
        await ask(harness, verbs.Sleep(2))
        await ask(harness, verbs.Sleep(1))  # asleep already
        harness.add("waits", [66])
        assert "kv_cache and weights sleep: wake them up" in str((await harness.call(verbs.Resume())).failure)
        assert "still sleep" in str((await harness.call(verbs.WakeUp([SleepTag.SCHEDULING]))).failure)
        await ask(harness, verbs.WakeUp([SleepTag.WEIGHTS]))
        assert await ask(harness, verbs.IsSleeping()) is True
        await ask(harness, verbs.WakeUp([SleepTag.WEIGHTS]))  # awake already
        assert "waits" not in harness.tokens
        await ask(harness, verbs.WakeUp([SleepTag.KV_CACHE]))
        await harness.read_until(lambda: "waits" in harness.ends)
        assert harness.tokens["waits"] == expected_tokens([66], GREEDY, 10)


async def test_sleep_and_wake_up_sent_at_once_take_effect_in_order() -> None:
    async with running() as harness:
        for call_id, verb in enumerate([verbs.Sleep(2), verbs.WakeUp(), verbs.Sleep(1), verbs.WakeUp()]):
            harness.send(UtilityCall(call_id, verb))
        await harness.read_until(lambda: len(harness.results) == 4)
        assert all(result.failure is None for result in harness.results.values())
        await assert_serves(harness)


async def test_calls_that_change_what_sleeps_are_done_one_after_the_other(tmp_path: Path) -> None:
    async with running() as harness:
        await ask(harness, verbs.Sleep(2))
        for call_id, verb in enumerate([verbs.WakeUp(), verbs.SaveShardedState(str(tmp_path / "x")), verbs.Sleep(1)]):
            harness.send(UtilityCall(call_id, verb))
        await harness.read_until(lambda: len(harness.results) == 4)
        assert harness.results[0].failure is None
        assert "the null model has no weights" in str(harness.results[1].failure)  # not that they sleep
        assert harness.results[2].failure is None
        assert await ask(harness, verbs.IsSleeping()) is True
        assert await kv_bytes(harness) == 0
        await ask(harness, verbs.WakeUp())
        await assert_serves(harness)


async def test_a_pause_that_comes_while_the_engine_wakes_up_lasts() -> None:
    async with running() as harness:
        await ask(harness, verbs.Sleep(1))
        harness.send(UtilityCall(1, verbs.WakeUp()))
        harness.send(UtilityCall(2, verbs.Pause(PauseMode.KEEP)))
        await harness.read_until(lambda: {1, 2} <= harness.results.keys())
        assert await ask(harness, verbs.IsPaused()) is True
        await ask(harness, verbs.Resume())
        await assert_serves(harness)


async def test_a_pause_that_was_undone_fails_though_another_one_follows_at_once() -> None:
    async with running(null_step_ms=1) as harness:
        harness.add("a", [65], LONG)
        await harness.read_until(lambda: "a" in harness.tokens)
        for call_id, verb in enumerate([verbs.Pause(PauseMode.WAIT), verbs.Resume(), verbs.Pause(PauseMode.KEEP)]):
            harness.send(UtilityCall(call_id, verb))
        await harness.read_until(lambda: len(harness.results) == 3)
        failures = [harness.results[call_id].failure for call_id in range(3)]
        assert str(failures[0]) == "Resumed: resumed before the pause was complete"
        assert failures[1:] == [None, None]
        assert "a" not in harness.ends


@pytest.mark.parametrize("verb", [verbs.Pause(PauseMode.WAIT), verbs.Sleep(1, PauseMode.WAIT)])
async def test_a_pause_by_wait_is_told_that_a_later_one_froze_what_it_waited_for(verb: Any) -> None:
    async with running(null_step_ms=1) as harness:
        harness.add("a", [65], THIRTY)
        await harness.read_until(lambda: "a" in harness.tokens)
        for call_id, asked in enumerate([verb, verbs.Pause(PauseMode.KEEP)]):
            harness.send(UtilityCall(call_id, asked))
        await harness.read_until(lambda: len(harness.results) == 2)
        assert harness.results[0].failure.type == "Overtaken"
        assert harness.results[1].failure is None
        assert "a" not in harness.ends
        await ask(harness, verbs.Resume())
        await harness.read_until(lambda: "a" in harness.ends)
        assert harness.tokens["a"] == expected_tokens([65], THIRTY, 30)
        await assert_serves(harness)


@pytest.mark.parametrize("was_paused", [True, False])
async def test_a_sleep_that_fails_leaves_the_engine_as_it_was(
    monkeypatch: pytest.MonkeyPatch, was_paused: bool
) -> None:
    def give_back_half(self: NullModelRunner, level: int) -> None:
        sleep(self, 1)
        raise MemoryError("cannot sleep")

    sleep = NullModelRunner.sleep
    monkeypatch.setattr(NullModelRunner, "sleep", give_back_half)
    async with running() as harness:
        if was_paused:
            await ask(harness, verbs.Pause())
        assert str((await harness.call(verbs.Sleep(2))).failure) == "MemoryError: cannot sleep"
        assert await ask(harness, verbs.IsPaused()) is was_paused
        await ask(harness, verbs.Resume())
        await assert_serves(harness)


# -- drain and stop --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [PauseMode.WAIT, PauseMode.KEEP])
async def test_a_paused_engine_drains_too(mode: PauseMode) -> None:
    async with running(null_step_ms=1) as harness:
        harness.add("runs", [65], THIRTY)
        await harness.read_until(lambda: "runs" in harness.tokens)
        harness.send(UtilityCall(1, verbs.Pause(mode)))
        harness.add("queued", [66])
        harness.send(Drain())
        await harness.read_until(lambda: len(harness.ends) == 2)
        assert harness.tokens["runs"] == expected_tokens([65], THIRTY, 30)
        assert harness.tokens["queued"] == expected_tokens([66], GREEDY, 10)


@pytest.mark.parametrize("level", [0, 1, 2])
async def test_a_sleeping_engine_wakes_up_to_drain(level: int) -> None:
    async with running() as harness:
        await ask(harness, verbs.Sleep(level))
        harness.add("queued", [66])
        harness.send(Drain())
        await harness.read_until(lambda: "queued" in harness.ends)
        assert harness.tokens["queued"] == expected_tokens([66], GREEDY, 10)


async def test_an_engine_that_cannot_wake_up_to_drain_ends_with_that_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: NullModelRunner, tags: object) -> None:
        raise MemoryError("no room for the pages")

    monkeypatch.setattr(NullModelRunner, "wake_up", fail)
    async with running() as harness:
        await ask(harness, verbs.Sleep(1))
        harness.add("queued", [66])
        harness.send(Drain())
        await harness.read_until(lambda: harness.last_word is not None)
        assert isinstance(harness.last_word, EngineDead)
        assert str(harness.last_word.cause) == "MemoryError: no room for the pages"


@pytest.mark.parametrize("stop", [Drain(), Shutdown()], ids=["drain", "shutdown"])
async def test_calls_that_wait_for_their_turn_learn_of_the_stop_and_the_engine_drains(
    monkeypatch: pytest.MonkeyPatch, stop: Any
) -> None:
    inside, may_go_on = threading.Event(), threading.Event()

    def sleep(self: NullModelRunner, level: int) -> None:
        inside.set()
        may_go_on.wait()

    monkeypatch.setattr(NullModelRunner, "sleep", sleep)
    async with running() as harness:
        harness.send(UtilityCall(1, verbs.Sleep(1)))
        await trio.to_thread.run_sync(inside.wait)
        harness.send(UtilityCall(2, verbs.WakeUp()))
        harness.send(UtilityCall(3, verbs.Sleep(2)))
        harness.add("queued", [66])
        harness.send(stop)
        await harness.read_until(lambda: {2, 3} <= harness.results.keys())
        assert {harness.results[call_id].failure.type for call_id in (2, 3)} == {"EngineStopping"}
        may_go_on.set()
        await harness.read_until(lambda: 1 in harness.results and "queued" in harness.ends)
        reason = FinishReason.LENGTH if isinstance(stop, Drain) else FinishReason.ABORT
        assert harness.ends["queued"].finish_reason is reason
        assert 0 not in harness.results  # what the engine does itself is nobody's answer


@pytest.mark.parametrize("stop", [Drain(), Shutdown()], ids=["drain", "shutdown"])
async def test_whoever_waits_for_a_pause_learns_of_the_stop_and_later_calls_are_refused(stop: Any) -> None:
    async with running(null_step_ms=1) as harness:
        harness.add("runs", [65], LONG)
        await harness.read_until(lambda: "runs" in harness.tokens)
        harness.send(UtilityCall(1, verbs.Pause(PauseMode.WAIT)))
        harness.send(UtilityCall(2, verbs.Sleep(2, PauseMode.WAIT)))
        harness.send(stop)
        for call_id, verb in enumerate(
            [verbs.GetStats(), verbs.Resume(), ["Frobnicate"], verbs.CollectiveRpc("ping")], start=3
        ):
            harness.send(UtilityCall(call_id, verb))
        await harness.read_until(lambda: len(harness.results) == 6)
        for result in harness.results.values():
            assert str(result.failure) == "EngineStopping: the engine is stopping and takes no calls"


async def test_a_request_that_comes_while_draining_is_aborted_and_who_runs_goes_on() -> None:
    async with running(null_step_ms=1) as harness:
        harness.add("runs", [65], THIRTY)
        await harness.read_until(lambda: "runs" in harness.tokens)
        harness.send(Drain())
        harness.add("late", [66])
        await harness.read_until(lambda: len(harness.ends) == 2)
        assert harness.ends["late"].finish_reason is FinishReason.ABORT
        assert harness.tokens["runs"] == expected_tokens([65], THIRTY, 30)


async def test_a_verb_that_the_runner_is_at_when_the_engine_stops_is_answered_before_the_last_word(
    held_ping: tuple[threading.Event, threading.Event],
) -> None:
    inside, may_go_on = held_ping
    async with running() as harness:
        harness.send(UtilityCall(1, verbs.CollectiveRpc("ping")))
        await trio.to_thread.run_sync(inside.wait)
        harness.send(Shutdown())
        await trio.testing.wait_all_tasks_blocked()
        assert harness.last_word is None
        may_go_on.set()
        await harness.read_until(lambda: harness.last_word is not None)
        assert harness.results[1].value == ["done"]
        assert isinstance(harness.last_word, EngineStopped)


async def test_the_engines_death_is_the_answer_to_whoever_waits_for_a_pause() -> None:
    def fail(step: int, plan: SchedulerOutput) -> Exception | None:
        return RuntimeError("broken") if step > 3 else None

    async with running(fail, null_step_ms=1) as harness:
        harness.add("a", [65], LONG)
        harness.add("b", [66], LONG)
        harness.send(UtilityCall(1, verbs.Pause(PauseMode.WAIT)))
        harness.add("c", [67], LONG)
        await harness.read_until(lambda: 1 in harness.results or harness.last_word is not None)
        assert 1 in harness.results  # the first failure ended a and b, and so the pause
        await ask(harness, verbs.Resume())
        await harness.read_until(lambda: harness.last_word is not None)
        assert isinstance(harness.last_word, EngineDead)
