"""Interrupts for tests: after a time, or at each point at which Python could raise one."""

from __future__ import annotations

import dis
import functools
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any


@contextmanager
def alarm(act: Callable[[], None]) -> Iterator[None]:
    before = signal.signal(signal.SIGALRM, lambda *_: act())
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@contextmanager
def interrupt_after(delay_s: float) -> Iterator[None]:
    with alarm(lambda: signal.raise_signal(signal.SIGINT)):
        signal.setitimer(signal.ITIMER_REAL, delay_s)
        yield


@contextmanager
def kill_after(delay_s: float, pid: int) -> Iterator[None]:
    with alarm(lambda: os.kill(pid, signal.SIGKILL)):
        signal.setitimer(signal.ITIMER_REAL, delay_s)
        yield


_CHECKING = {"RESUME", "JUMP_BACKWARD", "CALL", "CALL_KW", "CALL_FUNCTION_EX", "CALL_INTRINSIC_1"}
"""After these the interpreter runs signal handlers."""
_ROOT = Path(__file__).parent.parent
_OURS = tuple(
    str(_ROOT / place) for place in ("engine/client", "engine/llm_engine.py", "engine/executor/null.py", "transport")
)
"""The code that is interrupted: of clients and wire, and of the forward."""


@functools.cache
def opcodes_of(code: CodeType) -> dict[int, str]:
    return {instruction.offset: instruction.opname for instruction in dis.get_instructions(code)}


class InterruptAt:
    """Raises SIGINT where the interpreter would run its handler for the n-th time in our own code."""

    def __init__(self, number: int) -> None:
        self.left = number
        self._last: dict[FrameType, str] = {}

    def __enter__(self) -> InterruptAt:
        sys.settrace(self._enter)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def _enter(self, frame: FrameType, event: str, argument: object) -> Any:
        if not frame.f_code.co_filename.startswith(_OURS):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return self._trace

    def _trace(self, frame: FrameType, event: str, argument: object) -> Any:
        if event != "opcode":
            return self._trace
        last, self._last[frame] = self._last.get(frame, "RESUME"), opcodes_of(frame.f_code)[frame.f_lasti]
        if last in _CHECKING:
            self.left -= 1
            if self.left == 0:
                sys.settrace(None)
                signal.raise_signal(signal.SIGINT)
        return self._trace
