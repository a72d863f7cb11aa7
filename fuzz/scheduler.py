"""Whatever order requests come, end, fail and are preempted in: each gets the tokens it gets alone, and one end.

A history is a list of plain operations (`fuzz/history.py`) that `Simulation` applies to a core on the integer model,
with tiny pools and up to four plans in flight. The core's invariants are checked after each step, and in a quarter of
the histories after each operation. Beyond them:

* each request's tokens, finish reason and stop reason are those of its run alone (`fuzz/oracle.py`);
* exactly one end each, told to the runner exactly once;
* whoever loses its blocks to another in a plan comes after everyone who has a row in it, in the policy's order;
* a request that was rewound publishes again what it computes again;
* once all has ended, no block is in use.

    python -m fuzz scheduler --minutes 10 --seed 7
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from engine.errors import Cause
from engine.outputs import RequestId, SchedulerOutput
from engine.protocol import AbortReason, PauseMode
from engine.request import RequestStatus
from engine.sampling_params import RepetitionDetection
from engine.scheduler.policy import POLICIES
from engine.testing import CoreDriver, LaunchedPlan, TestGrammar
from fuzz.coverage import Coverage
from fuzz.history import Drawn, Operation, Target, choose
from fuzz.oracle import check_completion, check_victims

REPETITION = RepetitionDetection(max_pattern_size=3, min_count=2)
STOP_TOKENS = tuple(range(32, 127, 12))
"""Tokens that stop or end a request that asks for it; about one in twelve of what the integer model says."""
_AWAITING_GRAMMAR = RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR
MAX_IDLE_STEPS = 2000
"""Steps without any output after which a core that has work is called stuck; a request here takes at most some 100."""


@dataclass(frozen=True, repr=False)
class Settings(Drawn):
    """A tiny engine whose pool is under pressure. What does not go together is raised or lowered until it does."""

    num_gpu_blocks_override: int = choose(*range(3, 15))
    block_size: int = choose(1, 2, 3, 4, 8)
    max_model_len: int = choose(*range(2, 41), *range(20, 61))
    max_num_seqs: int = choose(*range(1, 7))
    max_num_batched_tokens: int = choose(*range(1, 17), 26)
    enable_chunked_prefill: bool = choose(True, True, True, True, False)
    enable_prefix_caching: bool = choose(True, True, True, True, False)
    long_prefill_token_threshold: int = choose(0, 0, 1, 3, 7)
    scheduling_policy: str = choose(*POLICIES)
    max_overtakes: int = choose(32, 0, 1, 3)
    watermark: float = choose(0.01, 0.0, 0.3)
    windows: tuple[int | None, int | None] = choose(
        *[(None, None)] * 5, (None, 3), (4, None), (2, 2), (3, 6), (None, 1)
    )
    queue_timeout: float | None = choose(None, None, None, None, 9.0, 30.0)
    max_num_waiting: int = choose(1000, 1000, 1000, 1, 2, 8)
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

    weight: ClassVar[int] = 16
    prefix: int = choose(0, 1, 2)
    length: int = choose(*range(1, 13), *range(13, 41, 3))
    fork: int = choose(0, 0, 0, 2, 5, 9)
    max_tokens: int | None = choose(1, 2, 3, 5, 8, 13, 21, 34, None)
    min_tokens: int = choose(0, 0, 2, 6)
    stops: bool = choose(False, True)
    salt: int = choose(0, 0, 0, 1)
    seed: int | None = choose(None, None, 7)
    skips_cache: bool = choose(*[False] * 9, True)
    detects_repetition: bool = choose(False, False, True)
    kind: str = choose(*["plain"] * 8, "grammar", "session")
    priority: int = choose(0, 0, 1, -1)
    client: int = choose(0, 0, 1, 2)
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

    def name(self, simulation: Simulation) -> str:
        """Return whom it aborts."""
        names = simulation.names
        return names[self.index % len(names)] if names else "unknown"

    def apply(self, simulation: Simulation) -> None:
        """Abort it."""
        reason = AbortReason.STOP_STRING if self.by_stop_string else AbortReason.CLIENT
        simulation.driver.abort(self.name(simulation), reason=reason)


@dataclass(frozen=True, repr=False)
class Plan(Operation):
    """Make a plan, if one may be in flight; its step fails or not.

    `corrupts` is the row that computes wrong K/V and fails alone, None for none.
    """

    weight: ClassVar[int] = 60
    fails: bool = choose(*[False] * 14, True)
    corrupts: int | None = choose(*[None] * 70, 0, 1, 2)

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
    culprit: int | None = choose(*[None] * 70, 0, 1, 2)
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


class Simulation:
    """Applies a history to a core, and checks after each operation and at the end what must hold."""

    def __init__(self, settings: Settings, coverage: Coverage | None = None) -> None:
        """Start a core; what is met is counted in `coverage`."""
        self.coverage = Coverage() if coverage is None else coverage
        self.num_steps = 0
        self.start(settings)

    def start(self, settings: Settings) -> None:
        """Start a core, in place of the one before."""
        self.settings = settings
        self.driver = CoreDriver.of(**settings.engine())
        self.names: list[str] = []
        self._told: list[str] = []
        self._arrivals: dict[str, int] = {}
        self._num_arrivals = 0
        self._num_told = self._num_untold = 0
        self._has_broken_rows = False

    def apply(self, operation: Operation) -> None:
        """Apply one operation; one that cannot be applied now does nothing."""
        event = operation.event(self)
        if event is None:
            return
        if isinstance(operation, Abort):
            self.coverage.saw(event, [self._state(operation.name(self))])
        else:
            self.coverage.saw(event, [request.status for request in self.driver.live_requests])
        operation.apply(self)

    def finish(self) -> None:
        """Resume, run everything to its end, and compare every request with its run alone.

        Raises:
            AssertionError: Something differs, leaked, or did not end exactly once.
        """
        driver = self.driver
        driver.resume()
        num_idle, num_outputs = 0, -1
        for name in self.awaiting_grammar():
            driver.set_grammar(name, TestGrammar(1, 50))
        for name in self.open_sessions():
            driver.extend(name, ())
        while driver.core.has_work:
            self.plan()
            if driver.plans:
                self.finish_step(None, 0)
            before, num_outputs = num_outputs, driver.num_outputs
            num_idle = num_idle + 1 if before == num_outputs else 0
            assert num_idle < MAX_IDLE_STEPS, (
                f"no output in {num_idle} steps, and there is work: {driver.live_requests}"
            )
        assert driver.core.stats().num_used_blocks == 0, "blocks leaked"
        everyone = [*driver.past, *((driver.requests[name], driver.completions[name]) for name in driver.completions)]
        for request, completion in everyone:
            check_completion(request, completion, driver.core.capacity.max_model_len, driver.runner.windows)
        assert sorted(self._told) == sorted(request.request_id for request, _ in everyone), "ends not told exactly once"

    def awaiting_grammar(self) -> list[str]:
        """Return the names of all requests that await a grammar, in order of arrival."""
        return [request.request_id for request in self.driver.live_requests if request.status is _AWAITING_GRAMMAR]

    def open_sessions(self) -> list[str]:
        """Return the names of all sessions that take further parts."""
        sessions = ((request.request_id, request.session) for request in self.driver.live_requests)
        return [name for name, parts in sessions if parts is not None and not (parts and parts[-1].is_last)]

    def num_waiting_parts(self, name: str) -> int:
        """Return how many parts of an open session wait for their turn; one that awaits input takes the next at once."""
        (parts,) = (request.session for request in self.driver.live_requests if request.request_id == name)
        return len(parts or ())

    def check_full(self, name: str, is_full: bool) -> None:
        """Check that what came for `name` was refused for want of room to wait if and only if there was none."""
        outputs = self.driver.completions[RequestId(name)].outputs
        is_refused = bool(outputs) and outputs[-1].error is not None and outputs[-1].error.type == "QueueFull"
        assert is_refused == is_full, f"{name}: refused {is_refused}, no room to wait {is_full}: {outputs[-1:]}"

    def name_for(self, add: Add) -> str:
        """Return a name for a request to add, and note its arrival."""
        completions = self.driver.completions
        ended = (name for name in reversed(self.names) if completions[RequestId(name)].finish_reason is not None)
        name = next(ended, None) if add.reuses_name else None
        if name is None:
            name = f"r{len(self.names)}"
            self.names.append(name)
        self._num_arrivals += 1
        self._arrivals[name] = self._num_arrivals
        return name

    def plan(self, fails: bool = False, corrupts: int | None = None) -> None:
        """Make a plan."""
        plan = self.driver.plan(fails=fails, corrupts=corrupts)
        if plan is not None:
            self._told += plan.finished_request_ids
            victims = plan.preempted_request_ids[self._num_untold :]
            if victims:
                self._check_victims(victims, [row.request_id for row in plan.requests])
            self._num_told += len(plan.preempted_request_ids)
            self._num_untold = 0
        else:
            self.count_untold()

    def count_untold(self) -> None:
        """Count who lost its blocks to a reset or a failure, or in vain, and is to be told by the next plan."""
        self._num_untold = self.driver.num_preemptions - self._num_told

    def finish_step(self, culprit: int | None, num_more: int) -> None:
        """Commit or fail the oldest plan."""
        launched = self.driver.plans[0]
        rows = launched.plan.requests
        guilty = [rows[culprit % len(rows)].request_id] if culprit is not None and rows else []
        if launched.fails:
            self.driver.finish_step(blamed=guilty or None)
        else:
            self._commit(launched, guilty, num_more if len(self.driver.plans) == 1 else 0)
        if launched.fails:  # now, if not before: a late step may find that what it needs has failed
            self.count_untold()
        self.num_steps += 1
        self._check_publication()

    def _commit(self, launched: LaunchedPlan, guilty: list[RequestId], num_more: int) -> None:
        """Commit the oldest plan, of whose rows those of `guilty` failed; whoever else samples must get its token.

        Unless it may have relied on one that failed alone: one that computes from what the plan itself fills.
        """
        driver = self.driver
        more = self._more_tokens(launched.plan, num_more) if num_more else None
        numbers = {
            row.request_id: len(driver.completions[row.request_id].token_ids)
            for row, (owner, _, _) in zip(launched.plan.requests, launched.reads, strict=True)
            if row.samples and driver.is_live(owner) and row.request_id not in guilty
            if not owner.extras  # the end of a session's turn makes its further rows void
        }
        counts = not launched.follows_failure
        driver.finish_step(broken=guilty, more=more)
        broken = {} if launched.output is None else {**launched.output.failed, **dict.fromkeys(guilty)}
        if launched.corrupted is not None:
            broken[launched.corrupted] = None
        if broken:
            self._has_broken_rows = True
            self.count_untold()  # who relied on them computes anew
            for name in numbers.keys() & _sharers(launched):
                del numbers[name]
        for name, number in numbers.items():
            if name in broken:
                continue  # its grammar allowed nothing more
            got = driver.completions[name].token_ids
            assert len(got) > number or not counts, f"{name} did not get the token that its row sampled"

    def _state(self, name: str) -> object:
        for request in self.driver.live_requests:
            if request.request_id == name:
                return request.status
        return "ENDED" if name in self.driver.completions else "UNKNOWN"

    def _more_tokens(self, plan: SchedulerOutput, num_more: int) -> dict[str, list[int]]:
        """Return the true tokens after the one that each row samples."""
        num_known = {row.request_id: len(row.tokens) for row in plan.requests if row.samples}
        return {
            request.request_id: self.driver.expected(request.request_id, 1 + request.num_output_tokens + num_more)[
                -num_more:
            ]
            for request in self.driver.live_requests
            if num_known.get(request.request_id) == request.num_tokens
            and request.grammar is None
            and request.session is None
        }

    def _check_victims(self, victims: Sequence[RequestId], served: Sequence[RequestId]) -> None:
        num_yields = {request.request_id: request.num_yields for request in self.driver.live_requests}
        unmoved = {  # whoever has yielded before has another place
            name: (self.driver.requests[name], self._arrivals[name])
            for name in (*victims, *served)
            if num_yields[name] == (name in victims)
        }
        check_victims(self.settings.scheduling_policy, unmoved, victims, served)

    def _check_publication(self) -> None:
        """Check that rewound requests can be hit as far as they are computed, unless somebody's row failed alone.

        Tokens that were late when their row was planned are published with the next row.
        """
        if not self.settings.enable_prefix_caching or self._has_broken_rows or any(self.settings.windows):
            return  # what a window has passed before its tokens were known is not published
        for request in self.driver.live_requests:
            if request.generation and request.num_computed_tokens and request.reads_prefix_cache:
                num_known = request.num_computed_tokens - self.settings.max_concurrent_plans
                num_hit = self.driver.num_cached_tokens(request)
                assert num_hit > num_known - self.settings.block_size, f"{request} can be hit for {num_hit} tokens only"


def _sharers(launched: LaunchedPlan) -> set[RequestId]:
    """Return whose rows read blocks that other rows of the same plan fill: if one of those fails, they compute anew."""
    return {
        row.request_id
        for row, (_, read, own) in zip(launched.plan.requests, launched.reads, strict=True)
        for _, _, filled in launched.reads
        if filled is not own and not filled.isdisjoint(read)
    }


TARGET = Target(
    "scheduler", Settings, (Add, Compiled, Extend, Abort, Plan, Finish, Pause, Resume, Reset, Resize), Simulation
)
