"""Who gets how many tokens in this step.

There is no prefill or decode phase: in each step a request's `num_computed_tokens` catches up with its tokens, as far
as one token budget allows. First come the running requests in the policy's order, then the waiting ones while there is
room. Where a running request finds no free block, the last of the running ones is preempted: it gives its blocks
back, keeps its tokens, and computes again what the prefix cache has lost by the time it is admitted anew.

Plans may be made before earlier ones are committed. What a plan in flight will yield is counted ahead::

    tokens        known ............ │ placeholders │        num_computed_tokens moves when a plan is made;
    a plan's row     start ──── num_tokens ───────▶ │        a placeholder becomes a token when it is committed

Invariants: the running list is sorted; every request has at most one row a plan; a row in flight is wanted unless its
request has ended or was rewound since; a preempted request waits until its rows in flight are committed, for they
still yield tokens; nobody yields its place more than `MAX_YIELDS` times. The phase-free step is that of vLLM v1.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence

from engine.config import EngineConfig
from engine.errors import Cause
from engine.kv_cache.block_tables import BlockTables
from engine.kv_cache.manager import KVCacheManager
from engine.outputs import BlockId, Capacity, ModelRunnerOutput, RequestId, ScheduledRequest, SchedulerOutput
from engine.protocol import EngineCoreEvent, PauseMode
from engine.request import PREEMPTED, RUNNING, Request, RequestStatus
from engine.scheduler.admission import MAX_YIELDS, Admission, is_protected
from engine.scheduler.in_flight import PlannedRow, PlansInFlight
from engine.scheduler.policy import POLICIES
from engine.stop_check import append_sampled

RowResult = tuple[Request, list[int], RequestStatus | None, Cause | None]
"""What a step did to one request: the tokens it got, the status it must move to if it ended, and why if it failed."""


class _Step:
    """A plan being made."""

    def __init__(self, number: int, budget: int, now: float) -> None:
        self.number = number
        self.budget = budget
        self.now = now
        self.rows: list[PlannedRow] = []
        self.grammar_rows: list[int] = []
        self.has_preempted = False


class Scheduler:
    """Makes plans and takes in their results; owns the queues, and all calls to the KV cache."""

    def __init__(self, config: EngineConfig, capacity: Capacity, kv_cache: KVCacheManager) -> None:
        """Start with nothing waiting or running."""
        self.running: list[Request] = []
        self.in_flight = PlansInFlight()
        self.pause: PauseMode | None = None
        self.num_preemptions = 0
        self._policy = POLICIES[config.scheduling_policy]()
        self._config = config
        self._capacity = capacity
        self._kv_cache = kv_cache
        self.admission = Admission(
            config, self._policy, self.running, self.in_flight, kv_cache, capacity.max_concurrent_plans
        )
        self.waiting = self.admission.waiting
        self._preempted_ids: list[RequestId] = []

    # Making a plan

    def schedule(self, now: float, finished_request_ids: tuple[RequestId, ...]) -> SchedulerOutput | None:
        """Make the next plan, telling `finished_request_ids`, or return None where there is nothing to tell or run."""
        if len(self.in_flight) >= self._capacity.max_concurrent_plans:
            return None
        step = _Step(self.in_flight.last_step + 1, self._config.max_num_batched_tokens, now)
        if self.pause is None and self.waiting:
            first = self.waiting.peek()
            for victim in self.admission.displaced():
                self._yield_place(victim, now, first)
        if self.running and self.pause is not PauseMode.KEEP:
            self._schedule_running(step)
        if self.pause is None and self.waiting and not step.has_preempted:
            self._admit_waiting(step)
        if not step.rows and not finished_request_ids:
            return None
        plan = SchedulerOutput(
            step=step.number,
            requests=tuple([row for _, row, _ in step.rows]),
            finished_request_ids=finished_request_ids,
            preempted_request_ids=tuple(self._preempted_ids),
            num_tokens=self._config.max_num_batched_tokens - step.budget,
            grammar_rows=tuple(step.grammar_rows),
            num_common_prefix_blocks=self._kv_cache.num_common_prefix_blocks(self.running),
        )
        self._preempted_ids.clear()
        self.in_flight.push(plan, step.rows)
        return plan

    def _schedule_running(self, step: _Step) -> None:
        for request in tuple(self.running):
            if step.budget == 0 or request.status is not RUNNING:
                return  # victims are taken from the end, so none that still runs follows a preempted one
            num_new = self._num_new_tokens(request, request.num_computed_tokens, step.budget)
            if num_new == 0:
                continue
            num_tokens = request.num_computed_tokens + num_new
            tables = self._kv_cache.grow(request, num_tokens) or self._make_room(request, num_tokens, step)
            if tables is None:
                return
            self._add_row(request, num_new, tables, step)

    def _admit_waiting(self, step: _Step) -> None:
        """Admit who waits, in order, while there is room; a few may start before one that does not fit."""
        while step.budget > 0 and (request := self.admission.next()) is not None:
            match = self.admission.match(request, step.budget)
            num_new = self._num_new_tokens(request, match.num_tokens, step.budget) if match is not None else 0
            if match is not None and num_new:
                self.admission.admit(request, match)
                self._start_running(request, match.num_tokens, step.now)
                tables = self._kv_cache.grow(request, request.num_computed_tokens + num_new)
                assert tables is not None, f"{request} was admitted without room for its first tokens"
                self._add_row(request, num_new, tables, step)
            elif not self.admission.pass_over(request):
                break
        self.admission.close()

    def _num_new_tokens(self, request: Request, start: int, budget: int) -> int:
        """Return how many tokens `request` gets in this step, computing from `start` on; 0 passes it over."""
        num_total = request.num_tokens + request.num_placeholders
        if num_total >= request.max_num_tokens:
            return 0  # what is in flight reaches the length limit
        if request.num_placeholders and request.grammar is not None:
            return 0  # the mask for its next token depends on the one in flight
        num_new = num_total - start
        if num_new == 1:
            return 1
        if self._config.long_prefill_token_threshold:
            num_new = min(num_new, self._config.long_prefill_token_threshold)
        if num_new > budget:
            return budget if self._config.enable_chunked_prefill else 0
        return num_new

    def _make_room(self, request: Request, num_tokens: int, step: _Step) -> BlockTables | None:
        """Preempt from the end of the running list until the tables of `request` can grow; None if it must wait."""
        while not self._kv_cache.has_held_blocks:  # a commit would give blocks back, as soon as preempting more
            victim = self.running[-1]
            self._yield_place(victim, step.now)
            step.has_preempted = True
            if victim is request:
                return None
            tables = self._kv_cache.grow(request, num_tokens)
            if tables is not None:
                return tables
        return None

    def _start_running(self, request: Request, num_cached_tokens: int, now: float) -> None:
        request.move_to(RUNNING)
        if request.num_cached_tokens is None:
            request.num_cached_tokens = num_cached_tokens
        request.num_computed_tokens = request.num_processed_tokens = num_cached_tokens
        request.events.append(EngineCoreEvent("scheduled", now))
        self._policy.started(request)
        insort(self.running, request, key=_rank)

    def _add_row(self, request: Request, num_new: int, tables: BlockTables, step: _Step) -> None:
        start, num_tokens = request.num_computed_tokens, request.num_tokens
        end = start + num_new
        samples = end == num_tokens + request.num_placeholders
        row = ScheduledRequest(
            request_id=request.request_id,
            tokens=request.tokens.view(),
            start=start,
            num_tokens=num_new,
            block_tables=tables.views,
            samples=samples,
            sampling_params=request.sampling_params,
            num_late=0 if end <= num_tokens else end - max(start, num_tokens),
            num_prompt_tokens=request.num_prompt_tokens,
        )
        request.num_computed_tokens = end
        request.num_placeholders += samples
        request.last_step = step.number
        if end >= tables.publication_due:
            self._kv_cache.publish(request, step.number)
        step.budget -= num_new
        if samples and request.grammar is not None:
            step.grammar_rows.append(len(step.rows))
        step.rows.append((request, row, request.generation))

    # Taking in a result

    def update(self, plan: SchedulerOutput, output: ModelRunnerOutput, now: float) -> list[RowResult]:
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
        failed = output.failed
        if failed:
            self._distrust(rows, failed, now)
        if output.logprobs is not None or output.prompt_logprobs:
            _keep_logprobs(rows, output)
        results = [
            self._take_in(request, row, token_ids, failed)
            for (request, row, generation), token_ids in zip(rows, output.sampled_token_ids, strict=True)
            if generation == request.generation
        ]
        self._settle()
        return results

    def _distrust(self, oldest: list[PlannedRow], failed: dict[RequestId, Cause], now: float) -> None:
        """Let nobody use what rows of the `oldest` plan that failed alone have computed, nor anything that rests on it.

        A row computes from blocks that rows before it have filled, of its own plan or an earlier one. So one pass in
        their order finds all suspect blocks, those of requests that have left included. Whoever was misled computes
        anew: what its rows gave, be it a failure, counts for nothing.
        """
        suspect: set[BlockId] = set()
        guilty: set[Request] = set()
        misled: set[Request] = set()
        for index, (request, row, generation) in enumerate(self.in_flight.rows()):
            read, written = self._kv_cache.trace(row)
            is_misled = not suspect.isdisjoint(read)
            if is_misled or (index < len(oldest) and request.request_id in failed):
                suspect |= written
                if generation == request.generation and request not in guilty:
                    (misled if is_misled else guilty).add(request)
        self._kv_cache.forget(suspect)
        for request in reversed(tuple(self.running)):
            if request in misled:
                self.preempt(request, now)
        for request in misled:
            request.rewind(0)

    def _take_in(
        self, request: Request, row: ScheduledRequest, token_ids: list[int], failed: dict[RequestId, Cause]
    ) -> RowResult:
        request.num_placeholders -= row.samples
        if request.status is RUNNING:
            request.num_processed_tokens = row.start + row.num_tokens
        if failed and request.request_id in failed:
            return request, [], RequestStatus.FINISHED_ERROR, failed[request.request_id]
        if row.samples and not token_ids:
            cause = Cause("NothingSampled", "the model runner gave no token and no reason")
            return request, [], RequestStatus.FINISHED_ERROR, cause
        new_token_ids, status = append_sampled(request, token_ids)
        return request, new_token_ids, status, None

    def rewind(self, plan: SchedulerOutput, now: float) -> None:
        """Undo `plan`, the oldest in flight, and with it all later ones, which build on it.

        Every request falls back to the start of its first undone row. What those plans published is retracted; who
        took it for computed is preempted and finds its true beginning anew.
        """
        self.in_flight.oldest(plan)
        retracted = self._kv_cache.retract()
        for request, row, _ in self.in_flight.wanted():
            if request.status is RUNNING:
                request.rewind(row.start)
                self._kv_cache.rewind(request)
            else:
                request.rewind(0)
        for request in reversed(tuple(self.running)):
            if self._kv_cache.relies_on(request, retracted):
                self.preempt(request, now)
        self._settle()

    def _settle(self) -> None:
        """The oldest plan in flight has ended."""
        self._kv_cache.settle(self.in_flight.settle())

    # Moving requests

    def arrive(self, request: Request) -> None:
        """Give `request` its place in the order; it waits once it is added."""
        request.place = self._policy.place(request)

    def begin_turn(self, request: Request) -> None:
        """Give a session that has got its next part its place; it waits once it is added."""
        request.place = self._policy.place_turn(request)

    def add(self, request: Request) -> None:
        """Let `request` wait to be admitted."""
        self.waiting.add(request)

    def preempt(self, request: Request, now: float, made_way_for: Request | None = None) -> None:
        """Take back the blocks of a running request, which then waits before those of its urgency that never ran."""
        self._stop_running(request)
        request.move_to(PREEMPTED)
        request.num_preemptions += 1
        self.num_preemptions += 1
        request.events.append(EngineCoreEvent("preempted", now))
        self._preempted_ids.append(request.request_id)
        request.place = self._policy.place_again(request, made_way_for)
        self.waiting.add(request)

    def _yield_place(self, request: Request, now: float, made_way_for: Request | None = None) -> None:
        request.num_yields += 1
        self.preempt(request, now, made_way_for)

    def end_turn(self, request: Request) -> None:
        """Let go of a session whose turn is done, wherever it is; its rows in flight are void."""
        self._leave(request)
        request.rewind(0)

    def remove(self, request: Request) -> None:
        """Let go of a request that ends, wherever it is; rows in flight keep their blocks until settled."""
        self._leave(request)
        self.admission.forget(request)
        self._kv_cache.forget_match(request)
        request.generation += 1
        self._policy.ended(request)

    def _leave(self, request: Request) -> None:
        if request.status is RUNNING:
            self._stop_running(request)
        else:
            self.waiting.remove(request)

    def _stop_running(self, request: Request) -> None:
        self.running.remove(request)
        self._policy.stopped(request)
        self._kv_cache.release(request, request.last_step if self.in_flight.has_row_of(request) else None)
        request.num_computed_tokens = request.num_processed_tokens = 0

    def check_invariants(self, live: set[Request]) -> None:
        """Check queues, statuses and what is in flight against each other and against who is here.

        Raises:
            AssertionError: Some request is in two places or in none, or a count is off.
        """
        running, waiting, max_overtakes = self.running, self.waiting.unordered(), self._config.max_overtakes
        assert len(running) + len(waiting) == len(live), "a request is queued twice, or not at all"
        assert live == {*running, *waiting}, "queues and live requests differ"
        ranks = [*map(_rank, running)]
        assert ranks == sorted(ranks), f"running is out of order: {running}"
        assert len(running) <= self._config.max_num_seqs, f"{len(running)} requests run"
        assert len(self.in_flight) <= self._capacity.max_concurrent_plans
        past = [step for step in self._kv_cache.awaited_steps if step not in self.in_flight.steps]
        assert not past, f"steps {past} have ended, and what they published or held is still theirs"
        for request in running:
            assert request.status is RUNNING, f"{request} is in the running list"
        for request in waiting:
            assert request.status is not RUNNING, f"{request} waits"
            assert request.num_computed_tokens == 0, f"{request} waits and has computed tokens"
        num_sampling = dict.fromkeys(live, 0)
        for request, row, _ in self.in_flight.wanted():
            assert request in live, f"{request} has ended and yet its row is wanted"
            num_sampling[request] += row.samples
        for request, num_placeholders in num_sampling.items():
            num_total = request.num_tokens + num_placeholders
            assert request.num_placeholders == num_placeholders, f"{request}: placeholders are not in flight"
            assert request.num_processed_tokens <= request.num_computed_tokens <= num_total, f"{request}: counts"
            assert num_total <= request.max_num_tokens, f"{request}: too many tokens are coming"
            assert request.num_yields <= MAX_YIELDS, f"{request} had to yield {request.num_yields} times"
            assert request.num_overtaken <= max_overtakes, f"{request}: {request.num_overtaken} overtook it"
        self._kv_cache.check_invariants(running)


def _keep_logprobs(rows: Sequence[PlannedRow], output: ModelRunnerOutput) -> None:
    """Lay what the step gave with its requests, for the core to tell; a prompt computed anew starts anew."""
    of_rows = output.logprobs or [None] * len(rows)
    for (request, row, generation), logprobs in zip(rows, of_rows, strict=True):
        if generation != request.generation:
            continue
        request.logprobs = logprobs
        chunk = (output.prompt_logprobs or {}).get(request.request_id)
        if chunk is not None and not request.num_output_tokens:
            request.prompt_logprobs = [chunk] if row.start == 0 else [*request.prompt_logprobs, chunk]


def _rank(request: Request) -> tuple[bool, int, int]:
    """Return the order of the running list: who has yielded often enough first, then by the policy."""
    return not is_protected(request), *request.place
