"""A child process owned by an `async with`: it never outlives the block, nor the process that opened it.

::

    parent ──pipe── child            parent dies: PDEATHSIG kills the child at once, even stuck in C;
       │   └─────── reaper            the reaper, in a session of its own, kills the child's whole group
       └──pidfd, output── child      child dies: `Child.wait` returns, with the last lines it wrote

Child and reaper are started as `spawn.py` says, not by Trio's own process functions: those start theirs in a pool
thread that ends when idle, and PDEATHSIG belongs to the thread. The child's first line is `child_guard()`.
Linux first; elsewhere a thread waits for the child and only the pipe tells it of its parent's death.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import threading
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager

import trio
from trio.lowlevel import wait_readable

from transport.lines import MAX_LINE_BYTES, LineSplitter
from transport.spawn import KILL_GRACE_S, returncode_of_zombie, signal_group, start_child
from transport.spawn import child_guard as child_guard
from transport.spawn import describe_exit as describe_exit
from transport.standard_error import write_to_stderr

logger = logging.getLogger(__name__)
teardown = logging.getLogger("teardown")


class Child:
    """A running or ended child process; made by `open_child`.

    Attributes:
        name: What messages call it.
        pid: Its process id, which is its process group's too.
        returncode: None while it runs; then its exit status, or minus the signal that killed it.
    """

    def __init__(self, name: str, process: subprocess.Popen[bytes], on_line: Callable[[str], None]) -> None:
        """Stand for `process`, which stays `open_child`'s to reap and close."""
        assert process.stdout is not None
        self.name = name
        self.pid = process.pid
        self.returncode: int | None = None
        self._process = process
        self._output = _OutputReader(process.stdout.fileno(), on_line)
        self._exited = trio.Event()

    @property
    def stderr_tail(self) -> list[str]:
        """The last lines it wrote to stderr or stdout; once `wait` has returned, its last words are among them."""
        return list(self._output.lines.tail)

    async def wait(self) -> int:
        """Wait for its end and return `returncode`; any number of tasks may wait."""
        await self._exited.wait()
        assert self.returncode is not None
        return self.returncode

    def signal(self, number: int) -> None:
        """Send signal `number` to the child, not to its group; nothing happens once it has ended."""
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)  # Popen.send_signal would reap a zombie

    async def _attend(self) -> None:
        """Pass its output on and notice its end; may be cancelled and called again."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._output.pump)
            if self.returncode is None:
                self.returncode = await _wait_for_exit(self._process)
                self._output.read_last()
                self._exited.set()

    async def _end(self, term_grace_s: float) -> None:
        """Stop the group: ask, wait, kill; then wait until nobody holds the output. Bounded by the grace times."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._attend)
            for number, grace_s in ((signal.SIGTERM, term_grace_s), (signal.SIGKILL, KILL_GRACE_S)):
                if self.returncode is None:
                    signal_group(self.pid, number)
                    with trio.move_on_after(grace_s):
                        await self._exited.wait()
            signal_group(self.pid, signal.SIGKILL)
            with trio.move_on_after(KILL_GRACE_S):
                await self._output.ended.wait()
            nursery.cancel_scope.cancel()


@asynccontextmanager
async def open_child(
    name: str,
    argv: Sequence[str],
    *,
    env: Mapping[str, str] | None = None,
    term_grace_s: float = 5.0,
    on_stderr_line: Callable[[str], None] = write_to_stderr,
    orphaned_folders: Sequence[str] = (),
    pass_fds: Sequence[int] = (),
) -> AsyncIterator[Child]:
    """Start `argv` in a process group of its own; leaving the block ends the group, and nothing of it is left.

    Leaving sends SIGTERM to the group, waits up to `term_grace_s` seconds, and kills what remains; shielded from
    cancellation. A child that should end by itself is asked to, and waited for, before. Its end inside the block
    raises nothing: race `Child.wait` and say with `describe_exit` what happened.

    Args:
        name: What messages call the child.
        argv: Program and arguments; the program calls `child_guard()` first.
        env: Added to this process's environment.
        term_grace_s: Seconds between SIGTERM and SIGKILL.
        on_stderr_line: Called with each line the child writes to stderr or stdout; must not raise.
        orphaned_folders: The reaper removes them with all they hold, should this process be killed.
        pass_fds: Descriptors that the child inherits under the same numbers; the caller's to close.

    Raises:
        RuntimeError: Not called from the main thread.
        OSError: The program cannot be started.
    """
    if threading.current_thread() is not threading.main_thread():
        raise RuntimeError(f"{name} must be opened from the main thread: a child dies with the thread that started it")
    failure: BaseException | None = None
    with contextlib.ExitStack() as stack:
        process, reaper = start_child(stack, argv, env or {}, orphaned_folders, pass_fds=pass_fds)
        child = Child(name, process, on_stderr_line)
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(child._attend)
                nursery.start_soon(_tell_death, name, reaper)
                try:
                    yield child
                except BaseException as error:  # raised below: the nursery would wrap it in a group
                    failure = error
                nursery.cancel_scope.cancel()
        finally:
            with trio.CancelScope(shield=True):
                await child._end(term_grace_s)
            teardown.debug("%s ended", name)
    if failure is not None:
        raise failure


class _OutputReader:
    """Passes on what comes out of a pipe, line by line."""

    def __init__(self, fd: int, on_line: Callable[[str], None]) -> None:
        os.set_blocking(fd, False)
        self.lines = LineSplitter(on_line)
        self.ended = trio.Event()
        self._fd = fd

    async def pump(self) -> None:
        """Pass lines on until all writers have closed the pipe."""
        while not self.ended.is_set():
            await wait_readable(self._fd)
            self._read()

    def read_last(self) -> None:
        """Take what a dead child left in the pipe, which others of its group may hold open."""
        self._read()
        self.lines.flush()

    def _read(self) -> None:
        try:
            chunk = os.read(self._fd, MAX_LINE_BYTES)  # a pipe's capacity: all that a dead child has written
        except BlockingIOError:
            return
        if chunk:
            self.lines.feed(chunk)
        else:
            self.ended.set()
            self.lines.flush()


async def _tell_death(name: str, reaper: subprocess.Popen[bytes]) -> None:
    """Log that `reaper` is no more: whatever it would have done is left undone."""
    status = await _wait_for_exit(reaper)
    logger.warning(
        "%s: should this process be killed, what the child leaves behind stays",
        describe_exit(f"the reaper of {name}", status),
    )


async def _wait_for_exit(process: subprocess.Popen[bytes]) -> int:
    """Wait for the end of `process` and return its returncode; where the system can, it stays a zombie."""
    try:
        pidfd = os.pidfd_open(process.pid)
    except (AttributeError, OSError):  # not Linux, or forbidden by a sandbox
        return await trio.to_thread.run_sync(process.wait, abandon_on_cancel=True)
    try:
        await wait_readable(pidfd)
    finally:
        os.close(pidfd)
    return returncode_of_zombie(process.pid)
