"""Who gets how many tokens in this step.

There is no prefill or decode phase: in each step a request's `num_computed_tokens` catches up with its tokens, as far
as one token budget allows. First come the running requests in the policy's order, then the waiting ones while there is
room. Where a running request finds no free block, the last of the running ones is preempted: it gives its blocks
back, keeps its tokens, and computes again what the prefix cache has lost by the time it is admitted anew.

Plans may be made before earlier ones are committed. What a plan in flight will yield is counted ahead::

    tokens        known ............ │ placeholders │        num_computed_tokens moves when a plan is made;
    a plan's row     start ──── num_tokens ───────▶ │        a placeholder becomes a token when it is committed

Invariants: the running list is sorted; every request has at most one row a plan; a row in flight counts unless its
request has ended or was rewound since; a preempted request waits until its rows in flight are
committed, for they still yield tokens. The phase-free step is that of vLLM v1.
"""

from __future__ import annotations

from bisect import insort
from typing import NamedTuple

from engine.config import EngineConfig
from engine.errors import Cause
from engine.kv_cache.manager import KVCacheManager, Match
from engine.outputs import Capacity, ModelRunnerOutput, RequestId, ScheduledRequest, SchedulerOutput
from engine.protocol import EngineCoreEvent, PauseMode
from engine.request import Request, RequestStatus, append_sampled
from engine.scheduler.in_flight import PlannedRow, PlansInFlight
from engine.scheduler.policy import POLICIES
from engine.scheduler.waiting_queue import WaitingQueue


class RowResult(NamedTuple):
    """What a step did to one request: the tokens it got, and the status it must move to if it ended."""

    request: Request
    new_token_ids: list[int]
    status: RequestStatus | None
    cause: Cause | None = None


class _Step:
    """A plan being made."""

    def __init__(self, number: int, budget: int, now: float) -> None:
        self.number = number
        self.budget = budget
        self.now = now
        self.rows: list[PlannedRow] = []
        self.has_preempted = False


