"""What the verbs do, written once for every way of driving an engine: with tasks or by plain calls.

A verb is a generator that yields what it must wait for and returns its answer::

    PAUSED             go on once the core is paused, or at any time to have it look whether it waits for nothing
    OnRunner(verb)     go on with what the runner answered to `verb`, between two steps

Whoever drives the core (`engine/utilities.py` under Trio, `engine/client/inproc.py` by plain calls) does the waiting,
throws in what the runner raised, and begins no verb of `IN_ORDER` before the one before it has ended: each finds asleep
what those before it left asleep. A verb that raises fails alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any, Final, NamedTuple

from engine import verbs
from engine.core import EngineCore
from engine.errors import MetronomeError, NotEnabled
from engine.step_trace import StepTrace
from engine.verbs import PauseMode, SleepTag, Verb

PAUSED: Final = "paused"
"""A verb waits until the core is paused; it fails if the pause is undone before."""
IN_ORDER: Final = (verbs.Sleep, verbs.WakeUp, verbs.SaveShardedState, verbs.CollectiveRpc)
"""The verbs that come to the runner, or change what sleeps: one after the other."""


class Resumed(MetronomeError):
    """A pause was undone before it was complete."""


class Overtaken(MetronomeError):
    """A later pause froze the requests whose end this one waited for."""


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

    def __init__(
        self,
        core: EngineCore,
        describe: Callable[[], str] = lambda: "this engine has no tasks",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Operate on `core`; `describe` answers `DumpTasks`, `clock` has the times that `trace` will be told."""
        self.asleep: frozenset[SleepTag] = frozenset()
        self.trace: StepTrace | None = None
        self._core = core
        self._describe = describe
        self._clock = clock
        self._num_pauses = 0
        self._num_resumes = 0

    def run(self, verb: Verb) -> Operation:
        """Begin `verb`; nothing is done before the first `next`."""
        core = self._core
        match verb:
            case verbs.ResetPrefixCache(reset_running):
                return core.reset_prefix_cache(reset_running)
            case verbs.Pause():
                yield from self._pause(verb)
            case verbs.Resume():
                self._resume()
            case verbs.IsPaused():
                return core.pause_mode is not None
            case verbs.Sleep():
                yield from self._sleep(verb)
            case verbs.WakeUp():
                yield from self._wake_up(verb)
            case verbs.IsSleeping():
                return bool(self.asleep) or core.pause_mode is not None
            case verbs.StartProfile() | verbs.StopProfile():
                return self._profile(verb)
            case verbs.ListLoras() | verbs.AddLora() | verbs.RemoveLora() | verbs.PinLora():
                raise NotEnabled("LoRA is not enabled: this version has no adapters")
            case verbs.SaveShardedState():
                if SleepTag.WEIGHTS in self.asleep:
                    raise ValueError("the weights sleep: wake them up first")
                return (yield OnRunner(verb))
            case verbs.CollectiveRpc():
                return [(yield OnRunner(verb))]
            case verbs.GetStats():
                return core.stats()
            case verbs.DumpTasks():
                return self._describe()

    def _pause(self, verb: verbs.Pause) -> Operation:
        yield from self._until_paused(verb.mode)
        if verb.clear_cache:
            self._core.reset_prefix_cache(reset_running=True)

    def _until_paused(self, mode: PauseMode) -> Operation:
        """Pause; raises Resumed where somebody undoes it meanwhile, whatever is paused after that.

        Raises Overtaken where who was to end is frozen: only `keep` may say that it is done while somebody runs.
        """
        self._core.pause(mode)
        self._num_pauses += 1
        num_resumes = self._num_resumes
        yield PAUSED
        while self._num_resumes == num_resumes:
            if self._core.is_paused:
                if mode is not PauseMode.KEEP and self._core.stats().num_running:
                    raise Overtaken("a later pause by keep froze the requests that this one waited for")
                return
            yield PAUSED
        raise Resumed("resumed before the pause was complete")

    def _resume(self) -> None:
        if self.asleep:
            raise ValueError(f"{_named(self.asleep)} sleep: wake them up, which resumes too")
        self._core.resume()
        self._num_resumes += 1

    def _sleep(self, verb: verbs.Sleep) -> Operation:
        was_paused = self._core.pause_mode is not None
        yield from self._until_paused(verb.mode)
        falling = _FALLS_ASLEEP[verb.level] - self.asleep
        if not falling:
            return
        num_pauses = self._num_pauses
        self._core.reset_prefix_cache(reset_running=True)
        self.asleep |= falling
        try:
            yield OnRunner(verb)
        except Exception:
            yield OnRunner(verbs.WakeUp(sorted(falling)))  # a part of it may have been given back
            self.asleep -= falling
            if not was_paused and num_pauses == self._num_pauses:
                self._resume()
            raise

    def _wake_up(self, verb: verbs.WakeUp) -> Operation:
        tags = frozenset(SleepTag if verb.tags is None else verb.tags)
        waking = self.asleep & tags
        num_pauses = self._num_pauses
        if waking:
            yield OnRunner(verbs.WakeUp(sorted(waking)))
            self.asleep -= waking
        if self.asleep:
            if SleepTag.SCHEDULING in tags:
                raise ValueError(f"{_named(self.asleep)} still sleep: the scheduler wakes up after them")
        elif num_pauses == self._num_pauses:  # a pause that came meanwhile is to last
            self._resume()

    def _profile(self, verb: verbs.StartProfile | verbs.StopProfile) -> str | None:
        folder = self._core.config.profile_dir
        if folder is None:
            raise NotEnabled("there is nowhere to write a profile: start the engine with --profile-dir FOLDER")
        if isinstance(verb, verbs.StartProfile):
            if self.trace is not None:
                raise ValueError("a profile is being taken already: stop it first")
            self.trace = StepTrace(self._clock())
            return None
        if self.trace is None:
            raise ValueError("no profile is being taken: start one first")
        trace, self.trace = self.trace, None
        return str(trace.write(Path(folder)))


def _named(tags: frozenset[SleepTag]) -> str:
    return " and ".join(sorted(tags))
