from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest
import trio
import trio.testing

from transport import process as process_module
from transport.lines import MAX_LINE_BYTES
from transport.process import child_guard, describe_exit, open_child

GUARD = "from transport.process import child_guard; child_guard();"
WAIT = "import signal; signal.pause()"


def python(code: str) -> list[str]:
    return [sys.executable, "-c", textwrap.dedent(code)]


def children_of(pid: int) -> list[int]:
    tasks = Path(f"/proc/{pid}/task")
    return [int(child) for task in tasks.iterdir() for child in (task / "children").read_text().split()]


def blocked_by(pid: int) -> set[int]:
    """The signals that a process does not hear."""
    status = Path(f"/proc/{pid}/status").read_text()
    blocked = int(status.partition("SigBlk:")[2].split()[0], 16)
    return {number for number in signal.valid_signals() if blocked >> (number - 1) & 1}


def start_plainly(argv: list[str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(argv, stdout=subprocess.PIPE)


class Lines:
    """Collects a child's lines; tasks may wait for one."""

    def __init__(self) -> None:
        self._send, self._receive = trio.open_memory_channel[str](1000)

    def __call__(self, line: str) -> None:
        self._send.send_nowait(line)

    async def next(self) -> str:
        return await self._receive.receive()


class Watched:
    """A process of unknown parentage, whose death is waited for."""

    def __init__(self, pid: int) -> None:
        self.pidfd = os.pidfd_open(pid)

    async def died(self) -> None:
        await trio.lowlevel.wait_readable(self.pidfd)

    def close(self) -> None:
        os.close(self.pidfd)


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGUSR2])
async def test_a_child_that_is_asked_what_it_does_before_its_first_line_lives(number):
    code = f"{GUARD} import signal; print(signal.pthread_sigmask(signal.SIG_BLOCK, []), flush=True)"
    lines = Lines()
    with trio.fail_after(10):
        async with open_child("engine-0", python(code), on_stderr_line=lines) as child:
            child.signal(number)
            assert await child.wait() == 0
            assert await lines.next() == "set()"
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, []) & {number}


async def test_a_reaper_is_deaf_from_its_first_moment_on():
    """Its interpreter's start, before the first line of its own, included."""
    numbers = {signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2}
    async with open_child("engine-0", python(WAIT)) as child:
        (reaper_pid,) = set(children_of(os.getpid())) - {child.pid}
        assert numbers <= blocked_by(reaper_pid)
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, []) & numbers


async def test_the_death_of_a_reaper_is_told_and_ends_nothing(monkeypatch):
    lines = Lines()
    monkeypatch.setattr(process_module.logger, "warning", lambda text, *values: lines(text % values))
    async with open_child("engine-0", python(WAIT)) as child:
        (reaper_pid,) = set(children_of(os.getpid())) - {child.pid}
        os.kill(reaper_pid, signal.SIGKILL)
        with trio.fail_after(5):
            assert (await lines.next()).startswith("the reaper of engine-0 was killed by SIGKILL: ")
        assert child.returncode is None


async def test_a_child_that_ends_by_itself_tells_every_waiter_its_status_and_last_words():
    code = "import sys; print('on stdout', flush=True); print('last words', file=sys.stderr); sys.exit(3)"
    lines = Lines()
    returncodes = []
    with trio.fail_after(10):
        async with open_child("engine-0", python(code), on_stderr_line=lines) as child:

            async def wait():
                returncodes.append(await child.wait())

            async with trio.open_nursery() as nursery:
                for _ in range(3):
                    nursery.start_soon(wait)
            assert returncodes == [3, 3, 3]
            assert child.returncode == 3
            assert child.stderr_tail == ["on stdout", "last words"]
            assert describe_exit(child.name, child.returncode, child.stderr_tail) == (
                "engine-0 exited with status 3: last words"
            )
            assert [await lines.next(), await lines.next()] == ["on stdout", "last words"]
            child.signal(signal.SIGKILL)
        assert await child.wait() == 3


async def test_a_killed_child_is_noticed_by_all_waiters_within_a_second():
    async with open_child("engine-0", python(WAIT)) as child:
        with trio.fail_after(1):
            async with trio.open_nursery() as nursery:
                for _ in range(3):
                    nursery.start_soon(child.wait)
                child.signal(signal.SIGKILL)
        assert child.returncode == -signal.SIGKILL
        assert describe_exit("engine-0", child.returncode, ["not its fault"]) == "engine-0 was killed by SIGKILL"


