"""Standard input and output for a Trio program: waited for as descriptors, without a thread and without blocking.

The terminal's own line editing serves: a line reaches us when it is ended. Descriptors are left in blocking mode, for
they are shared with the shell; each read and write follows a wait, and is small enough not to block.
"""

from __future__ import annotations

import os
import select
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

from trio.lowlevel import checkpoint, wait_readable, wait_writable

MAX_WRITE_BYTES = select.PIPE_BUF
"""What a writable pipe takes without blocking."""
STANDARD_OUTPUT = "standard output"
"""The `filename` of an error that says that it takes nothing."""


class LineReader:
    """Lines that come in at a descriptor; for one task."""

    def __init__(self, descriptor: int) -> None:
        """Read from `descriptor`, which stays its owner's to close."""
        self._descriptor = descriptor
        self._wait = _waiter(descriptor, wait_readable)
        self._rest = b""

    async def receive(self) -> str | None:
        """Wait for a line and return it without its end; None when there are no more. A cancelled wait takes none."""
        while b"\n" not in self._rest:
            await self._wait()
            chunk = os.read(self._descriptor, 1 << 16)
            if not chunk:
                last, self._rest = self._rest, b""
                return last.decode(errors="replace") if last else None
            self._rest += chunk
        line, _, self._rest = self._rest.partition(b"\n")
        return line.removesuffix(b"\r").decode(errors="replace")


class TextWriter:
    """Text that goes out at a descriptor; for one task."""

    def __init__(self, descriptor: int) -> None:
        """Write to `descriptor`, which stays its owner's to close."""
        self._descriptor = descriptor
        self._wait = _waiter(descriptor, wait_writable)

    async def send(self, text: str) -> None:
        """Write `text`; a slow reader is waited for, and a cancelled call may have written a part.

        Raises:
            BrokenPipeError: The reader has gone.
            OSError: It takes nothing; `filename` says that it is standard output.
        """
        rest = memoryview(text.encode(errors="replace"))
        while rest:
            await self._wait()
            with _telling_where():
                rest = rest[os.write(self._descriptor, rest[:MAX_WRITE_BYTES]) :]


def show(text: str) -> None:
    """Write `text` to standard output, at once; raises as `TextWriter.send` does."""
    with _telling_where():
        print(text, end="", flush=True)


@contextmanager
def _telling_where() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, STANDARD_OUTPUT) from error


def _waiter(descriptor: int, wait: Callable[[int], Awaitable[None]]) -> Callable[[], Awaitable[None]]:
    """Return how to wait for `descriptor`: files and /dev/null are always ready, and epoll refuses them."""
    if hasattr(select, "epoll"):
        with select.epoll() as poll:
            try:
                poll.register(descriptor, select.EPOLLIN)
            except PermissionError:
                return checkpoint

    async def wait_ready() -> None:
        await wait(descriptor)

    return wait_ready


async def read_all(descriptor: int) -> bytes:
    """Wait for all that comes in at `descriptor` until its end."""
    wait = _waiter(descriptor, wait_readable)
    parts: list[bytes] = []
    while True:
        await wait()
        part = os.read(descriptor, 1 << 16)
        if not part:
            return b"".join(parts)
        parts.append(part)
