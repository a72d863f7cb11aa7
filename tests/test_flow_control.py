"""An engine whose client does not read holds still: it answers and aborts as ever, and takes its steps later."""

from __future__ import annotations

import random

import pytest
import trio

from engine.outputs import FinishReason, RequestId
from engine.protocol import (
    MAX_STEPS_AHEAD,
    AbortRequest,
    EngineStopped,
    Pause,
    PauseMode,
    Shutdown,
    StepsRead,
    UtilityCall,
)
from engine.sampling_params import SamplingParams
from engine.testing import expected_tokens
from engine.verbs import DumpTasks, GetStats, ResetPrefixCache, Resume, Sleep, WakeUp
from tests.server_client import Harness, running

LONG = SamplingParams(temperature=0, max_tokens=3 * MAX_STEPS_AHEAD)


async def hold(harness: Harness, depth: int = 1) -> None:
    """Have the engine take all the steps that it may while nothing is said to be read."""
    harness.says_what_it_reads = False
    harness.add("a", [65], LONG)
    harness.add("b", [66, 66], LONG)
    await harness.read_until(lambda: harness.step == MAX_STEPS_AHEAD + depth - 1)


@pytest.mark.parametrize("depth", [1, 3])
async def test_steps_stop_where_they_are_unread_and_go_on_once_they_are_read(depth: int) -> None:
    async with running(depth=depth) as harness:
        await hold(harness, depth)
        held_step = harness.step
        assert (await harness.call(GetStats())).failure is None
        assert "no step is launched: the client has read" in (await harness.call(DumpTasks())).value
        assert harness.step == held_step
        harness.says_what_it_reads = True
        harness.send(StepsRead(held_step))
        await harness.read_until(lambda: len(harness.ends) == 2)
        for name, prompt in {"a": [65], "b": [66, 66]}.items():
            assert harness.tokens[name] == expected_tokens(prompt, LONG, 3 * MAX_STEPS_AHEAD)


async def test_an_abort_frees_its_blocks_while_no_step_is_taken() -> None:
    async with running() as harness:
        await hold(harness)
        harness.send(AbortRequest([RequestId("a")]))
        await harness.read_until(lambda: "a" in harness.ends)
        assert harness.stats is not None
        assert harness.stats.num_running == 1
        harness.send(AbortRequest([RequestId("b")]))
        await harness.read_until(lambda: "b" in harness.ends)
        assert harness.stats.num_used_blocks == 0
        assert harness.step == MAX_STEPS_AHEAD


async def test_a_pause_waits_for_the_steps_that_wait_for_the_reader() -> None:
    async with running() as harness:
        await hold(harness)
        harness.send(UtilityCall(1, Pause(PauseMode.WAIT)))
        await harness.call(GetStats())
        assert 1 not in harness.results
        harness.says_what_it_reads = True
        harness.send(StepsRead(harness.step))
        await harness.read_until(lambda: 1 in harness.results)
        assert [end.finish_reason for end in harness.ends.values()] == [FinishReason.LENGTH] * 2


async def test_a_stop_waits_for_no_reader() -> None:
    async with running() as harness:
        await hold(harness)
        harness.send(Shutdown())
        await harness.read_until(lambda: harness.last_word is not None)
        assert isinstance(harness.last_word, EngineStopped)
        assert [end.finish_reason for end in harness.ends.values()] == [FinishReason.ABORT] * 2


async def test_the_watchdog_takes_a_reader_that_is_away_for_no_hang() -> None:
    async with running(step_timeout=0.7) as harness:
        await hold(harness)
        await trio.sleep(1)
        harness.says_what_it_reads = True
        harness.send(StepsRead(harness.step))
        await harness.read_until(lambda: len(harness.ends) == 2)
        assert harness.last_word is None


async def test_a_queue_timeout_ends_a_request_also_while_nothing_is_read() -> None:
    async with running(max_num_seqs=2, queue_timeout=0.05) as harness:
        await hold(harness)
        for name in ("late", "later"):
            harness.add(name, [67], LONG)
        await harness.read_until(lambda: len(harness.ends) == 2)
        assert harness.step == MAX_STEPS_AHEAD
        for end in harness.ends.values():
            assert end.error is not None
            assert end.error.type == "QueueTimeout"
        harness.says_what_it_reads = True
        harness.send(StepsRead(harness.step))
        await harness.read_until(lambda: len(harness.ends) == 4)


VERBS = [
    *(Pause(mode) for mode in PauseMode),
    Resume(),
    Sleep(1, PauseMode.KEEP),
    Sleep(1, PauseMode.WAIT),
    WakeUp(),
    ResetPrefixCache(reset_running=True),
    GetStats(),
]


@pytest.mark.parametrize("seed", range(8))
async def test_whatever_a_client_asks_and_whether_it_reads_every_request_and_call_ends_once(seed: int) -> None:
    draw = random.Random(seed)
    asked: dict[str, tuple[list[int], SamplingParams]] = {}
    calls: set[int] = set()
    settings = {"max_num_seqs": draw.choice([2, 4]), "queue_timeout": draw.choice([None, 0.01, 0.05])}
    settings |= {"num_gpu_blocks_override": draw.choice([34, 200]), "block_size": 4, "max_model_len": 100}
    async with running(depth=draw.randint(1, 3), **settings) as harness:
        for number in range(60):
            match draw.choice(["add", "add", "abort", "read", "verb", "wait"]):
                case "add":
                    params = SamplingParams(temperature=0, max_tokens=draw.randint(1, 60))
                    asked[f"r{number}"] = prompt, _ = [65 + draw.randrange(4)] * draw.randint(1, 30), params
                    harness.add(f"r{number}", prompt, params)
                case "abort" if asked:
                    harness.send(AbortRequest([RequestId(draw.choice(list(asked)))]))
                case "read":
                    harness.says_what_it_reads = draw.random() < 0.5
                case "verb":
                    calls.add(number)
                    harness.send(UtilityCall(number, draw.choice(VERBS)))
                case "wait":
                    with trio.move_on_after(draw.random() * 0.02):
                        await harness.read_until(lambda: False)
        harness.says_what_it_reads = True
        harness.send(StepsRead(harness.step))

        def all_ended() -> bool:
            return asked.keys() <= harness.ends.keys() and calls <= harness.results.keys()

        with trio.fail_after(10):
            while not all_ended():
                await harness.call(WakeUp())
                await harness.call(Resume())
                with trio.move_on_after(0.1):
                    await harness.read_until(all_ended)
        await harness.call(GetStats())
        assert harness.stats is not None
        assert (harness.stats.num_running, harness.stats.num_waiting, harness.stats.num_used_blocks) == (0, 0, 0)
    for name, (prompt, params) in asked.items():
        assert params.max_tokens is not None
        expected = expected_tokens(prompt, params, params.max_tokens)
        is_whole = harness.ends[name].finish_reason in (FinishReason.LENGTH, FinishReason.STOP)
        assert harness.tokens[name] == expected[: None if is_whole else len(harness.tokens[name])]
