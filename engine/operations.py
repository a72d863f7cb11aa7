"""What the verbs do, written once for every way of driving an engine: with tasks or by plain calls.

A verb is a generator that yields what it must wait for and returns its answer::

    PAUSED             go on once the core is paused
    OnRunner(verb)     go on with what the runner answered to `verb`, between two steps

Whoever drives the core (`engine/utilities.py` under Trio, `engine/client/inproc.py` by plain calls) does the waiting.
A verb that raises fails alone.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any, Final, NamedTuple

from engine.core import EngineCore
from engine.errors import NotEnabled
from engine.step_trace import StepTrace
from engine.verbs import (
    AddLora,
    CollectiveRpc,
    DumpTasks,
    GetStats,
    IsPaused,
    IsSleeping,
    ListLoras,
    Pause,
    PinLora,
    RemoveLora,
    ResetPrefixCache,
    Resume,
    SaveShardedState,
    Sleep,
    SleepTag,
    StartProfile,
    StopProfile,
    Verb,
    WakeUp,
)

PAUSED: Final = "paused"
"""A verb waits until the core is paused; it fails if the pause is undone before."""


class OnRunner(NamedTuple):
    """A verb waits for the runner's answer to `verb`."""

    verb: Verb


Operation = Generator[str | OnRunner, Any, Any]
"""A verb under way: yields what it waits for, is sent the runner's answers, returns its own."""

_FALLS_ASLEEP = {
    0: frozenset[SleepTag](),
    1: frozenset({SleepTag.KV_CACHE}),
    2: frozenset({SleepTag.KV_CACHE, SleepTag.WEIGHTS}),
}


class Operations:
    """The verbs of one core, and what they leave behind: what sleeps, and the trace of a profile.

    Attributes:
        asleep: What the runner has given back.
        trace: Notes steps while a profile is taken, else None.
    """

    def __init__(self, core: EngineCore, describe: Callable[[], str] = lambda: "this engine has no tasks") -> None:
        """Operate on `core`; `describe` answers `DumpTasks`."""
        self.asleep: frozenset[SleepTag] = frozenset()
        self.trace: StepTrace | None = None
        self._core = core
        self._describe = describe

    def run(self, verb: Verb) -> Operation:
        """Begin `verb`; nothing is done before the first `next`."""
        core = self._core
        match verb:
            case ResetPrefixCache(reset_running):
                return core.reset_prefix_cache(reset_running)
            case Pause():
                yield from self._pause(verb)
            case Resume():
                self._resume()
            case IsPaused():
                return core.pause_mode is not None
            case Sleep():
                yield from self._sleep(verb)
            case WakeUp():
                yield from self._wake_up(verb)
            case IsSleeping():
                return bool(self.asleep) or core.pause_mode is not None
            case StartProfile() | StopProfile():
                return self._profile(verb)
            case ListLoras() | AddLora() | RemoveLora() | PinLora():
                raise NotEnabled("LoRA is not enabled: this version has no adapters")
            case SaveShardedState():
                if SleepTag.WEIGHTS in self.asleep:
                    raise ValueError("the weights sleep: wake them up first")
                return (yield OnRunner(verb))
            case CollectiveRpc():
                return [(yield OnRunner(verb))]
            case GetStats():
                return core.stats()
            case DumpTasks():
                return self._describe()

    def _pause(self, verb: Pause) -> Operation:
        self._core.pause(verb.mode)
        yield PAUSED
        if verb.clear_cache:
            self._core.reset_prefix_cache(reset_running=True)

    def _resume(self) -> None:
        if self.asleep:
            raise ValueError(f"{_named(self.asleep)} sleep: wake them up, which resumes too")
        self._core.resume()

    def _sleep(self, verb: Sleep) -> Operation:
        self._core.pause(verb.mode)
        yield PAUSED
        if _FALLS_ASLEEP[verb.level] <= self.asleep:
            return
        self._core.reset_prefix_cache(reset_running=True)
        self.asleep |= _FALLS_ASLEEP[verb.level]
        yield OnRunner(verb)

    def _wake_up(self, verb: WakeUp) -> Operation:
        tags = frozenset(SleepTag if verb.tags is None else verb.tags)
        waking = self.asleep & tags
        if waking:
            yield OnRunner(WakeUp(sorted(waking)))
            self.asleep -= waking
        if not self.asleep:
            self._core.resume()
        elif SleepTag.SCHEDULING in tags:
            raise ValueError(f"{_named(self.asleep)} still sleep: the scheduler wakes up after them")

    def _profile(self, verb: StartProfile | StopProfile) -> str | None:
        folder = self._core.config.profile_dir
        if folder is None:
            raise NotEnabled("there is nowhere to write a profile: start the engine with --profile-dir FOLDER")
        if isinstance(verb, StartProfile):
            if self.trace is not None:
                raise ValueError("a profile is being taken already: stop it first")
            self.trace = StepTrace()
            return None
        if self.trace is None:
            raise ValueError("no profile is being taken: start one first")
        trace, self.trace = self.trace, None
        return str(trace.write(Path(folder)))


def _named(tags: frozenset[SleepTag]) -> str:
    return " and ".join(sorted(tags))
