"""What a child process writes, for a parent that reads it only when it has time: a file that nobody fills up.

A pipe would stop the child once it is full; the child writes to a file of no name, its parent passes on what is new
whenever it looks, and what was passed on is given back to the system. After the child's death the last words are there.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
import tempfile
from collections import deque
from collections.abc import Callable

MAX_TAIL_LINES = 50
"""How many of the last lines are kept."""
READ_SIZE_BYTES = 1 << 16

_FALLOC_FL_PUNCH_HOLE_KEEP_SIZE = 0x03


class ChildOutput:
    """The output of one child; for one thread. Closed by whoever opened it."""

    def __init__(self, on_line: Callable[[str], None]) -> None:
        """Open an empty file; `on_line` gets each line and must not raise."""
        self.tail: deque[str] = deque(maxlen=MAX_TAIL_LINES)
        self._file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115 (owned until `close`)
        self._on_line = on_line
        self._num_read = 0
        self._rest = b""

    def fileno(self) -> int:
        """Return the descriptor that the child writes to."""
        return self._file.fileno()

    def pass_on(self, *, is_last: bool = False) -> None:
        """Pass on the lines that are new; with `is_last`, when the child is dead, also one that was not ended."""
        began = self._num_read
        while chunk := os.pread(self._file.fileno(), READ_SIZE_BYTES, self._num_read):
            self._num_read += len(chunk)
            *lines, self._rest = (self._rest + chunk).split(b"\n")
            for line in lines:
                self._pass_on(line)
        if self._num_read > began:
            _give_back(self._file.fileno(), self._num_read)
        if is_last and self._rest:
            self._pass_on(self._rest)
            self._rest = b""

    def close(self) -> None:
        """Close the file; it is gone once the child is. Idempotent."""
        self._file.close()

    def _pass_on(self, raw: bytes) -> None:
        line = raw.decode(errors="replace").rstrip("\r")
        self.tail.append(line)
        self._on_line(line)


def _give_back(descriptor: int, size_bytes: int) -> None:
    """Free the first `size_bytes` of a file, which read as zeros then; where the system cannot, nothing happens."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            ctypes.CDLL(None).fallocate64(
                descriptor, _FALLOC_FL_PUNCH_HOLE_KEEP_SIZE, ctypes.c_int64(0), ctypes.c_int64(size_bytes)
            )