async def test_leaving_ends_child_grandchild_reaper_and_descriptors():
    lines = Lines()
    code = f"""
        import subprocess, sys
        {GUARD}
        grandchild = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
        print(grandchild.pid, flush=True)
        import signal; signal.pause()
    """
    before = set(os.listdir("/proc/self/fd"))
    with trio.fail_after(10):
        async with open_child("engine-0", python(code), on_stderr_line=lines) as child:
            grandchild = Watched(int(await lines.next()))
            assert len(children_of(os.getpid())) == 2
        assert child.returncode == -signal.SIGTERM
        await grandchild.died()
        grandchild.close()
    assert children_of(os.getpid()) == []
    assert set(os.listdir("/proc/self/fd")) == before


async def test_leaving_kills_what_a_dead_child_left_in_its_group():
    lines = Lines()
    code = """
        import subprocess, sys
        print(subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"]).pid, flush=True)
        print("last words", end="")
    """
    with trio.fail_after(10):
        async with open_child("engine-0", python(code), on_stderr_line=lines) as child:
            straggler = Watched(int(await lines.next()))
            assert await child.wait() == 0
            assert child.stderr_tail[1:] == ["last words"]
        await straggler.died()
        straggler.close()


async def test_a_child_that_ignores_sigterm_is_killed_after_the_grace_even_when_cancelled():
    code = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); signal.pause()"
    lines = Lines()
    with trio.fail_after(10), trio.CancelScope() as scope:
        async with open_child("engine-0", python(code), term_grace_s=0.1, on_stderr_line=lines) as child:
            assert await lines.next() == "up"
            scope.cancel()
            await trio.sleep_forever()
    assert scope.cancelled_caught
    assert child.returncode == -signal.SIGKILL


async def test_what_the_block_raises_comes_out_as_itself():
    with pytest.raises(ZeroDivisionError):
        async with open_child("engine-0", python(WAIT)):
            raise ZeroDivisionError
    assert children_of(os.getpid()) == []


async def test_a_callback_that_raises_ends_the_block_and_the_child():
    def fail(line):
        raise ZeroDivisionError

    with trio.fail_after(10), pytest.RaisesGroup(ZeroDivisionError, flatten_subgroups=True):
        async with open_child("engine-0", python("print('up', flush=True);" + WAIT), on_stderr_line=fail):
            await trio.sleep_forever()
    assert children_of(os.getpid()) == []


async def test_a_program_that_does_not_exist_is_an_os_error_that_leaves_nothing():
    before = set(os.listdir("/proc/self/fd"))
    with pytest.raises(FileNotFoundError):
        async with open_child("engine-0", ["/nonexistent/program"]):
            pass
    assert set(os.listdir("/proc/self/fd")) == before


async def test_the_tail_keeps_the_last_fifty_lines_and_cuts_endless_ones():
    code = f"for i in range(60): print(i)\nprint('x' * {3 * MAX_LINE_BYTES}, end='')"
    lines = Lines()
    with trio.fail_after(10):
        async with open_child("engine-0", python(code), on_stderr_line=lines) as child:
            await child.wait()
        assert [await lines.next() for _ in range(60)] == [str(i) for i in range(60)]
    tail = child.stderr_tail
    assert len(tail) == 50
    first_cut = tail.index("59") + 1
    assert tail[:first_cut] == [str(i) for i in range(60 - first_cut, 60)]
    assert "".join(tail[first_cut:]) == "x" * (3 * MAX_LINE_BYTES)
    assert all(len(line) < 2 * MAX_LINE_BYTES for line in tail)


async def test_lines_go_to_stderr_unless_somebody_takes_them(capsys):
    with trio.fail_after(10):
        async with open_child("engine-0", python("print('for people')")) as child:
            await child.wait()
    assert capsys.readouterr().err == "for people\n"


async def test_the_child_gets_the_environment_its_own_group_and_no_input():
    code = f"""
        {GUARD}
        import os, sys
        leads = os.getpgid(0) == os.getpid()
        print(os.environ["COLOUR"], "TRANSPORT_PARENT" in os.environ, leads, sys.stdin.read() == "")
    """
    with trio.fail_after(10):
        async with open_child("engine-0", python(code), env={"COLOUR": "red"}) as child:
            assert await child.wait() == 0
    assert child.stderr_tail == ["red False True True"]


