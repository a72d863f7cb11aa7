"""A profile of steps as Chrome's trace viewer (chrome://tracing, Perfetto) reads it, whichever runner ran them.

One row has the steps from launch to commit, the other what the runner says of their parts, laid end to end. Aborts
stand at the moment at which their message was received, blocks and requests at each at which the client is told of
them. Times are those of the system's own clock, which all processes share: several engines' traces lie on one axis.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import msgspec

from engine.outputs import ModelRunnerOutput, SchedulerOutput

MAX_STEPS = 20_000
"""Steps that are kept, from the first on; about 5 MB."""
MAX_EVENTS = 10 * MAX_STEPS
"""What is kept in all, also where requests come and go and no step is made."""
_ROWS = ("steps", "runner", "aborts", "load")
_MICROSECONDS = 1e6


class StepTrace:
    """Notes steps until it is written."""

    def __init__(self, now_s: float) -> None:
        """Start with no step; `now_s` is the present moment by the clock of all times that are noted."""
        self._ahead_s = now_s - time.monotonic()
        self._events: list[dict[str, Any]] = []
        self._num_steps = 0

    def add(self, plan: SchedulerOutput, output: ModelRunnerOutput, launched_s: float, ended_s: float) -> None:
        """Note a step by the times, in seconds, at which it was launched and its result was there."""
        self._num_steps += 1
        if self._num_steps > MAX_STEPS:
            return
        counts = {"num_requests": len(plan.requests), "num_tokens": plan.num_tokens}
        self._note("X", f"step {plan.step}", "steps", launched_s, counts, dur=(ended_s - launched_s) * _MICROSECONDS)
        began_s = launched_s
        for part, seconds in output.timings.items():
            self._note("X", part, "runner", began_s, {"step": plan.step}, dur=seconds * _MICROSECONDS)
            began_s += seconds

    def add_abort(self, num_requests: int, at_s: float) -> None:
        """Note that `num_requests` were aborted by a message received at `at_s`."""
        if self._has_room:
            self._note("i", "abort", "aborts", at_s, {"num_requests": num_requests}, s="p")

    def add_load(self, num_used_blocks: int, num_requests: int, at_s: float) -> None:
        """Note how many blocks are in use, and how many requests run or wait."""
        if self._has_room:
            self._note("C", "load", "load", at_s, {"num_used_blocks": num_used_blocks, "num_requests": num_requests})

    @property
    def _has_room(self) -> bool:
        return self._num_steps <= MAX_STEPS and len(self._events) < MAX_EVENTS

    def write(self, folder: Path) -> Path:
        """Write the trace into a new file of `folder`, which is made if it does not exist; return its path."""
        folder.mkdir(parents=True, exist_ok=True)
        number = 1
        while (path := folder / f"steps-{os.getpid()}-{number}.json").exists():
            number += 1
        content = {
            "traceEvents": [_named(row) for row in _ROWS] + self._events,
            "otherData": {"num_steps": self._num_steps, "num_kept": min(self._num_steps, MAX_STEPS)},
        }
        path.write_bytes(msgspec.json.encode(content))
        return path

    def _note(
        self, kind: str, name: str, row: str, at_s: float, arguments: dict[str, int], **more: float | str
    ) -> None:
        event = _event(name, kind, row) | {"ts": (at_s - self._ahead_s) * _MICROSECONDS, "args": arguments}
        self._events.append(event | more)


def _event(name: str, kind: str, row: str) -> dict[str, Any]:
    return {"name": name, "cat": row, "ph": kind, "pid": os.getpid(), "tid": _ROWS.index(row)}


def _named(row: str) -> dict[str, Any]:
    """Return what gives the row its name: viewers want numbers for `tid`."""
    return _event("thread_name", "M", row) | {"args": {"name": row}}