class Scheduler:
    """Makes plans and takes in their results; owns the queues, and all calls to the KV cache."""

    def __init__(self, config: EngineConfig, capacity: Capacity, kv_cache: KVCacheManager) -> None:
        """Start with nothing waiting or running."""
        policy = POLICIES[config.scheduling_policy]
        self.waiting = WaitingQueue(policy)
        self.running: list[Request] = []
        self.in_flight = PlansInFlight()
        self.pause: PauseMode | None = None
        self.num_preemptions = 0
        self.prefix_cache_queries = 0
        self.prefix_cache_hits = 0
        self._policy = policy
        self._config = config
        self._capacity = capacity
        self._kv_cache = kv_cache
        self._preempted_ids: list[RequestId] = []

    # Making a plan

    def schedule(self, now: float, finished_request_ids: tuple[RequestId, ...]) -> SchedulerOutput | None:
        """Make the next plan, telling `finished_request_ids`, or return None where there is nothing to tell or run."""
        if len(self.in_flight) >= self._capacity.max_concurrent_plans:
            return None
        step = _Step(self.in_flight.last_step + 1, self._config.max_num_batched_tokens, now)
        if self.pause is not PauseMode.KEEP:
            self._schedule_running(step)
        if self.pause is None and not step.has_preempted:
            self._admit_waiting(step)
        if not step.rows and not finished_request_ids:
            return None
        plan = SchedulerOutput(
            step=step.number,
            requests=tuple(planned.row for planned in step.rows),
            finished_request_ids=finished_request_ids,
            preempted_request_ids=tuple(self._preempted_ids),
            num_tokens=self._config.max_num_batched_tokens - step.budget,
        )
        self._preempted_ids.clear()
        self.in_flight.push(plan, step.rows)
        return plan

    def _schedule_running(self, step: _Step) -> None:
        for request in tuple(self.running):
            if step.budget == 0 or request.status is not RequestStatus.RUNNING:
                return  # victims are taken from the end, so none that still runs follows a preempted one
            num_new = self._num_new_tokens(request, request.num_computed_tokens, step.budget)
            if num_new == 0:
                continue
            if not self._make_room(request, request.num_computed_tokens + num_new, step):
                return
            self._add_row(request, num_new, step)

    def _admit_waiting(self, step: _Step) -> None:
        """Admit heads of the queue while they fit; nobody overtakes a head that does not."""
        while self.waiting and step.budget > 0 and len(self.running) < self._config.max_num_seqs:
            request = self.waiting.peek()
            if self.in_flight.has_row_of(request):
                return
            match = self._kv_cache.match(request)
            num_new = self._num_new_tokens(request, match.num_tokens, step.budget)
            if num_new == 0 or not self._kv_cache.admit(request, match, match.num_tokens + num_new):
                return
            self._start_running(request, match, step.now)
            self._add_row(request, num_new, step)

    def _num_new_tokens(self, request: Request, start: int, budget: int) -> int:
        """Return how many tokens `request` gets in this step, computing from `start` on; 0 passes it over."""
        num_total = request.num_tokens + request.num_placeholders
        if num_total >= request.max_num_tokens:
            return 0  # what is in flight reaches the length limit
        num_new = num_total - start
        if self._config.long_prefill_token_threshold:
            num_new = min(num_new, self._config.long_prefill_token_threshold)
        if num_new > budget:
            return budget if self._config.enable_chunked_prefill else 0
        return num_new

    def _make_room(self, request: Request, num_tokens: int, step: _Step) -> bool:
        """Grow the table of `request`, preempting from the end of the running list; False if it must wait."""
        while not self._kv_cache.grow(request, num_tokens):
            if self._kv_cache.has_held_blocks:
                return False  # a commit will give blocks back; preempting more would not do so sooner
            victim = self.running[-1]
            self.preempt(victim, step.now)
            step.has_preempted = True
            if victim is request:
                return False
        return True

    def _start_running(self, request: Request, match: Match, now: float) -> None:
        self.waiting.remove(request)
        if request.num_cached_tokens is None:
            request.num_cached_tokens = match.num_tokens
            self.prefix_cache_queries += request.num_tokens if self._config.enable_prefix_caching else 0
            self.prefix_cache_hits += match.num_tokens
        request.move_to(RequestStatus.RUNNING)
        request.num_computed_tokens = match.num_tokens
        request.events.append(EngineCoreEvent("scheduled", now))
        insort(self.running, request, key=self._policy)

    def _add_row(self, request: Request, num_new: int, step: _Step) -> None:
        start, end = request.num_computed_tokens, request.num_computed_tokens + num_new
        row = ScheduledRequest(
            request_id=request.request_id,
            tokens=request.tokens.view(),
            start=start,
            num_tokens=num_new,
            block_tables=self._kv_cache.block_tables(request),
            samples=end == request.num_tokens + request.num_placeholders,
            sampling_params=request.sampling_params,
            num_late=max(0, end - max(start, request.num_tokens)),
            num_prompt_tokens=request.num_prompt_tokens,
        )
        request.num_computed_tokens = end
        request.num_placeholders += row.samples
        request.last_step = step.number
        self._kv_cache.publish(request, step.number)
        step.budget -= num_new
        step.rows.append(PlannedRow(request, row, request.generation))

    # Taking in a result

    def update(self, plan: SchedulerOutput, output: ModelRunnerOutput) -> list[RowResult]:
        """Append what `plan` sampled; the caller ends the requests whose result says so.

        Raises:
            ValueError: `plan` is not the oldest in flight, or `output` is not its result; the caller's fault.
        """
        rows = self.in_flight.oldest(plan)
        if output.step != plan.step or len(output.sampled_token_ids) != len(plan.requests):
            raise ValueError(
                f"a result of step {output.step} with {len(output.sampled_token_ids)} rows "
                f"is not that of step {plan.step} with {len(plan.requests)} rows"
            )
        results = [
            self._take_in(planned, token_ids, output.failed.get(planned.request.request_id))
            for planned, token_ids in zip(rows, output.sampled_token_ids, strict=True)
            if planned.counts
        ]
        self._settle()
        return results

    def _take_in(self, planned: PlannedRow, token_ids: list[int], failure: Cause | None) -> RowResult:
        request = planned.request
        request.num_placeholders -= planned.row.samples
        if failure is not None:
            self._kv_cache.forget(request)
            return RowResult(request, [], RequestStatus.FINISHED_ERROR, failure)
        new_token_ids, status = append_sampled(request, token_ids)
        return RowResult(request, new_token_ids, status)

    def rewind(self, plan: SchedulerOutput, now: float) -> None:
        """Undo `plan`, the oldest in flight, and with it all later ones, which build on it.

        Every request falls back to the start of its first undone row. What those plans published is retracted; who
        took it for computed is preempted and finds its true beginning anew.
        """
        self.in_flight.oldest(plan)
        retracted = self._kv_cache.retract()
        for planned in self.in_flight:
            if planned.counts:
                self._rewind_row(planned)
        for request in reversed(tuple(self.running)):
            if self._kv_cache.relies_on(request, retracted):
                self.preempt(request, now)
        self._settle()

    def _rewind_row(self, planned: PlannedRow) -> None:
        request = planned.request
        if request.status is RequestStatus.RUNNING:
            request.rewind(planned.row.start)
            self._kv_cache.rewind(request)
        else:
            request.rewind(0)

    def _settle(self) -> None:
        """The oldest plan in flight has ended."""
        self._kv_cache.settle(self.in_flight.settle())

    # Moving requests

    def add(self, request: Request) -> None:
        """Let `request` wait."""
        self.waiting.add(request)

    def preempt(self, request: Request, now: float) -> None:
        """Take back the blocks of a running request, which then waits before all that never ran."""
        self.running.remove(request)
        self._release_blocks(request)
        request.move_to(RequestStatus.PREEMPTED)
        request.num_computed_tokens = 0
        request.num_preemptions += 1
        self.num_preemptions += 1
        request.events.append(EngineCoreEvent("preempted", now))
        self._preempted_ids.append(request.request_id)
        self.waiting.add(request)

    def remove(self, request: Request) -> None:
        """Let go of a request that ends, wherever it is; rows in flight keep their blocks until settled."""
        if request.status is RequestStatus.RUNNING:
            self.running.remove(request)
            self._release_blocks(request)
        else:
            self.waiting.remove(request)

    def _release_blocks(self, request: Request) -> None:
        self._kv_cache.release(request, request.last_step if self.in_flight.has_row_of(request) else None)

    def check_invariants(self) -> None:
        """Check queues, statuses and what is in flight against each other.

        Raises:
            AssertionError: Some request is in two places or in none, or a count is off.
        """
        assert self.running == sorted(self.running, key=self._policy), f"running is out of order: {self.running}"
        assert len(self.running) <= self._config.max_num_seqs, f"{len(self.running)} requests run"
        assert all(request.status is RequestStatus.RUNNING for request in self.running), self.running
        assert not any(request.status is RequestStatus.RUNNING for request in self.waiting), list(self.waiting)
        assert all(request.num_computed_tokens == 0 for request in self.waiting), list(self.waiting)
        assert len(self.in_flight) <= self._capacity.max_concurrent_plans
        sampling = [planned.request for planned in self.in_flight if planned.row.samples and planned.counts]
        for request in [*self.running, *self.waiting]:
            assert not request.is_finished, f"{request} is still queued"
            assert request.num_placeholders == sampling.count(request), f"{request}: placeholders are not in flight"
            num_total = request.num_tokens + request.num_placeholders
            assert request.num_computed_tokens <= num_total <= request.max_num_tokens, f"{request}: counts"
        self._kv_cache.check_invariants(self.running)
