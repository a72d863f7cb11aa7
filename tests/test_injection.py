"""A cancellation at every checkpoint of a stream, a verb, a pause, a stop and a start: nothing of them is left.

The engine in this process has an executor without a thread, so that every order of events is Trio's and a run repeats;
no timer is near (a clock that stands still shows it). The engine in a process of its own is reached over real sockets.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing

import engine
from engine.client.async_llm import AsyncLLM
from engine.core import EngineCore
from engine.protocol import PauseMode
from engine.sampling_params import SamplingParams
from fuzz.cancellations import Stop, cancel_starts, cancel_stops
from fuzz.injection import MOMENTS, Counting, Moment, at_every_step
from fuzz.same_task_executor import SameTaskExecutor

SHORT = SamplingParams(max_tokens=5, n=2)
LONG = SamplingParams(max_tokens=8000)
HANG_S = 5.0
"""How long an act may hang; a clock that stands still jumps once nothing has happened for so long."""

Act = Callable[[AsyncLLM], Awaitable[object]]


@pytest.fixture
def still_clock() -> trio.testing.MockClock:
    return trio.testing.MockClock(autojump_threshold=HANG_S)


class Inside:
    """The cores and executors of the engines opened in this process."""

    def __init__(self) -> None:
        self.cores: list[EngineCore] = []
        self.executors: list[SameTaskExecutor] = []

    def check_idle(self) -> None:
        for core in self.cores:
            core.check_invariants()
            stats = core.stats()
            assert (stats.num_running, stats.num_waiting, stats.num_used_blocks) == (0, 0, 0)
            assert not core.has_work


@pytest.fixture
def inside(monkeypatch: pytest.MonkeyPatch) -> Inside:
    seen = Inside()

    def core(*args: Any, **kwargs: Any) -> EngineCore:
        seen.cores.append(EngineCore(*args, **kwargs))
        return seen.cores[-1]

    def executor(*args: Any, **kwargs: Any) -> SameTaskExecutor:
        seen.executors.append(SameTaskExecutor(*args, **kwargs))
        return seen.executors[-1]

    monkeypatch.setattr("engine.server.EngineCore", core)
    monkeypatch.setattr("engine.launch.InlineExecutor", executor)
    return seen


# -- what is done, and cancelled ---------------------------------------------------------------------------------------


async def read_a_stream(llm: AsyncLLM) -> None:
    async with llm.generate([65] * 20, SHORT) as stream:
        async for _ in stream:
            pass


async def leave_a_stream_early(llm: AsyncLLM) -> None:
    async with llm.generate([65] * 20, LONG) as stream:
        await anext(stream)


async def read_two_streams(llm: AsyncLLM) -> None:
    async with llm.generate([65] * 40, SHORT) as first, llm.generate([65] * 40, SHORT) as second:
        await second.collect()
        await first.collect()


async def abort_by_label(llm: AsyncLLM) -> None:
    async with llm.generate([65], LONG, request_id="mine") as stream:
        await anext(stream)
        llm.abort("mine")
        await stream.collect()


async def reset_beside_a_stream(llm: AsyncLLM) -> None:
    async with llm.generate([65] * 20, LONG) as stream:
        await anext(stream)
        await llm.reset_prefix_cache(reset_running=True)
        await anext(stream)


def pause_beside_a_stream(mode: PauseMode) -> Act:
    async def act(llm: AsyncLLM) -> None:
        async with llm.generate([65] * 20, SHORT) as stream:
            await anext(stream)
            await llm.pause(mode)
            await llm.resume()
            await stream.collect()

    return act


async def sleep_beside_a_stream(llm: AsyncLLM) -> None:
    async with llm.generate([65] * 20, SHORT) as stream:
        await anext(stream)
        await llm.sleep(1, PauseMode.KEEP)
        assert (await llm.collective_rpc("memory"))[0]["kv_cache"] == 0
        await llm.wake_up()
        await stream.collect()


ACTS: dict[str, Act] = {
    "a stream": read_a_stream,
    "a stream left early": leave_a_stream_early,
    "two streams": read_two_streams,
    "an abort by label": abort_by_label,
    "a reset": reset_beside_a_stream,
    "a sleep": sleep_beside_a_stream,
    **{f"a pause, {mode.value}": pause_beside_a_stream(mode) for mode in PauseMode},
}
"""None has a thread of its own."""


async def in_time(act: Act, llm: AsyncLLM) -> None:
    """Fail where `act` hangs."""
    with trio.fail_after(HANG_S):
        await act(llm)


# -- in this process, in every order -----------------------------------------------------------------------------------


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("act", ACTS.values(), ids=ACTS.keys())
async def test_what_is_cancelled_at_any_moment_leaves_nothing_one_step_later(
    act: Act, moment: Moment, inside: Inside, still_clock: trio.testing.MockClock
) -> None:
    """At every step of any task: also those of the engine, and those that bring the answer."""
    async with engine.open_engine("null", isolation="thread", max_num_seqs=4) as llm:
        (executor,) = inside.executors

        async def check() -> None:
            num_steps = executor.num_steps
            await llm.wake_up()  # what a cancelled pause or sleep leaves; its answer comes after all sent before
            await trio.testing.wait_all_tasks_blocked()
            assert executor.num_steps <= num_steps + 1
            assert llm.num_live == 0
            assert not llm._slots
            assert not llm._client._calls
            inside.check_idle()

        num_moments = await at_every_step(lambda: in_time(act, llm), check, Counting(moment, of_all_tasks=True))
        assert num_moments > 10
    inside.check_idle()


@pytest.mark.parametrize("moment", MOMENTS)
async def test_a_start_cancelled_at_any_moment_leaves_nothing(
    moment: Moment, inside: Inside, still_clock: trio.testing.MockClock
) -> None:
    reached: set[str] = set()

    def progress(phase: str, done: int, total: int) -> None:
        reached.add(phase)

    async def act() -> None:
        async with engine.open_engine("null", isolation="thread", progress=progress):
            pass

    async def check() -> None:
        inside.check_idle()

    assert await at_every_step(act, check, Counting(moment, of_all_tasks=True)) > 20
    assert reached >= {"weights", "kv_specs", "profile", "kv_pages", "warm_up", "scheduler"}


@pytest.mark.parametrize("moment", MOMENTS)
async def test_a_stop_cancelled_at_any_moment_ends_every_stream_and_leaves_nothing(
    moment: Moment, inside: Inside, still_clock: trio.testing.MockClock
) -> None:
    async with trio.open_nursery() as readers:
        stop = Stop(readers, isolation="thread")
        counting = Counting(moment, of_all_tasks=True, starts_when=lambda: stop.is_left)
        assert await at_every_step(stop.act, stop.check, counting) > 10
    inside.check_idle()


# -- in a process of its own, over real sockets ------------------------------------------------------------------------


@pytest.fixture
def sockets_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize("act", ACTS.values(), ids=ACTS.keys())
async def test_what_is_cancelled_at_any_checkpoint_leaves_nothing_in_another_process(act: Act) -> None:
    async with engine.open_engine("null", max_num_seqs=4) as llm:

        async def check() -> None:
            with trio.fail_after(5):
                await llm.wake_up()
                stats = await llm.wait_for_stats(
                    lambda stats: not (llm.num_live or stats.num_running or stats.num_waiting or stats.num_used_blocks)
                )
            assert not llm._slots
            assert not llm._client._calls
            assert stats.num_used_blocks == 0

        for moment in MOMENTS:
            assert await at_every_step(lambda: in_time(act, llm), check, Counting(moment)) > 1


EVERY = 5
"""Of the steps of a start or stop with a process each this many-th; `python -m fuzz cancellations` takes them all."""


@pytest.mark.slow
@pytest.mark.parametrize("first", [1, 3])
async def test_a_start_in_another_process_cancelled_at_any_step_leaves_nothing(
    first: int, sockets_folder: Path
) -> None:
    moment = MOMENTS[first > 1]
    assert await cancel_starts(sockets_folder, moment, first=first, every=EVERY) > 5


@pytest.mark.slow
@pytest.mark.parametrize("moment", MOMENTS)
async def test_a_stop_in_another_process_cancelled_at_any_checkpoint_ends_every_stream_and_leaves_nothing(
    moment: Moment, sockets_folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert await cancel_stops(sockets_folder, moment, every=2) > 1
    assert "INFO" not in capfd.readouterr().err
