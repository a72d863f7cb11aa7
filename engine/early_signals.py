"""What SIGINT and SIGTERM do to a server outside the time in which its program takes them (engine/signals.py).

Before it, there is nothing to stop yet: the process exits on the spot, with 0. After it, everything has been stopped
and the exit code is known: they do nothing any more. Other verbs have only the first part, with 128 + signal, and only
while modules are imported: later Python's own handlers are right for them.

SIGUSR1 and SIGUSR2 ask a process what it does. One that cannot answer, not yet or no more, takes no notice.
"""

from __future__ import annotations

import os
import signal

_has_begun = False


def ignore_asking_signals() -> None:
    """Have SIGUSR1 and SIGUSR2 do nothing but while somebody answers them (engine/task_tree.py), to the very end."""
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)


def take_signals(exit_code: int | None) -> None:
    """From now on exit with `exit_code`, or with 128 + signal if None, until the program takes its signals itself."""

    def leave(number: int, frame: object) -> None:
        if not _has_begun:
            os._exit(128 + number if exit_code is None else exit_code)

    signal.signal(signal.SIGTERM, leave)
    signal.signal(signal.SIGINT, leave)


def leave_signals() -> None:
    """Give both signals the meaning that Python starts with."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)


def mark_begun() -> None:
    """Say that the program takes its signals itself; whatever comes after it has ended changes nothing."""
    global _has_begun
    _has_begun = True
