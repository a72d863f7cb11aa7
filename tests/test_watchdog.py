"""An engine that hangs says where, tells everybody and ends, whether a step or the loop itself stands still."""

from __future__ import annotations

import re
import threading
import time
import urllib.error
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing

import engine
from engine.errors import EngineDeadError, StepTimeout
from engine.executor import runner_verbs
from engine.outputs import SchedulerOutput
from engine.protocol import EngineDead, Pause, PauseMode, UtilityCall
from engine.sampling_params import SamplingParams
from engine.testing import expected_tokens
from engine.verbs import CollectiveRpc
from engine.watchdog import ALARM_FACTOR, Watchdog
from tests.server_client import GREEDY, running


class Alarm:
    """Notes what the system's alarm is set to."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def __call__(self, seconds: float) -> None:
        self.seconds.append(seconds)


async def test_time_runs_while_a_step_is_pending_and_begins_anew_with_each(
    autojump_clock: trio.testing.MockClock,
) -> None:
    alarm = Alarm()
    watchdog = Watchdog(10, alarm)
    ended: list[float] = []
    async with trio.open_nursery() as nursery:
        nursery.start_soon(expect_timeout, watchdog, ended)
        await trio.sleep(100)  # nothing is pending
        for _ in range(20):
            watchdog.expect(True)
            await trio.sleep(9)
            watchdog.expect(True)  # changes nothing
            watchdog.step_ended()
        watchdog.expect(True)
        watchdog.expect(False)
        await trio.sleep(1000)
        watchdog.expect(True)
        began = trio.current_time()
    assert ended == [began + 10]
    assert alarm.seconds[:3] == [ALARM_FACTOR * 10] * 3
    assert alarm.seconds[-3:] == [0, ALARM_FACTOR * 10, 0]  # pending no more; pending; the task was there in time


async def expect_timeout(watchdog: Watchdog, ended: list[float]) -> None:
    with pytest.raises(StepTimeout, match="no step has ended for 10 seconds"):
        await watchdog.run(lambda: None)
    ended.append(trio.current_time())


async def test_a_process_that_stood_still_itself_gives_the_step_its_time_again(mock_clock: Any) -> None:
    watchdog = Watchdog(10)
    ended: list[float] = []
    async with trio.open_nursery() as nursery:
        nursery.start_soon(expect_timeout, watchdog, ended)
        await trio.testing.wait_all_tasks_blocked()
        watchdog.expect(True)
        mock_clock.jump(3600)  # as after SIGSTOP and SIGCONT
        await trio.testing.wait_all_tasks_blocked(0.01)
        assert ended == []
        mock_clock.jump(10)
        await trio.testing.wait_all_tasks_blocked()
        assert len(ended) == 1


@pytest.mark.parametrize("is_pending", [True, False])
async def test_a_step_that_ends_in_the_moment_its_deadline_is_noticed_has_ended(
    mock_clock: Any, is_pending: bool
) -> None:
    for _ in range(20):  # Trio shuffles who of the two is first
        watchdog, result = Watchdog(10), trio.Event()

        async def step(watchdog: Watchdog = watchdog, result: trio.Event = result) -> None:
            watchdog.expect(True)
            await result.wait()
            watchdog.step_ended()
            watchdog.expect(True)
            watchdog.expect(is_pending)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(watchdog.run, lambda: None)
            nursery.start_soon(step)
            await trio.testing.wait_all_tasks_blocked()
            mock_clock.jump(100)
            result.set()
            await trio.testing.wait_all_tasks_blocked()
            nursery.cancel_scope.cancel()


async def test_0_is_for_ever(autojump_clock: trio.testing.MockClock) -> None:
    alarm = Alarm()
    watchdog = Watchdog(0, alarm)
    with trio.move_on_after(1e6) as scope:
        watchdog.expect(True)
        await watchdog.run(lambda: None)
    assert scope.cancelled_caught
    assert alarm.seconds == []


class Held:
    """Holds a step until it is let go; leaving the block waits for the thread that was left."""

    def __init__(self, step: int) -> None:
        self._step = step
        self._threads: list[threading.Thread] = []
        self.may_go_on = threading.Event()

    def __call__(self, step: int, plan: SchedulerOutput) -> None:
        if step == self._step:
            self._threads.append(threading.current_thread())
            self.may_go_on.wait()

    def __enter__(self) -> Held:
        return self

    def __exit__(self, *_: object) -> None:
        self.may_go_on.set()
        for thread in self._threads:
            thread.join()


async def test_a_step_that_hangs_shows_the_engines_state_and_ends_it_though_its_thread_cannot_be_ended(
    capfd: pytest.CaptureFixture[str],
) -> None:
    with Held(3) as hold:
        async with running(hold, step_timeout=0.2) as harness:
            harness.add("a", [65])
            harness.add("queued", [66])
            await harness.read_until(lambda: harness.last_word is not None)
            assert isinstance(harness.last_word, EngineDead)
            cause = harness.last_word.cause
            assert cause.type == "StepTimeout"
            assert "no step has ended for 0.2 seconds (--step-timeout)" in cause.message
            assert [other.type for other in cause.causes] == ["ExecutorDead"]
    close_bell(harness)
    shown = capfd.readouterr().err
    assert re.search(r"state of process \d+:\n.*\n?.*alive; last step 2 ended 0\.\d+ s ago", shown)
    assert re.search(r"queues: 2 running, 0 waiting", shown)
    assert re.search(r"in flight for 0\.\d+ s: step 3: 2 requests, 2 tokens, 1 in flight: a 1@2 in 1 blocks", shown)
    assert "StepLoop.run at" in shown
    assert re.search(r'File ".*tests/test_watchdog\.py", line \d+ in __call__', shown)  # where the thread stands


def close_bell(harness: Any) -> None:
    """An abandoned thread's bell is left open for it; the process's end would close it."""
    harness.server._executor._worker._bell.close()


async def test_steps_that_end_in_time_an_idle_engine_and_a_paused_one_are_left_alone() -> None:
    async with running(step_timeout=0.7, null_step_ms=20) as harness:
        harness.add("a", [65], SamplingParams(temperature=0, max_tokens=40))  # longer than the timeout, in all
        await harness.read_until(lambda: "a" in harness.ends)
        await trio.sleep(0.8)
        harness.add("b", [66], SamplingParams(temperature=0, max_tokens=5000))
        await harness.read_until(lambda: "b" in harness.tokens)
        harness.send(UtilityCall(1, Pause(PauseMode.KEEP)))
        await harness.read_until(lambda: 1 in harness.results)
        await trio.sleep(0.8)
        assert harness.last_word is None
        harness.add("c", [67])


async def test_in_this_process_too_everybody_learns_of_the_step_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    from engine.executor.null import NullModelRunner

    execute, hold = NullModelRunner.execute, Held(1)
    workers = []

    def held(self: NullModelRunner, plan: SchedulerOutput) -> None:
        hold(1, plan)
        execute(self, plan)

    from transport.worker import Worker

    abandon = Worker.abandon

    def noting(self: Worker) -> None:
        workers.append(self)
        abandon(self)

    monkeypatch.setattr(NullModelRunner, "execute", held)
    monkeypatch.setattr(Worker, "abandon", noting)
    with hold, trio.fail_after(5):
        async with engine.open_engine("null", isolation="thread", step_timeout=0.2) as llm:
            with pytest.raises(EngineDeadError, match="StepTimeout"):
                async with llm.generate([65], GREEDY) as stream:
                    await stream.collect()
            assert not llm.is_healthy
    (worker,) = workers
    worker._bell.close()


async def test_a_verb_of_the_runner_may_take_longer_than_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(runner_verbs._METHODS, "ping", lambda runner: time.sleep(1))
    async with running(step_timeout=0.7, null_step_ms=1) as harness:
        harness.add("a", [65], SamplingParams(temperature=0, max_tokens=5000))
        await harness.read_until(lambda: "a" in harness.tokens)
        harness.send(UtilityCall(1, CollectiveRpc("ping")))
        await harness.read_until(lambda: 1 in harness.results)
        num_tokens = len(harness.tokens["a"])
        await harness.read_until(lambda: len(harness.tokens["a"]) > num_tokens)
        assert harness.last_word is None


async def test_a_step_behind_a_verb_or_before_one_has_its_own_time(monkeypatch: pytest.MonkeyPatch) -> None:
    inside = threading.Event()

    def ping(runner: object) -> None:
        inside.set()
        time.sleep(1)

    monkeypatch.setitem(runner_verbs._METHODS, "ping", ping)
    for is_behind in (True, False):
        with Held(1) as hold:
            async with running(hold, step_timeout=0.15) as harness:
                if is_behind:
                    harness.send(UtilityCall(1, CollectiveRpc("ping")))
                    await trio.to_thread.run_sync(inside.wait)
                began = trio.current_time()
                harness.add("a", [65])
                if not is_behind:  # it comes in the same turn of the loop
                    harness.send(UtilityCall(1, CollectiveRpc("ping")))
                await harness.read_until(lambda harness=harness: harness.last_word is not None)
                assert harness.last_word.cause.type == "StepTimeout"
                assert (trio.current_time() - began > 1.1) is is_behind
        close_bell(harness)


HANGS = """
import sys
if sys.argv[0] == '-c':
    import engine.core
    plan = engine.core.EngineCore.plan
    def hang(self, now):
        while self._requests:
            pass
        return plan(self, now)
    engine.core.EngineCore.plan = hang
