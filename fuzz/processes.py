"""What can be seen of processes from outside: who descends from whom, what they hold, which signals they take."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path

import trio


def children(pid: int) -> list[int]:
    """Return the children of a process, dead ones that nobody has waited for included; of a process gone, none."""
    found: list[int] = []
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            found += map(int, (task / "children").read_text().split())
    return found


def descendants(pid: int) -> list[int]:
    """Return children, their children, and so on."""
    found = children(pid)
    return found + [further for child in found for further in descendants(child)]


def command_of(pid: int) -> list[str]:
    """Return a process's command line; of a process gone, an empty one."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return []


def takes_signal(pid: int, number: int, field: str = "SigCgt") -> bool:
    """Return whether the process has a handler for the signal, or with field SigIgn, ignores it."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith(field):
                return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    return False


def files_of(pids: Collection[int]) -> set[str]:
    """Return what these processes have beside themselves: paths of unix sockets and of shared memory."""
    paths = sockets_of(pids)
    for pid in pids:
        with contextlib.suppress(OSError):
            maps = Path(f"/proc/{pid}/maps").read_text().splitlines()
            paths |= {line.split()[-1] for line in maps if "/dev/shm/" in line}
    return paths


def sockets_of(pids: Collection[int]) -> set[str]:
    """Return the paths of these processes' unix sockets."""
    inodes: set[str] = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            for descriptor in Path(f"/proc/{pid}/fd").iterdir():
                with contextlib.suppress(OSError):
                    inodes.add(os.readlink(descriptor).removeprefix("socket:[").removesuffix("]"))
    lines = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:]]
    return {line[7] for line in lines if len(line) > 7 and line[6] in inodes and line[7].startswith("/")}


def send(pid: int, number: int) -> None:
    """Send a signal; nothing happens to a process that is gone."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


class Watched:
    """Processes whose ends can be waited for, whoever their parent is; they cannot be mistaken for later ones.

    Attributes:
        pids: Of those that were alive at the beginning.
    """

    def __init__(self, pids: Iterable[int]) -> None:
        """Watch the living ones of `pids`; close it in the end."""
        self._pidfds: dict[int, int] = {}
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                self._pidfds[pid] = os.pidfd_open(pid)
        self.pids = list(self._pidfds)

    def close(self) -> None:
        """Close the descriptors."""
        for pidfd in self._pidfds.values():
            os.close(pidfd)

    async def wait(self, pid: int) -> None:
        """Wait for the end of one."""
        if pid in self._pidfds:
            await trio.lowlevel.wait_readable(self._pidfds[pid])

    async def check_ended(self, timeout_s: float) -> None:
        """Wait for the end of all.

        Raises:
            AssertionError: One is left after `timeout_s` seconds; it is killed.
        """
        left = list(self.pids)
        with trio.move_on_after(timeout_s):
            while left:
                await self.wait(left[0])
                del left[0]
        for pid in left:
            said = " ".join(command_of(pid))
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfds[pid], signal.SIGKILL)
            raise AssertionError(f"process {pid} is left {timeout_s:g} s after the end of its front: {said}")


@contextlib.contextmanager
def watching(pids: Iterable[int]) -> Iterator[Watched]:
    """Watch processes during the block."""
    watched = Watched(pids)
    try:
        yield watched
    finally:
        watched.close()
