"""What a process writes, as lines: cut where they do not end, so that what is kept stays small."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

MAX_TAIL_LINES = 50
"""How many of the last lines are kept."""
MAX_LINE_BYTES = 1 << 16
"""A longer line is cut, if not sooner than this."""


class LineSplitter:
    """Splits the output of one process into lines; for one thread.

    Attributes:
        tail: The last lines.
    """

    def __init__(self, on_line: Callable[[str], None]) -> None:
        """Call `on_line`, which must not raise, with each line, without its end."""
        self.tail: deque[str] = deque(maxlen=MAX_TAIL_LINES)
        self._on_line = on_line
        self._rest = b""

    def feed(self, chunk: bytes) -> None:
        """Pass on the lines that `chunk` ends; chunks of up to `MAX_LINE_BYTES` cost time in proportion."""
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        for line in lines:
            self._pass_on(line)
        if len(self._rest) >= MAX_LINE_BYTES:
            self.flush()

    def flush(self) -> None:
        """Pass on what was not ended, if anything."""
        line, self._rest = self._rest, b""
        if line:
            self._pass_on(line)

    def _pass_on(self, raw: bytes) -> None:
        line = raw.decode(errors="replace").rstrip("\r")
        self.tail.append(line)
        self._on_line(line)
