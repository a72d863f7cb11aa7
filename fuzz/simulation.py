"""A core on the integer model to which a history of `fuzz/scheduler.py` is applied, and what must hold then.

The core's invariants are checked after each step, and in a quarter of the histories after each operation. Beyond them:

* each request's tokens, finish reason and stop reason are those of its run alone (`fuzz/oracle.py`);
* exactly one end each, told to the runner exactly once;
* whoever loses its blocks to another in a plan comes after everyone who has a row in it, in the policy's order;
* nobody makes way in vain: whom it was for starts in that plan, or in the next one after all blocks have come back;
* a request that was rewound publishes again what it computes again;
* who comes is refused for want of room to wait if and only if there is none;
* once all has ended, no block is in use.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from engine.outputs import RequestId, SchedulerOutput
from engine.request import Request, RequestStatus
from engine.testing import CoreDriver, LaunchedPlan, TestGrammar
from fuzz.coverage import Coverage
from fuzz.history import Operation
from fuzz.oracle import check_completion, check_victims

if TYPE_CHECKING:
    from fuzz.scheduler import Add, Settings

_AWAITING_GRAMMAR = RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR
_CALM = {"plan", "step", "commit", "add", "abort"}
"""Events after which whoever another made way for must still start, if it is still the first in the queue."""
MAX_IDLE_STEPS = 2000
"""Steps without any output after which a core that has work is called stuck; a request here takes at most some 100."""


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
        self._made_way_for: Request | None = None

    def apply(self, operation: Operation) -> None:
        """Apply one operation; one that cannot be applied now does nothing."""
        event = operation.event(self)
        if event is None:
            return
        if event not in _CALM:
            self._made_way_for = None
        name = operation.whom(self)
        if name is None:
            self.coverage.saw(event, [request.status for request in self.driver.live_requests])
        else:
            self.coverage.saw(event, [self._state(name)])
        operation.apply(self)

    def finish(self) -> None:
        """Resume, run everything to its end, and compare every request with its run alone.

        Raises:
            AssertionError: Something differs, leaked, or did not end exactly once.
        """
        driver = self.driver
        driver.resume()
        num_idle, num_outputs = 0, -1
        for name in self.open_sessions():
            driver.extend(name, ())
        while driver.core.has_work:
            for name in self.awaiting_grammar():
                driver.set_grammar(name, TestGrammar(1, 50))
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
        """Return how many parts of an open session wait for their turn; none where it awaits input."""
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
        scheduler, is_due = self.driver.core._scheduler, self._is_start_due()
        num_preemptions = scheduler.num_preemptions
        plan = self.driver.plan(fails=fails, corrupts=corrupts)
        if is_due:
            waits = self._made_way_for in scheduler.waiting.unordered()
            assert not waits, f"somebody made way for {self._made_way_for} in vain: it waits"
            self._made_way_for = None
        if scheduler.num_preemptions > num_preemptions and scheduler.pause is None:
            self._made_way_for = scheduler.admission._made_way_for
        if plan is not None:
            self._told += plan.finished_request_ids
            victims = plan.preempted_request_ids[self._num_untold :]
            if victims:
                self._check_victims(victims, [row.request_id for row in plan.requests])
            self._num_told += len(plan.preempted_request_ids)
            self._num_untold = 0
        else:
            self.count_untold()

    def _is_start_due(self) -> bool:
        """Whether whom somebody made way for must start in the next plan, if there is one."""
        driver = self.driver
        scheduler, kv_cache = driver.core._scheduler, driver.core._kv_cache
        if self._made_way_for is None or scheduler.waiting.peek() is not self._made_way_for:
            self._made_way_for = None
            return False
        is_full = len(driver.plans) >= self.settings.max_concurrent_plans
        return not is_full and not kv_cache.has_held_blocks

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
        if more:
            self._made_way_for = None  # they may take more blocks than one can know
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
