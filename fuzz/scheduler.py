"""Whatever order requests come, end, fail and are preempted in: each gets the tokens it gets alone, and one end.

A history is a list of plain operations (`fuzz/history.py`) that `Simulation` applies to a core on the integer model,
with tiny pools and up to four plans in flight; here is what there is to draw, and what must hold is in
`fuzz/simulation.py`.

    python -m fuzz scheduler --minutes 10 --seed 7
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from engine.errors import Cause
from engine.protocol import AbortReason, PauseMode
from engine.sampling_params import RepetitionDetection, StructuredOutputsParams
from engine.scheduler.policy import POLICIES
from engine.testing import TestGrammar
from fuzz.history import Drawn, Operation, Target, choose
from fuzz.simulation import Simulation

REPETITION = RepetitionDetection(max_pattern_size=3, min_count=2)
STOP_TOKENS = tuple(range(32, 127, 12))
FORM = StructuredOutputsParams(json_object=True)  # that there is one; which grammar it is, is drawn
"""Tokens that stop or end a request that asks for it; about one in twelve of what the integer model says."""


@dataclass(frozen=True, repr=False)
class Settings(Drawn):
    """A tiny engine whose pool is under pressure. What does not go together is raised or lowered until it does."""

    num_gpu_blocks_override: int = choose(*range(3, 15), 18, 24)
    block_size: int = choose(1, 2, 3, 4, 8)
    max_model_len: int = choose(*range(2, 33), *range(24, 61, 3))
    max_num_seqs: int = choose(*range(1, 7))
    max_num_batched_tokens: int = choose(*range(1, 17), 26)
    enable_chunked_prefill: bool = choose(True, True, True, True, False)
    enable_prefix_caching: bool = choose(True, True, True, True, False)
    long_prefill_token_threshold: int = choose(0, 0, 1, 3, 7)
    scheduling_policy: str = choose(*POLICIES)
    max_overtakes: int = choose(32, 0, 1, 2, 3)
    watermark: float = choose(0.01, 0.0, 0.2, 0.3)
    windows: tuple[int | None, int | None] = choose(
        *[(None, None)] * 5, (None, 3), (4, None), (2, 2), (3, 6), (None, 1)
    )
    queue_timeout: float | None = choose(None, None, None, None, 9.0, 30.0)
    max_num_waiting: int = choose(*[1000] * 9, 1, 2, 8)
    max_concurrent_plans: int = choose(1, 2, 3, 4)
    runs_late: bool = choose(False, True)
    checks_acts: bool = choose(True, False, False, False)

    def engine(self) -> dict[str, Any]:
        """Return the arguments of `CoreDriver.of`."""
        num_groups = len(set(self.windows))
        num_blocks = max(self.num_gpu_blocks_override, 2 * num_groups)
        max_model_len = max(2, min(self.max_model_len, num_blocks // num_groups * self.block_size))
        least_budget = self.max_num_seqs if self.enable_chunked_prefill else max(self.max_num_seqs, max_model_len)
        return {
            **self.__dict__,
            "num_gpu_blocks_override": num_blocks,
            "max_model_len": max_model_len,
            "max_num_batched_tokens": max(least_budget, self.max_num_batched_tokens),
            "long_prefill_token_threshold": self.long_prefill_token_threshold * self.enable_chunked_prefill,
        }


@dataclass(frozen=True, repr=False)
class Add(Operation):
    """Add a request: `length` prompt tokens, the first `fork` of them (0: all) shared by all of the same `prefix`."""

    weight: ClassVar[int] = 22
    prefix: int = choose(0, 0, 0, 1, 2)
    length: int = choose(*range(1, 19), *range(19, 41, 4))
    fork: int = choose(0, 0, 0, 2, 5, 9)
    max_tokens: int | None = choose(1, 2, 3, 5, 8, 13, 21, 34, None)
    min_tokens: int = choose(0, 0, 2, 6)
    stops: bool = choose(False, True)
    salt: int = choose(*[0] * 7, 1)
    seed: int | None = choose(None, None, 7)
    skips_cache: bool = choose(*[False] * 9, True)
    detects_repetition: bool = choose(False, False, True)
    kind: str = choose(*["plain"] * 8, "grammar", "session")
    priority: int = choose(0, 1, -1)
    client: int = choose(0, 1, 2)
    reuses_name: bool = choose(False, False, True)

    def prompt(self, max_model_len: int) -> list[int]:
        """Return its prompt, at most `max_model_len` long; only one of that very length is refused."""
        length = 1 + (self.length - 1) % max_model_len
        ids = [65 + (self.prefix + position // 6 * self.prefix) % 26 for position in range(length)]
        return [*ids[: self.fork], *(id + 32 for id in ids[self.fork :])] if self.fork else ids

    def apply(self, simulation: Simulation) -> None:
        """Add it, under the name of the one that ended last if it re-uses a name."""
        driver, stops = simulation.driver, STOP_TOKENS if self.stops else ()
        is_full = len(driver.live_requests) >= driver.core.config.max_num_seqs + driver.core.config.max_num_waiting
        name = simulation.name_for(self)
        driver.add(
            name,
            self.prompt(driver.core.capacity.max_model_len),
            cache_salt=f"salt {self.salt}" if self.salt else None,
            priority=self.priority,
            client_key=f"client {self.client}" if self.client else None,
            max_tokens=self.max_tokens,
            min_tokens=min(self.min_tokens, self.max_tokens or self.min_tokens),
            stop_token_ids=stops[::2],
            eos_token_ids=stops[1::2],
            temperature=0.0 if self.seed is None else 1.0,
            seed=self.seed,
            skip_reading_prefix_cache=self.skips_cache,
            repetition_detection=REPETITION if self.detects_repetition else None,
            awaits_grammar=self.kind == "grammar",
            is_session=self.kind == "session",
        )
        simulation.check_full(name, is_full)


@dataclass(frozen=True, repr=False)
class Compiled(Operation):
    """Give the `index`-th of those that await a grammar theirs, or say why there is none."""

    weight: ClassVar[int] = 4
    index: int = choose(0, 1, 2)
    step: int = choose(1, 2, 7)
    length: int = choose(20, 3)
    ends: bool = choose(False, True)
    fails: bool = choose(*[False] * 5, True)

    def name(self, simulation: Simulation) -> str:
        """Return whose it is."""
        waiting = simulation.awaiting_grammar()
        return waiting[self.index % len(waiting)]

    def event(self, simulation: Simulation) -> str | None:
        """Return what becomes of the grammar."""
        if not simulation.awaiting_grammar():
            return None
        return "no grammar" if self.fails else "grammar"

    def apply(self, simulation: Simulation) -> None:
        """Give it."""
        cause = Cause("BadGrammar", "it was made to fail")
        grammar = cause if self.fails else TestGrammar(self.step, self.length, ends=self.ends)
        simulation.driver.set_grammar(self.name(simulation), grammar)


@dataclass(frozen=True, repr=False)
class Extend(Operation):
    """Give the `index`-th open session its next part, of `length` tokens; 0 ends it."""

    weight: ClassVar[int] = 6
    index: int = choose(0, 1, 2)
    length: int = choose(1, 2, 5, 9, 0)
    max_tokens: int | None = choose(1, 2, 5, None)
    stops: bool = choose(False, True)
    has_form: bool = choose(*[False] * 3, True)

    def event(self, simulation: Simulation) -> str | None:
        """Return whether there is one to extend."""
        if not simulation.open_sessions():
            return None
        return "extend" if self.length else "close"

    def apply(self, simulation: Simulation) -> None:
        """Extend it; where as many of its parts wait as may, that ends it."""
        sessions = simulation.open_sessions()
        name = sessions[self.index % len(sessions)]
        is_full = self.length > 0 and simulation.num_waiting_parts(name) >= simulation.settings.max_num_waiting
        simulation.driver.extend(
            name,
            [90 - position for position in range(self.length)],
            structured_outputs=FORM if self.has_form else None,
            max_tokens=self.max_tokens,
            stop_token_ids=STOP_TOKENS if self.stops else (),
        )
        simulation.check_full(name, is_full)


@dataclass(frozen=True, repr=False)
class Abort(Operation):
    """Abort the `index`-th request ever named, whether it lives or not."""

    weight: ClassVar[int] = 6
    index: int = choose(*range(12), *range(12, 41, 4))
    by_stop_string: bool = choose(False, False, True)

    def whom(self, simulation: Simulation) -> str:
        """Return whom it aborts."""
        names = simulation.names
        return names[self.index % len(names)] if names else "unknown"

    def apply(self, simulation: Simulation) -> None:
        """Abort it."""
        reason = AbortReason.STOP_STRING if self.by_stop_string else AbortReason.CLIENT
        simulation.driver.abort(self.whom(simulation), reason=reason)


@dataclass(frozen=True, repr=False)
class Plan(Operation):
    """Make a plan, if one may be in flight; its step fails or not.

    `corrupts` is the row that computes wrong K/V and fails alone, None for none.
    """

    weight: ClassVar[int] = 60
    fails: bool = choose(*[False] * 19, True)
    corrupts: int | None = choose(*[None] * 45, 0, 1, 2)

    def event(self, simulation: Simulation) -> str | None:
        """Return that a plan is made, unless as many as may be are in flight, or nothing is left to plan for."""
        driver = simulation.driver
        is_full = len(driver.plans) >= simulation.settings.max_concurrent_plans
        return None if is_full or not driver.core.has_work else "plan"

    def apply(self, simulation: Simulation) -> None:
        """Make it."""
        simulation.plan(self.fails, self.corrupts)


@dataclass(frozen=True, repr=False)
class Finish(Operation):
    """Commit or fail the oldest plan; where none is in flight, one is made first.

    `culprit` is the row blamed, or told to have failed alone though it did not; None for all or no row. `num_more`
    tokens more than one are sampled for each row, where no later plan is in flight.
    """

    weight: ClassVar[int] = 60
    culprit: int | None = choose(*[None] * 45, 0, 1, 2)
    num_more: int = choose(*[0] * 12, 1, 3)

    def event(self, simulation: Simulation) -> str | None:
        """Return how the oldest plan ends."""
        if not simulation.driver.plans:
            core = simulation.driver.core
            return "step" if core.has_work and core.waits_for is None else None
        if simulation.driver.plans[0].fails:
            return "fail"
        whole = self.culprit is None and simulation.driver.plans[0].corrupted is None
        return "commit" if whole else "commit, row fails"

    def apply(self, simulation: Simulation) -> None:
        """End it."""
        if not simulation.driver.plans:
            simulation.plan()
        if simulation.driver.plans:
            simulation.finish_step(self.culprit, self.num_more)


@dataclass(frozen=True, repr=False)
class Pause(Operation):
    """Pause in a mode."""

    mode: str = choose(*(mode.value for mode in PauseMode))

    def event(self, simulation: Simulation) -> str:
        """Return which pause it is."""
        return f"pause {self.mode}"

    def apply(self, simulation: Simulation) -> None:
        """Pause."""
        simulation.driver.pause(PauseMode(self.mode))


@dataclass(frozen=True, repr=False)
class Resume(Operation):
    """Undo a pause."""

    weight: ClassVar[int] = 8

    def apply(self, simulation: Simulation) -> None:
        """Resume."""
        simulation.driver.resume()


@dataclass(frozen=True, repr=False)
class Reset(Operation):
    """Reset the prefix cache."""

    reset_running: bool = choose(False, True)

    def apply(self, simulation: Simulation) -> None:
        """Reset it."""
        simulation.driver.reset_prefix_cache(reset_running=self.reset_running)
        simulation.count_untold()


@dataclass(frozen=True, repr=False)
class Resize(Operation):
    """Run everything to its end, and start anew with a pool of another size."""

    num_blocks: int = choose(3, 5, 8, 13)

    def apply(self, simulation: Simulation) -> None:
        """Start anew."""
        simulation.finish()
        simulation.start(replace(simulation.settings, num_gpu_blocks_override=self.num_blocks))


TARGET = Target(
    "scheduler", Settings, (Add, Compiled, Extend, Abort, Plan, Finish, Pause, Resume, Reset, Resize), Simulation
)
