"""An exception group becomes one sentence for a person and a tree of causes for a program."""

from __future__ import annotations

import pytest
import trio

from engine.errors import (
    MAX_BESIDE,
    MAX_DEPTH,
    MAX_TRACEBACK_CHARS,
    Cause,
    EngineDeadError,
    ExecutorDead,
    StepTimeout,
    root_cause,
)
from engine.protocol import EngineDead
from transport.codec import Decoder, Encoder
from transport.worker import WorkerLost


def raised(error: BaseException, cause: BaseException | None = None) -> BaseException:
    try:
        raise error from cause
    except BaseException as caught:
        return caught


def group(*errors: BaseException) -> BaseException:
    return raised(BaseExceptionGroup("several", list(errors)))


def test_one_failure_explains_the_group_and_the_rest_are_beside_it() -> None:
    error = group(raised(trio.BrokenResourceError("gone")), group(raised(ValueError("the root"))), raised(OSError("x")))
    cause = Cause.of(error)
    assert str(cause) == "ValueError: the root"
    assert "ValueError: the root" in cause.traceback
    assert "in raised" in cause.traceback
    assert [str(other) for other in cause.causes] == ["BrokenResourceError: gone", "OSError: x"]


async def test_what_a_nursery_cancelled_is_no_cause() -> None:
    async def fail() -> None:
        raise RuntimeError("the reason")

    async def run() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(trio.sleep_forever)
            nursery.start_soon(fail)

    with pytest.raises(BaseExceptionGroup) as caught:
        await run()
    assert str(Cause.of(caught.value)) == "RuntimeError: the reason"
    assert Cause.of(caught.value).causes == ()


def test_a_chain_is_told_from_the_end_to_its_beginning() -> None:
    error = raised(KeyError("late"), raised(ValueError("middle"), raised(OSError("first"))))
    cause = Cause.of(error)
    assert cause.type == "KeyError"
    assert cause.causes[0].type == "ValueError"
    assert cause.causes[0].causes[0].type == "OSError"


def test_a_dead_engines_own_cause_goes_along_with_its_exit_status() -> None:
    died = Cause("EngineDied", "rank 1 was killed by SIGKILL", exit_status=-9)
    cause = Cause.of(group(raised(ExecutorDead(died))))
    assert (cause.type, cause.exit_status, cause.causes) == ("ExecutorDead", -9, (died,))
    assert "SIGKILL" in str(EngineDeadError(cause))


def test_causes_cross_the_wire_whole() -> None:
    cause = Cause.of(group(raised(ValueError("a"), raised(OSError("b"))), raised(KeyError("c"))), phase="weights")
    received = Decoder(EngineDead).decode(Encoder().encode(EngineDead(cause)))
    assert received.cause == cause
    assert cause.phase == "weights"
    assert cause.causes[0].phase == ""


def test_what_is_told_is_bounded_in_depth_breadth_and_length() -> None:
    chain: BaseException | None = None
    for number in range(50):
        chain = raised(ValueError("x" * 10_000 + str(number)), chain)
    assert chain is not None
    cause = Cause.of(group(chain, *(raised(OSError(str(number))) for number in range(100))))
    assert len(cause.causes) == 1 + MAX_BESIDE
    assert len(cause.traceback) <= MAX_TRACEBACK_CHARS
    depth, below = 0, cause
    while below.causes:
        depth, below = depth + 1, below.causes[0]
    assert depth == MAX_DEPTH


def test_the_root_is_found_twice_and_noted_once() -> None:
    error = group(raised(ValueError("root")), raised(OSError("beside")))
    assert root_cause(error) is root_cause(error)
    assert root_cause(error).__notes__ == ["also failed: OSError: beside"]


@pytest.mark.parametrize("beside", [ExecutorDead(Cause("WorkerLost", "gone")), WorkerLost("gone")], ids=str)
def test_a_worker_that_was_given_up_does_not_hide_for_what(beside: Exception) -> None:
    for together in ([StepTimeout("hung"), beside], [beside, StepTimeout("hung")]):
        assert Cause.of(ExceptionGroup("", together)).type == "StepTimeout"
    assert root_cause(ExceptionGroup("", [trio.BrokenResourceError(), beside])) is beside
