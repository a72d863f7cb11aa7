"""However a child dies and whatever it does to its output, its end is told within a second, with its last words."""

from __future__ import annotations

import os
import signal
import sys
import textwrap

import pytest
import trio

from transport.lines import MAX_TAIL_LINES
from transport.process import Child, describe_exit, open_child

TOLD_S = 1.0
GUARD = "from transport.process import child_guard; child_guard();"


def python(code: str) -> list[str]:
    return [sys.executable, "-c", textwrap.dedent(code)]


def ignore(line: str) -> None:
    pass


async def told_status(child: Child) -> int:
    """Wait for its death as the kernel tells it, then for the child's own word, which may take a second."""
    pidfd = os.pidfd_open(child.pid)
    try:
        with trio.fail_after(20):
            await trio.lowlevel.wait_readable(pidfd)
    finally:
        os.close(pidfd)
    with trio.fail_after(TOLD_S):
        return await child.wait()


FAILURES = {
    "before its guard": "raise ValueError('no weights')",
    "after its guard": f"{GUARD}\nraise ValueError('no weights')",
    "in Trio": f"{GUARD}\nimport trio\nasync def main(): raise ValueError('no weights')\ntrio.run(main)",
}


@pytest.mark.parametrize("moment", FAILURES)
async def test_an_exception_is_told_with_status_and_traceback(moment):
    async with open_child("engine-0", python(FAILURES[moment]), on_stderr_line=ignore) as child:
        assert await told_status(child) == 1
    assert "Traceback (most recent call last):" in child.stderr_tail
    assert describe_exit("engine-0", 1, child.stderr_tail) == "engine-0 exited with status 1: ValueError: no weights"


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT, signal.SIGTERM])
async def test_a_signal_is_told_by_name(number):
    code = f"""
        {GUARD}
        import os, resource
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        os.kill(os.getpid(), {int(number)})
    """
    async with open_child("engine-0", python(code), on_stderr_line=ignore) as child:
        status = await told_status(child)
    assert describe_exit("engine-0", status) == f"engine-0 was killed by {number.name}"


async def test_a_fault_in_c_leaves_its_stack():
    code = f"{GUARD} import ctypes, faulthandler; faulthandler.enable(); ctypes.string_at(0)"
    async with open_child("engine-0", python(code), on_stderr_line=ignore) as child:
        assert await told_status(child) == -signal.SIGSEGV
    assert any("Segmentation fault" in line for line in child.stderr_tail)


async def test_a_child_that_has_closed_its_output_is_told_of_too():
    code = f"{GUARD} import os, signal; print('bye', flush=True); os.close(1); os.close(2); os._exit(5)"
    async with open_child("engine-0", python(code), on_stderr_line=ignore) as child:
        assert await told_status(child) == 5
    assert child.stderr_tail == ["bye"]


async def test_one_that_closed_its_output_and_lives_is_not_taken_for_dead():
    code = f"{GUARD} import os, signal; os.close(1); os.close(2); signal.pause()"
    async with open_child("engine-0", python(code), on_stderr_line=ignore) as child:
        await child._output.ended.wait()
        assert child.returncode is None
        child.signal(signal.SIGKILL)
        assert await told_status(child) == -signal.SIGKILL


async def test_the_last_words_after_a_flood_are_the_last():
    code = f"""
        {GUARD}
        import sys
        for number in range(30_000):
            print("flood", number, file=sys.stderr)
        raise ValueError("drowned")
    """
    num_lines = 0

    def count(line: str) -> None:
        nonlocal num_lines
        num_lines += 1

    async with open_child("engine-0", python(code), on_stderr_line=count) as child:
        assert await told_status(child) == 1
    assert child.stderr_tail[-1] == "ValueError: drowned"
    assert len(child.stderr_tail) == MAX_TAIL_LINES
    assert num_lines > 30_000


@pytest.mark.parametrize("detached", [False, True], ids=["of its group", "of a session of its own"])
async def test_a_grandchild_that_holds_and_floods_the_output_delays_nothing(detached):
    flood = "while True: print('x' * 100, flush=True)"
    code = f"""
        {GUARD}
        import os, subprocess, sys
        grandchild = subprocess.Popen([sys.executable, "-c", "{flood}"], start_new_session={detached})
        os.write(2, f"grandchild {{grandchild.pid}}\\n".encode())
        sys.exit(7)
    """
    grandchildren: list[int] = []

    def note(line: str) -> None:
        if line.startswith("grandchild"):
            grandchildren.append(int(line.split()[1]))

    with trio.fail_after(20):
        async with open_child("engine-0", python(code), on_stderr_line=note) as child:
            assert await told_status(child) == 7
            if detached:  # nobody could: it left the group on purpose
                os.kill(grandchildren[0], signal.SIGKILL)
