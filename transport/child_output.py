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

from transport.lines import MAX_LINE_BYTES, LineSplitter

_FALLOC_FL_PUNCH_HOLE_KEEP_SIZE = 0x03


class ChildOutput:
    """The output of one child; for one thread. Closed by whoever opened it."""

    def __init__(self, on_line: Callable[[str], None]) -> None:
        """Open an empty file; `on_line` gets each line and must not raise."""
        self._file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115 (owned until `close`)
        self._lines = LineSplitter(on_line)
        self._num_read = 0

    @property
    def tail(self) -> deque[str]:
        """The last lines."""
        return self._lines.tail

    def fileno(self) -> int:
        """Return the descriptor that the child writes to."""
        return self._file.fileno()

    def pass_on(self, *, is_last: bool = False) -> None:
        """Pass on the lines that are new; with `is_last`, when the child is dead, also one that was not ended."""
        began = self._num_read
        while chunk := os.pread(self._file.fileno(), MAX_LINE_BYTES, self._num_read):
            self._num_read += len(chunk)
            self._lines.feed(chunk)
        if self._num_read > began:
            _give_back(self._file.fileno(), self._num_read)
        if is_last:
            self._lines.flush()

    def close(self) -> None:
        """Close the file; it is gone once the child is. Idempotent."""
        self._file.close()


def _give_back(descriptor: int, size_bytes: int) -> None:
    """Free the first `size_bytes` of a file, which read as zeros then; where the system cannot, nothing happens."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            ctypes.CDLL(None).fallocate64(
                descriptor, _FALLOC_FL_PUNCH_HOLE_KEEP_SIZE, ctypes.c_int64(0), ctypes.c_int64(size_bytes)
            )
