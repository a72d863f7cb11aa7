"""What a process says of itself: first those who own the state, then the tree of tasks."""

from __future__ import annotations

import io
import os
import signal

import pytest
import trio
import trio.testing

import engine
from engine.sampling_params import SamplingParams
from engine.task_tree import answer_signals, report, telling
from transport.standard_error import write_to_stderr


async def test_each_owner_of_state_tells_its_lines_while_its_block_lasts() -> None:
    with telling("first", lambda: ["one", "two"]), telling("second", lambda: []):
        state, _, tree = report().partition(f"tasks of process {os.getpid()}:")
        assert state == f"state of process {os.getpid()}:\n  first:\n    one\n    two\n  second:\n"
        assert "nursery of" in tree
    assert "first" not in report()


async def test_two_of_one_name_both_tell() -> None:
    with telling("engine", lambda: ["a"]):
        with telling("engine", lambda: ["b"]):
            assert report().startswith(f"state of process {os.getpid()}:\n  engine:\n    a\n  engine:\n    b\n")
        assert "    a\n" in report()


async def test_the_front_tells_of_its_engine_its_last_message_its_streams_and_its_calls() -> None:
    async with engine.open_engine("null", isolation="thread", null_step_ms=1) as llm:
        await llm.is_paused()
        assert "  client:\n    engine alive; last message, of step 0, 0." in report()
        assert "  engine 0:\n    alive; no step yet\n" in report()
        async with llm.generate([65], SamplingParams(max_tokens=5000)) as stream:
            await stream.__anext__()
            text = report()
        assert "  client:\n    engine alive; last message, of step" in text
        assert "1 live streams, 1 requests in flight" in text
        assert "waiting calls: none" in text
        assert "  engine 0:\n    alive; last step" in text
    assert report().startswith(f"state of process {os.getpid()}:\ntasks of")


async def test_processes_tell_of_each_other_and_of_their_sockets() -> None:
    async with engine.open_engine("null", isolation="process") as llm:
        front, theirs = report(), await llm.dump_tasks()
    processes = f"engine processes:\n    engine-0, process {llm.ready.pid}: alive\n"
    assert f"{processes}    requests: 0 messages pending, 0 bytes" in front
    assert theirs.startswith(f"state of process {llm.ready.pid}:")
    assert "sockets:\n    requests: 0 messages pending, 0 bytes\n    outputs: 0 messages pending, 0 bytes" in theirs
    assert "engine 0:\n    alive; no step yet" in theirs


async def test_an_application_has_its_own_handlers_back_afterwards() -> None:
    taken: list[int] = []
    numbers = (signal.SIGUSR1, signal.SIGUSR2)
    before = [signal.signal(number, lambda number, frame: taken.append(number)) for number in numbers]
    try:
        async with trio.open_nursery() as nursery:
            await nursery.start(answer_signals)
            nursery.cancel_scope.cancel()
        for number in numbers:
            os.kill(os.getpid(), number)
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)
    assert taken == list(numbers)


@pytest.mark.parametrize("has_one", [True, False])
async def test_a_process_whose_standard_error_takes_nothing_does_not_end_by_being_asked(
    monkeypatch: pytest.MonkeyPatch, has_one: bool
) -> None:
    with io.TextIOWrapper(io.FileIO("/dev/full", "w"), write_through=True) as full, trio.fail_after(5):
        monkeypatch.setattr("sys.stderr", full if has_one else None)
        async with trio.open_nursery() as nursery:
            await nursery.start(answer_signals)
            os.kill(os.getpid(), signal.SIGUSR1)
            await trio.testing.wait_all_tasks_blocked()
            write_to_stderr("a line of a child's")
            nursery.cancel_scope.cancel()
