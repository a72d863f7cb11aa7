"""Standard error for a process that must not stop where nobody reads it: what is not taken is lost, and counted."""

from __future__ import annotations

import contextlib
import os
import select
import sys
from typing import TextIO

PATIENCE_MS = 50
"""How long a reader who took all so far is waited for; one who did not is not."""


class StandardError:
    """A stream for logs, whatever `sys.stderr` is at the time; never closed."""

    def __init__(self) -> None:
        """Begin with nothing lost."""
        self._num_lost = 0

    def write(self, text: str) -> None:
        """Write `text`, whole lines, or lose what is not taken now; a lost terminal is no reason to end.

        Once something is taken again, it is told first how often something was lost.
        """
        with contextlib.suppress(OSError, ValueError, AttributeError):  # it is gone or full; closed; or there is none
            told = f"standard error took nothing {self._num_lost} times: lines were lost\n" if self._num_lost else ""
            if self._write_all(sys.stderr, told + text):
                self._num_lost = 0
            else:
                self._num_lost += 1

    def flush(self) -> None:
        """Do nothing: what is written is written."""

    def _write_all(self, stream: TextIO, text: str) -> bool:
        try:
            descriptor = stream.fileno()
        except (OSError, ValueError):  # memory, which takes everything
            stream.write(text)
            return True
        # Past the stream's own buffer, which a signal handler must not enter while others are in it.
        rest = memoryview(text.encode(errors="backslashreplace"))
        poll = select.poll()
        poll.register(descriptor, select.POLLOUT)
        while rest:
            if not poll.poll(0 if self._num_lost else PATIENCE_MS):
                return False
            rest = rest[os.write(descriptor, rest[: select.PIPE_BUF]) :]  # as much as a pipe that is ready takes
        return True


standard_error = StandardError()
"""This process's."""


def write_to_stderr(line: str) -> None:
    """Write a line to this process's standard error, without waiting for who reads it."""
    standard_error.write(line + "\n")
