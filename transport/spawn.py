"""How a child process starts, is tied to its parent and ends; without Trio, for whoever waits for it.

PDEATHSIG belongs to the *thread* that started the child, and a pool's thread ends when idle; so children are started in
the main thread, which that blocks for the few milliseconds of an exec. A dead child is left a zombie until its owner
reaps it: nobody else can get its pid, nor its group's, meanwhile.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence

KILL_GRACE_S = 2.0
"""How long a killed child, and whoever of its group holds its output, may take to be gone."""

_ASKING = {signal.SIGUSR1, signal.SIGUSR2}
"""Signals that ask a process what it does."""
_UNHEARD = {signal.SIGHUP, signal.SIGINT, signal.SIGTERM, *_ASKING}
"""Signals that a reaper takes no notice of."""
_PARENT_VARIABLE = "TRANSPORT_PARENT"
_PR_SET_PDEATHSIG = 1
_REAPER = """
import os, signal, sys
os.read(0, 1)
try:
    os.killpg(int(sys.argv[1]), signal.SIGKILL)
finally:
    import shutil
    for path in sys.argv[2:]:
        shutil.rmtree(path, ignore_errors=True)
"""


def start_child(
    stack: contextlib.ExitStack,
    argv: Sequence[str],
    env: Mapping[str, str],
    orphaned_folders: Sequence[str],
    output: int = subprocess.PIPE,
    pass_fds: Sequence[int] = (),
) -> tuple[subprocess.Popen[bytes], subprocess.Popen[bytes]]:
    """Start `argv` and its reaper from the main thread; unwinding `stack` leaves no process and no descriptor of them.

    Returns the child and its reaper, which ends only if somebody kills it.

    Args:
        stack: Gets what ends them.
        argv: Program and arguments; the program calls `child_guard()` first.
        env: Added to this process's environment.
        orphaned_folders: The reaper removes them with all they hold, should this process be killed.
        output: The descriptor that takes what the child writes to stderr or stdout; a new pipe unless given.
        pass_fds: Descriptors that the child inherits under the same numbers; the caller's to close.
    """
    if signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN:  # inherited; the kernel would reap what is waited for
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    read_end, write_end = os.pipe()
    stack.callback(os.close, write_end)
    try:
        with _blocked(_ASKING):  # until its guard ignores them
            child = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                process_group=0,
                pass_fds=[read_end, *pass_fds],
                env={**os.environ, **env, _PARENT_VARIABLE: f"{os.getpid()}:{read_end}"},
            )
        stack.callback(kill_and_reap, child)
        with _blocked(_UNHEARD):  # for ever
            reaper = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _REAPER, str(child.pid), *orphaned_folders],
                stdin=read_end,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        stack.callback(kill_and_reap, reaper)
    finally:
        os.close(read_end)
    return child, reaper


@contextlib.contextmanager
def _blocked(numbers: set[signal.Signals]) -> Iterator[None]:
    """Have a process that is started here begin with these signals blocked, its interpreter's start included."""
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def child_guard() -> None:
    """Tie this process to the one that opened it: call it on the first line of the child's main.

    From its start on SIGUSR1 and SIGUSR2, which ask a process what it does, do not end one that has no answer yet; nor
    does from here on SIGINT, which may be sent to all processes of a program, and is its parent's to obey.

    On Linux the kernel kills this process when its parent's starting thread ends. Everywhere a thread waits for the
    end of the parent's pipe and then kills the whole group, grandchildren included: the one daemon thread of the
    house, for it must not keep a child alive that is done.

    Raises:
        RuntimeError: This process was not started by `open_child` or a client.
    """
    parent = os.environ.pop(_PARENT_VARIABLE, None)
    if parent is None:
        raise RuntimeError("child_guard() is for a process that open_child() started")
    for number in (signal.SIGINT, *_ASKING):
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _ASKING)
    parent_pid, pipe = map(int, parent.split(":"))
    os.set_inheritable(pipe, False)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent_pid:  # it died before the line above
        os.killpg(0, signal.SIGKILL)
    threading.Thread(target=_die_with_parent, args=(pipe,), name="parent-watch", daemon=True).start()


def describe_exit(name: str, returncode: int, stderr_tail: Sequence[str] = ()) -> str:
    """Say in one line how the process `name` ended: by which signal, or with which status and last words."""
    if returncode < 0:
        try:
            return f"{name} was killed by {signal.Signals(-returncode).name}"
        except ValueError:
            return f"{name} was killed by signal {-returncode}"
    last_words = next((f": {line.strip()}" for line in reversed(stderr_tail) if line.strip()), "")
    return f"{name} exited with status {returncode}{last_words}"


def returncode_of_zombie(pid: int) -> int:
    """Return the exit status of a dead child, or minus the signal that killed it, and leave it a zombie."""
    end = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert end is not None
    return end.si_status if end.si_code == os.CLD_EXITED else -end.si_status


def signal_group(pid: int, number: int) -> None:
    """Send signal `number` to the group that `pid` leads; nothing happens where it is gone."""
    with contextlib.suppress(ProcessLookupError, PermissionError):  # macOS forbids it where only a zombie is left
        os.killpg(pid, number)


def kill_and_reap(process: subprocess.Popen[bytes]) -> None:
    """Kill the group that `process` leads; at once where it is dead already, as after an orderly end."""
    signal_group(process.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):  # stuck in the kernel, where no signal reaches it
        process.wait(KILL_GRACE_S)
    if process.stdout is not None:
        process.stdout.close()


def _die_with_parent(pipe: int) -> None:
    os.read(pipe, 1)
    os.killpg(0, signal.SIGKILL)
