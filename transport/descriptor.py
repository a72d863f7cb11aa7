"""Many tasks wait on one file descriptor, which Trio itself allows to one task only.

One waiter, the leader, sleeps in `wait_readable`; the others, the followers, park. Whoever leads wakes the followers
on leaving, in whatever way it leaves, so that leadership is inherited and no wake-up is lost. Waiting may end early:
callers re-check what they wait for, in a loop.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable

import trio
from trio.lowlevel import ParkingLot, notify_closing, wait_readable

_RING = (1).to_bytes(8, sys.byteorder)
"""What an eventfd wants written: an eight byte integer."""


class Descriptor:
    """A file descriptor that any number of tasks of one Trio loop may wait on; it does not own the number."""

    def __init__(self, fd: int, clear: Callable[[], None] | None = None) -> None:
        """Wait on `fd`; `clear` makes it unreadable again and is called each time it was seen readable.

        Clearing happens before any waiter runs again. A waiter that cleared by itself, later, could swallow the
        wake-up of another that has re-checked meanwhile and sleeps again.
        """
        self._fd = fd
        self._clear = clear
        self._leader: trio.CancelScope | None = None
        self._followers = ParkingLot()

    async def wait(self) -> None:
        """Wait until the descriptor is readable or `wake` is called; may return early.

        Raises:
            trio.ClosedResourceError: `close` was called meanwhile.
        """
        if self._leader is not None:
            await self._followers.park()
            return
        with trio.CancelScope() as self._leader:
            try:
                await wait_readable(self._fd)
                if self._clear is not None:
                    self._clear()
            finally:
                self._leader = None
                self._followers.unpark_all()

    def wake(self) -> None:
        """Make every task in `wait` return; call it from the Trio loop."""
        if self._leader is not None:
            self._leader.cancel()
        self._followers.unpark_all()

    def close(self) -> None:
        """End every `wait`; call it before the number is closed. Idempotent."""
        if self._leader is not None:
            notify_closing(self._fd)
        self._followers.unpark_all()


class Bell:
    """A descriptor that any thread may ring to wake the tasks of one Trio loop: an eventfd, or a pipe on macOS."""

    def __init__(self) -> None:
        """Open the descriptors, which belong to this object until `close`."""
        self._read_fd, self._write_fd = _open_bell()
        self._descriptor = Descriptor(self._read_fd, self._silence)
        self._closed = False

    def ring(self) -> None:
        """Wake all waiters, or the next one if nobody waits; callable from any thread."""
        with contextlib.suppress(BlockingIOError):  # full, hence readable: the wake-up is already there
            os.write(self._write_fd, _RING)

    async def wait(self) -> None:
        """Wait for a ring; may return early. What was done before a ring is visible after it."""
        await self._descriptor.wait()

    def _silence(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._read_fd, 4096)

    def close(self) -> None:
        """Close the descriptors; nobody may ring any more. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._descriptor.close()
        for fd in {self._read_fd, self._write_fd}:
            os.close(fd)


def _open_bell() -> tuple[int, int]:
    if hasattr(os, "eventfd"):
        fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        return fd, fd
    read_fd, write_fd = os.pipe()
    os.set_blocking(read_fd, False)
    os.set_blocking(write_fd, False)
    return read_fd, write_fd
