"""What verbs do on a runner's thread, between two steps; which methods can be called by name."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from engine.executor.base import Runner
from engine.verbs import CollectiveRpc, SaveShardedState, Sleep, SleepTag, Verb, WakeUp


def _ping(runner: Runner) -> str:
    return f"{type(runner).__name__} in thread {threading.current_thread().name} of process {os.getpid()}"


_METHODS: dict[str, Callable[..., Any]] = {
    "ping": _ping,
    "memory": lambda runner: runner.memory(),
    "capacity": lambda runner: runner.capacity,
}
"""All that `CollectiveRpc` can call."""


def call_runner(runner: Runner, verb: Verb) -> Any:
    """Run `verb` on `runner`, in the thread that owns it, and return its answer; raises what the runner raises.

    Raises:
        ValueError: The verb is none for a runner, or names no method; the caller's fault.
    """
    match verb:
        case Sleep(level):
            runner.sleep(level)
        case WakeUp(tags):
            runner.wake_up(SleepTag if tags is None else tags)
        case SaveShardedState(path, max_size_bytes):
            return runner.save_sharded_state(Path(path), max_size_bytes)
        case CollectiveRpc(method, args):
            if method not in _METHODS:
                raise ValueError(f"a runner has no method {method!r:.80}; known are {', '.join(sorted(_METHODS))}")
            if args:
                raise ValueError(f"{method} takes no arguments, got {len(args)}")
            return _METHODS[method](runner)
        case _:
            raise ValueError(f"{type(verb).__name__} is no verb for a runner")
    return None