async def test_the_child_is_started_by_the_main_thread(monkeypatch):
    threads = []
    popen = subprocess.Popen

    def record(*args, **kwargs):
        threads.append(threading.current_thread())
        return popen(*args, **kwargs)

    monkeypatch.setattr(process_module.subprocess, "Popen", record)
    async with open_child("engine-0", python(WAIT)):
        pass
    assert threads == [threading.main_thread()] * 2


async def test_opening_from_another_thread_is_refused():
    async def open_one():
        async with open_child("engine-0", python(WAIT)):
            pass

    with pytest.raises(RuntimeError, match="engine-0 must be opened from the main thread"):
        await trio.to_thread.run_sync(trio.run, open_one)


def test_the_guard_is_refused_in_a_process_that_nobody_opened():
    with pytest.raises(RuntimeError, match="open_child"):
        child_guard()


async def test_a_thread_waits_where_there_is_no_pidfd(monkeypatch):
    monkeypatch.delattr(os, "pidfd_open", raising=False)
    with trio.fail_after(10):
        async with open_child("engine-0", python("raise SystemExit(4)")) as child:
            assert await child.wait() == 4
        async with open_child("engine-1", python(WAIT)) as child:
            pass
        assert child.returncode == -signal.SIGTERM


PARENT = """
import sys, trio
from transport.process import open_child

async def main():
    argv = [sys.executable, "-c", {child!r}]
    async with open_child("engine-0", argv, on_stderr_line=lambda line: print(line, flush=True)):
        await trio.sleep_forever()

trio.run(main)
"""
CHILD = """
{guard}
import ctypes, os, subprocess, sys
grandchild = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
print(os.getpid(), grandchild.pid, os.getppid(), flush=True)
{then}
"""


@pytest.mark.parametrize(
    ("guard", "then"),
    [(GUARD, WAIT), (GUARD, "ctypes.PyDLL(None).sleep(60)"), ("", WAIT)],
    ids=["guarded", "stuck in C holding the GIL", "unguarded"],
)
async def test_a_killed_parent_takes_child_and_grandchild_along(guard, then):
    child = CHILD.format(guard=guard, then=then)
    parent = start_plainly(python(PARENT.format(child=child)))
    try:
        with trio.fail_after(10):
            line = await trio.to_thread.run_sync(parent.stdout.readline)
            watched = [Watched(int(pid)) for pid in line.split()[:2]]
            watched += [Watched(pid) for pid in children_of(parent.pid)]
            assert len(watched) == 4  # child, grandchild, child again, reaper
            parent.kill()
            for process in watched:
                await process.died()
                process.close()
    finally:
        parent.kill()
        parent.wait()
        parent.stdout.close()


async def test_a_guarded_child_dies_with_its_parent_without_a_reaper_even_stuck_in_c():
    child = CHILD.format(guard=GUARD, then="ctypes.PyDLL(None).sleep(60)")
    parent = start_plainly(python(PARENT.format(child=child)))
    try:
        with trio.fail_after(10):
            line = await trio.to_thread.run_sync(parent.stdout.readline)
            child_pid, grandchild_pid, _ = map(int, line.split())
            (reaper_pid,) = set(children_of(parent.pid)) - {child_pid}
            child = Watched(child_pid)
            os.kill(reaper_pid, signal.SIGKILL)
            parent.kill()
            await child.died()
            child.close()
    finally:
        parent.kill()
        parent.wait()
        parent.stdout.close()
        os.kill(grandchild_pid, signal.SIGKILL)


@pytest.mark.parametrize(
    ("returncode", "tail", "said"),
    [
        (0, [], "engine-0 exited with status 0"),
        (1, ["Traceback", "ValueError: no", "  "], "engine-0 exited with status 1: ValueError: no"),
        (-11, ["x"], "engine-0 was killed by SIGSEGV"),
        (-50, [], "engine-0 was killed by signal 50"),
    ],
)
def test_an_exit_is_described_in_one_line(returncode, tail, said):
    assert describe_exit("engine-0", returncode, tail) == said