"""


@pytest.mark.slow
def test_a_step_that_hangs_ends_a_served_engine_with_the_cause_for_everybody_and_exit_code_1(start_server: Any) -> None:
    server = start_server("null", "--null-step-ms", "60000", "--step-timeout", "0.5")
    with pytest.raises(urllib.error.HTTPError) as refusal:
        server.post("/v1/completions", server.LONG)
    with refusal.value as answer:
        assert answer.code == 503
        assert "StepTimeout" in answer.read().decode()
    assert server.wait() == 1
    assert "no step has ended for 0.5 seconds" in server.lines[-1]
    assert any(re.search(r"in flight for .* step 1: 1 requests", line) for line in server.lines)
    assert any(re.search(r"executor/null\.py.* in execute", line) for line in server.lines)


@pytest.mark.slow
def test_a_core_that_never_returns_is_ended_by_the_alarm_with_its_stack(start_server: Any, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(HANGS)
    paths = f"{tmp_path}:{Path(__file__).parent.parent}"
    server = start_server("null", "--step-timeout", "0.3", env={"PYTHONPATH": paths})
    server.wait_line("ready")
    began = time.monotonic()
    with pytest.raises(urllib.error.HTTPError) as refusal:
        server.post("/v1/completions", server.LONG)
    with refusal.value as answer:
        assert answer.code == 503
    assert server.wait() == 1
    assert time.monotonic() - began < 10
    assert "killed by SIGALRM: its loop stood still (--step-timeout)" in server.lines[-1]
    assert any("sitecustomize.py" in line and "in hang" in line for line in server.lines)


async def test_an_engine_with_a_watchdog_gives_the_tokens_of_one_without() -> None:
    for step_timeout in (0, 300):
        async with running(step_timeout=step_timeout, depth=2) as harness:
            harness.add("a", [65])
            await harness.read_until(lambda: "a" in harness.ends)
            assert harness.tokens["a"] == expected_tokens([65], GREEDY, 10)
