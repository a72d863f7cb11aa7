"""Ctrl-C held back for as long as something must not be left half done.

Python runs signal handlers between any two bytecodes of the main thread (and inside of calls such as a receive, which
then loses what it had), and KeyboardInterrupt may come out of each. What moves a message from a socket to where it is
kept, or a step's result into the core, is done in one `InterruptsHeld` block: an interrupt is noted, and comes when the
block is left. Waiting and computing are done outside, so nobody notices more than microseconds.
"""

from __future__ import annotations

# What `signal` wraps in enums, at ten times the cost: too much for every step.
import _signal  # type: ignore[import-not-found]
import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

_Handler = Callable[[int, FrameType | None], Any]
_SIGINT = int(signal.SIGINT)


class InterruptsHeld:
    """A block that SIGINT's handler does not interrupt. Blocks may be nested; other threads are never interrupted."""

    def __init__(self) -> None:
        """Hold nothing before the block is entered."""
        self._handler: _Handler | None = None
        self._is_noted = False

    def __enter__(self) -> None:
        """Hold interrupts back; one that comes before is raised here, and then nothing is held."""
        if threading.get_ident() != threading.main_thread().ident:
            return
        handler = _signal.getsignal(_SIGINT)
        if callable(handler):  # else Python does not handle it, so nothing can be raised
            self._handler = handler
            _signal.signal(_SIGINT, self._note)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        """Let go; what came meanwhile comes now."""
        if self._handler is not None:
            _signal.signal(_SIGINT, self._handler)
            if self._is_noted:
                signal.raise_signal(signal.SIGINT)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._is_noted = True
