"""What a process does right now, for whoever asks it with a signal: where to look when something hangs.

SIGUSR1 writes to standard error first what one asks first (engine alive, age of its last step, queues, sockets), said
by those who own that state, see `telling`; then the tree of Trio's tasks, each with the line at which it waits. It
needs a loop that still turns. SIGUSR2 writes the Python stack of every thread and needs a main thread that still comes
to run Python, be it in a loop that never turns. Both are answered between two steps of the interpreter: whoever walks
its frames at any moment, as a handler in C does, meets some that are half made and ends the process.
"""

from __future__ import annotations

import faulthandler
import os
import signal
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import PurePath
from types import FrameType
from typing import Any

import trio

from transport.standard_error import write_to_stderr

MAX_ALIKE = 3
"""Of sibling tasks that wait at the same lines, so many are shown; the rest are counted."""

_TRIO = str(PurePath(trio.__file__).parent)


Tell = Callable[[], Iterable[str]]
"""Returns lines about the state of its owner, now; must not wait nor fail."""

_tellers: trio.lowlevel.RunVar[dict[object, tuple[str, Tell]]] = trio.lowlevel.RunVar("tellers")
"""Of this run of Trio, as its tree of tasks is."""


@contextmanager
def telling(name: str, tell: Tell) -> Iterator[None]:
    """Have the lines of `tell()` stand under `name` in this run's reports, during the block."""
    tellers = _tellers.get({})
    _tellers.set(tellers)
    key = object()
    tellers[key] = name, tell
    try:
        yield
    finally:
        del tellers[key]


def report() -> str:
    """Return what this process says of its state, and its tasks, as text."""
    lines = [f"state of process {os.getpid()}:"]
    for name, tell in _tellers.get({}).values():
        lines += [f"  {name}:", *(f"    {line}" for line in tell())]
    return "\n".join([*lines, f"tasks of process {os.getpid()}:", draw_tasks()])


def write_report() -> None:
    """Write `report` to standard error, if that can be written to."""
    write_to_stderr(report())


def write_stacks() -> None:
    """Write the Python stack of every thread to standard error, if that can be written to."""
    try:
        with open(os.memfd_create("stacks"), "w+", encoding="utf-8", errors="replace") as stacks:
            faulthandler.dump_traceback(stacks, all_threads=True)
            stacks.seek(0)
            write_to_stderr(stacks.read().rstrip())
    except (AttributeError, OSError):  # not every system has such files; there may be too many open
        with suppress(OSError, RuntimeError):
            faulthandler.dump_traceback(all_threads=True)


async def answer_signals(task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
    """Write a report at each SIGUSR1 until cancelled, and have SIGUSR2 write stacks. In the main thread only.

    Afterwards both have the meaning that they had before: an application's own, or none in our own processes.
    """
    before = signal.signal(signal.SIGUSR2, lambda number, frame: write_stacks())
    try:
        with trio.open_signal_receiver(signal.SIGUSR1) as signals:
            task_status.started()
            async for _ in signals:
                write_report()
    finally:
        signal.signal(signal.SIGUSR2, signal.SIG_IGN if before is None else before)  # None: one that is not Python's


def draw_tasks() -> str:
    """Return the tree of all tasks as text, one line a task or nursery."""
    root = trio.lowlevel.current_root_task()
    return "no tasks" if root is None else "\n".join(_draw(root, ""))


def _draw(task: trio.lowlevel.Task, indent: str) -> Iterator[str]:
    where = _where(task)
    yield f"{indent}{task.name}{' at ' if where else ''}{' < '.join(where)}"
    for nursery in task.child_nurseries:
        yield f"{indent}  nursery of {len(nursery.child_tasks)}{_state(nursery.cancel_scope)}"
        alike: Counter[tuple[str, ...]] = Counter()
        for child in sorted(nursery.child_tasks, key=lambda child: child.name):
            kind = (child.name, *_where(child))
            alike[kind] += 1
            if alike[kind] <= MAX_ALIKE:
                yield from _draw(child, indent + "    ")
        for kind, number in alike.items():
            if number > MAX_ALIKE:
                yield f"{indent}    ... {number} such tasks: {kind[0]}"


def _state(scope: trio.CancelScope) -> str:
    words = ["cancelled"] if scope.cancel_called else []
    words += ["shielded"] if scope.shield else []
    if scope.deadline != float("inf"):
        words.append(f"ends in {scope.deadline - trio.current_time():.1f} s")
    return f" ({', '.join(words)})" if words else ""


def _where(task: trio.lowlevel.Task) -> tuple[str, ...]:
    """Return the lines at which a suspended task waits, innermost first, Trio's own left out."""
    lines: list[str] = []
    awaited: Any = task.coro
    while awaited is not None:
        frame: FrameType | None = next(
            (getattr(awaited, name) for name in ("cr_frame", "gi_frame", "ag_frame") if hasattr(awaited, name)), None
        )
        if frame is not None and not frame.f_code.co_filename.startswith(_TRIO):
            path = PurePath(frame.f_code.co_filename)
            lines.append(f"{path.parent.name}/{path.name}:{frame.f_lineno} {frame.f_code.co_name}")
        names = ("cr_await", "gi_yieldfrom", "ag_await")
        awaited = next((getattr(awaited, name) for name in names if hasattr(awaited, name)), None)
    return tuple(reversed(lines))
