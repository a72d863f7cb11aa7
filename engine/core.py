"""The engine as a state machine: requests in, plans out, results in, outputs out.

Sans-I/O in the sense of h11: no clock, no randomness, no await. Its state is a function of the ordered sequence of its
calls and nothing else, so the same log gives the same plans. One owner calls it; the executor and all waiting are
outside::

    add, abort, pause, … ──▶ ┌────────────┐ ──▶ plan() ──▶ the executor ─┐
                             │ EngineCore │                              │
    take_outputs() ◀──────── └────────────┘ ◀── commit(), fail() ◀───────┘

Invariants: every request that was added gets exactly one output with a finish reason, its last; every way out passes
through `_finish`; what has left is in no queue, no map and no table.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Iterable

import msgspec

from engine.config import EngineConfig
from engine.errors import Cause
from engine.kv_cache.events import KVCacheEvent
from engine.kv_cache.manager import KVCacheManager
from engine.limits import Limits, suited
from engine.metrics import SchedulerStats
from engine.outputs import Capacity, FinishReason, GrammarMasks, Logprobs, ModelRunnerOutput, RequestId, SchedulerOutput
from engine.protocol import AbortReason, EngineCoreEvent, EngineCoreOutput, EngineCoreRequest, PauseMode, SessionPart
from engine.queue_deadlines import QueueDeadlines
from engine.request import Request, RequestStatus
from engine.scheduler.scheduler import RowResult, Scheduler
from engine.structured_output.grammar import Grammar, new_bitmasks

_BLOCKED = {RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR, RequestStatus.WAITING_FOR_STREAMING_REQ}
_NO_EVENTS: list[EngineCoreEvent] = []


class WaitsFor(enum.StrEnum):
    """What must happen before there is a plan again."""

    COMMIT = "commit"
    """The oldest plan in flight must end: it holds blocks, tokens or the last place in flight."""
    RESUME = "resume"
    """The engine is paused."""
    GRAMMAR = "grammar"
    """A grammar must be ready."""
    INPUT = "input"
    """A session's next part must come."""


class EngineCore:
    """Owns every request from `add` to its terminal output."""

    def __init__(
        self, config: EngineConfig, capacity: Capacity, *, hash_salt: bytes = b"", records_events: bool = False
    ) -> None:
        """Start without requests, for an executor that holds `capacity`.

        Args:
            config: Settings.
            capacity: What the executor can hold.
            hash_salt: Only cores of equal salt compute equal prefix hashes.
            records_events: Keep what changes in the prefix cache for `take_kv_events`, which must then be called.

        Raises:
            ConfigError: Prompts must be computed at once, and one of full length would never fit a step.
        """
        self.config = config = suited(config, capacity)
        self.capacity = capacity
        self._kv_cache = KVCacheManager(
            capacity.num_kv_blocks,
            capacity.block_size,
            enable_prefix_caching=config.enable_prefix_caching,
            hash_salt=hash_salt,
            groups=capacity.kv_cache_groups,
            max_in_flight=capacity.max_concurrent_plans * config.max_num_batched_tokens,
            records_events=records_events,
        )
        self._limits = Limits(config, capacity, self._kv_cache.max_blocks)
        self._scheduler = Scheduler(config, capacity, self._kv_cache)
        self._requests: dict[RequestId, Request] = {}
        self._blocked: dict[RequestId, Request] = {}
        self._outputs: list[EngineCoreOutput] = []
        self._finished_ids: list[RequestId] = []
        self._turns_awaiting_grammar: list[Request] = []
        self._queue_deadlines = QueueDeadlines(config.queue_timeout)
        self._num_arrivals = 0
        self._now = 0.0
        self._step = 0

    # Requests

    def add(self, request: EngineCoreRequest, now: float, *, awaits_grammar: bool = False) -> None:
        """Take over `request`; one that can never run gets its terminal output, with reason error, at once.

        With `awaits_grammar` it takes its place in the order, but does not start before `set_grammar`.

        Raises:
            ValueError: A request of this id has not ended; it goes on. The caller's fault.
        """
        if request.request_id in self._requests:
            raise ValueError(f"request id {request.request_id!r} is in use: ids are unique for the engine's life")
        self._now = now
        self._num_arrivals += 1
        refusal = self._limits.refusal(request, len(self._requests))
        if refusal is not None:
            request = msgspec.structs.replace(request, prompt_token_ids=[])
        taken = Request(request, self._num_arrivals, self.capacity.max_model_len)
        self._requests[taken.request_id] = taken
        self._scheduler.arrive(taken)
        if refusal is not None:
            self._finish(taken, RequestStatus.FINISHED_ERROR, cause=refusal)
            return
        if request.extras and request.extras["session"]:
            taken.session = deque()
        taken.events.append(EngineCoreEvent("queued", now))
        self._queue_deadlines.add(taken, now)
        if awaits_grammar:
            taken.move_to(RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR)
            self._blocked[taken.request_id] = taken
        else:
            self._scheduler.add(taken)

    def set_grammar(self, request_id: RequestId, grammar: Grammar | Cause) -> None:
        """Let a request that awaits a grammar start, or end one whose grammar cannot be had, or not go on.

        Ended ids are ignored.

        Raises:
            ValueError: The request awaits none; the caller's fault.
        """
        request = self._requests.get(request_id)
        if request is None:
            return
        if isinstance(grammar, Cause):
            self._finish(request, RequestStatus.FINISHED_ERROR, cause=grammar)
            return
        if request.status is not RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR:
            raise ValueError(f"{request} awaits no grammar")
        request.grammar = grammar
        self._unblock(request)

    def awaits_grammar(self, request_id: RequestId) -> bool:
        """Whether this request lives and waits for `set_grammar`."""
        request = self._requests.get(request_id)
        return request is not None and request.status is RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR

    def extend(self, part: SessionPart) -> None:
        """Add the next part of a session, or let it end after those it has; ended ids are ignored.

        A session that has as many parts to come as requests may wait is ended, with reason error, by one more. A turn
        whose part asks for a form of its text awaits a grammar, see `take_turns_awaiting_grammar`.

        Raises:
            ValueError: The request is no session, or its last part has come; the caller's fault.
        """
        request = self._requests.get(part.request_id)
        if request is None:
            return
        if request.session is None or (request.session and request.session[-1].is_last):
            raise ValueError(f"{request} takes no further part")
        awaits_it = request.status is RequestStatus.WAITING_FOR_STREAMING_REQ
        refusal = None if awaits_it or part.is_last else self._limits.part_refusal(len(request.session))
        if refusal is not None:
            self._finish(request, RequestStatus.FINISHED_ERROR, cause=refusal)
            return
        request.session.append(part)
        if awaits_it:
            self._begin_turn(request)

    def take_turns_awaiting_grammar(self) -> list[Request]:
        """Return the sessions whose new turn, which they say, awaits `set_grammar`, each once."""
        turns, self._turns_awaiting_grammar = self._turns_awaiting_grammar, []
        return [turn for turn in turns if self.awaits_grammar(turn.request_id)]

    def close_sessions(self) -> None:
        """Let every session end after the parts it has."""
        for request in list(self._requests.values()):
            parts = request.session
            if parts is not None and not (parts and parts[-1].is_last):
                self.extend(SessionPart(request.request_id, []))

    def abort(self, request_ids: Iterable[RequestId], reason: AbortReason = AbortReason.CLIENT) -> None:
        """End these requests now, whatever they do; tokens still in flight are dropped. Ended ids are ignored."""
        is_stop = reason is AbortReason.STOP_STRING
        status = RequestStatus.FINISHED_STOPPED if is_stop else RequestStatus.FINISHED_ABORTED
        for request_id in request_ids:
            request = self._requests.get(request_id)
            if request is not None:
                self._finish(request, status)

    def abort_all(self, reason: AbortReason) -> None:
        """End every request."""
        self.abort(list(self._requests), reason)

    # Steps

    def plan(self, now: float) -> SchedulerOutput | None:
        """Make the next plan, to be executed in this order and then committed or failed.

        Ends first whoever has waited for its first step longer than --queue-timeout allows. Returns None where nothing
        can run (`waits_for` says why) and no end is left to be told. The plan refers to buffers of the requests that
        do not change while it is in flight.
        """
        self.end_overdue(now)
        plan = self._scheduler.schedule(now, tuple(self._finished_ids))
        if plan is not None:
            self._finished_ids.clear()
        return plan

    def end_overdue(self, now: float) -> None:
        """End whoever has waited for its first step longer than --queue-timeout allows, as `plan` does."""
        self._now = now
        while (request := self._queue_deadlines.pop_overdue(now)) is not None:
            reason = f"behind {len(self._scheduler.running)} that run: try later"
            if request.status is RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR:
                reason = "for its grammar was not compiled: try a simpler one"
            message = f"the request waited for its first step longer than --queue-timeout {self.config.queue_timeout}"
            cause = Cause("QueueTimeout", f"{message} seconds, {reason}")
            self._finish(request, RequestStatus.FINISHED_ERROR, cause=cause)

    def grammar_masks(self, plan: SchedulerOutput) -> GrammarMasks | None:
        """Return the masks of the plan's `grammar_rows`, or None where it has none.

        Known as soon as the plan is made, for a request with a grammar has one token in flight at most. The row of a
        request that has ended since allows everything.
        """
        if not plan.grammar_rows:
            return None
        masks = new_bitmasks(len(plan.grammar_rows), self.capacity.vocab_size)
        for mask, row in zip(masks, plan.grammar_rows, strict=True):
            request = self._requests.get(plan.requests[row].request_id)
            if request is None or request.grammar is None:
                mask.fill(-1)
            else:
                request.grammar.fill_bitmask(mask)
        return masks

    def commit(self, plan: SchedulerOutput, output: ModelRunnerOutput, now: float) -> None:
        """Take in the result of the oldest plan in flight; rows whose request has ended meanwhile are dropped.

        Raises:
            ValueError: `plan` is not the oldest in flight, or `output` is not its result; the caller's fault.
        """
        self._now = now
        results = self._scheduler.update(plan, output, now)
        step = self._step = plan.step
        for result in results:
            request, token_ids, status, _ = result
            if status is None and not token_ids:
                continue  # a chunk of a prompt
            if status is not None or request.grammar is not None:
                self._conclude(result)
            elif request.events or request.logprobs is not None or request.prompt_logprobs:
                self._emit(request, token_ids)
            else:  # as most are: nothing to tell but tokens
                self._outputs.append(EngineCoreOutput(request.request_id, token_ids, step=step))

    def _conclude(self, result: RowResult) -> None:
        """Say what a step did to a request that ends by it, or whose grammar has a say."""
        request, token_ids, status, cause = result
        if request.grammar is not None:
            status, cause = self._told_grammar(request, request.grammar, token_ids, status, cause)
        if status is None:
            self._emit(request, token_ids)
        elif request.session is None or status is RequestStatus.FINISHED_ERROR:
            self._finish(request, status, token_ids, cause)
        else:
            self._end_turn(request, status, token_ids)

    def _told_grammar(
        self,
        request: Request,
        grammar: Grammar,
        token_ids: list[int],
        status: RequestStatus | None,
        cause: Cause | None,
    ) -> tuple[RequestStatus | None, Cause | None]:
        """Tell `grammar` its request's new tokens; return how that ends the request, and why.

        A text that is complete is a stop, whatever else its last token reached: there is nothing to go on with.
        """
        if cause is not None:
            failure = grammar.failure
            if failure is not None:
                cause = Cause("GrammarFailed", f"the grammar cannot go on: {failure}; ask for a simpler form")
            return status, cause
        told = token_ids[:-1] if status is RequestStatus.FINISHED_STOPPED else token_ids
        if not grammar.accept_tokens(told):
            request.stop_reason = None
            failure = grammar.failure or f"the grammar does not allow the sampled tokens {told}"
            return RequestStatus.FINISHED_ERROR, Cause("GrammarRejected", failure)
        if grammar.is_finished and status is not RequestStatus.FINISHED_STOPPED:
            request.stop_reason = None
            return RequestStatus.FINISHED_STOPPED, None
        return status, None

    def fail(self, plan: SchedulerOutput, cause: Cause, request_ids: Iterable[RequestId] | None = None) -> None:
        """The oldest plan in flight was not computed: end some requests for it and undo the rest.

        `request_ids` end with reason error; None means all whose row in the plan still counts. All others fall back
        to where the plan found them, in later plans in flight too: those are still to be committed or failed, and
        their results are dropped.

        Raises:
            ValueError: `plan` is not the oldest in flight; the caller's fault.
        """
        rows = self._scheduler.in_flight.oldest(plan)
        self._step = plan.step
        if request_ids is None:
            request_ids = [request.request_id for request, _, generation in rows if generation == request.generation]
        for request_id in request_ids:
            request = self._requests.get(request_id)
            if request is not None:
                self._finish(request, RequestStatus.FINISHED_ERROR, cause=cause)
        self._scheduler.rewind(plan, self._now)

    def take_kv_events(self) -> list[KVCacheEvent]:
        """Return what changed in the prefix cache since the last call, in order, and forget it."""
        return self._kv_cache.prefix_cache.take_events()

    def take_outputs(self) -> list[EngineCoreOutput]:
        """Return what happened since the last call, in order, and forget it."""
        outputs, self._outputs = self._outputs, []
        return outputs

    # Operations

    def pause(self, mode: PauseMode) -> None:
        """Stop: `abort` ends all requests, `wait` lets the running ones finish, `keep` freezes them.

        What is added meanwhile waits for `resume`. The pause has taken effect once `is_paused`.

        Raises:
            ValueError: `mode` is none of these.
        """
        self._scheduler.pause = PauseMode(mode)
        if self._scheduler.pause is PauseMode.ABORT:
            self.abort_all(AbortReason.CLIENT)

    def resume(self) -> None:
        """Undo `pause`."""
        self._scheduler.pause = None

    @property
    def pause_mode(self) -> PauseMode | None:
        """The pause that was asked for and not undone, whether or not it has taken effect."""
        return self._scheduler.pause

    @property
    def is_paused(self) -> bool:
        """Whether a pause has taken effect: no plan is in flight and, unless frozen, nothing runs."""
        mode = self._scheduler.pause
        still = mode is PauseMode.KEEP or not self._scheduler.running
        return mode is not None and still and not self._scheduler.in_flight

    def reset_prefix_cache(self, reset_running: bool = False) -> bool:
        """Forget all cached prefixes; with `reset_running` whoever runs is preempted and computes anew.

        Returns:
            Whether it was done: not while a block is in use, unless `reset_running`.
        """
        if reset_running:
            for request in reversed(tuple(self._scheduler.running)):
                self._scheduler.preempt(request, self._now)
        elif self._kv_cache.pool.num_used_blocks:
            return False
        self._kv_cache.reset_prefix_cache()
        return True

    # State

    @property
    def has_work(self) -> bool:
        """Whether a request lives, a plan is in flight, or the executor must still be told of an end."""
        return bool(self._requests or self._finished_ids or self._scheduler.in_flight)

    @property
    def waits_for(self) -> WaitsFor | None:
        """Why `plan` returned None although there is work; None where it would not."""
        if self._scheduler.in_flight:
            return WaitsFor.COMMIT
        mode = self._scheduler.pause
        if self._requests and (mode is PauseMode.KEEP or (mode is not None and not self._scheduler.running)):
            return WaitsFor.RESUME
        if self._blocked and len(self._blocked) == len(self._requests):
            statuses = {request.status for request in self._blocked.values()}
            awaits_grammar = RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR in statuses
            return WaitsFor.GRAMMAR if awaits_grammar else WaitsFor.INPUT
        return None

    @property
    def next_deadline(self) -> float:
        """When `plan` or `end_overdue` must be called although nothing else happened; infinity for never."""
        return self._queue_deadlines.next

    def stats(self) -> SchedulerStats:
        """Count requests, blocks and what happened since the start."""
        first, resumed = self._scheduler.admission.first_counts, self._scheduler.admission.resumed_counts
        return SchedulerStats(
            num_running=len(self._scheduler.running),
            num_waiting=len(self._scheduler.waiting) + len(self._blocked),
            num_kv_blocks=self._kv_cache.pool.num_blocks,
            num_used_blocks=self._kv_cache.pool.num_used_blocks,
            num_preemptions=self._scheduler.num_preemptions,
            prefix_cache_queries=first.num_queries,
            prefix_cache_hits=first.num_hits,
            prefix_cache_requests=first.num_requests,
            preempted_prefix_cache_queries=resumed.num_queries,
            preempted_prefix_cache_hits=resumed.num_hits,
            preempted_prefix_cache_requests=resumed.num_requests,
        )

    def check_invariants(self) -> None:
        """Derive all bookkeeping again and compare; for tests.

        Raises:
            AssertionError: Something leaked, is owned twice, or is counted wrongly.
        """
        live, blocked = {*self._requests.values()}, self._blocked.values()
        self._queue_deadlines.check_invariants(live)
        for request in blocked:
            assert request in live, f"{request} has ended and is kept"
            assert request.status in _BLOCKED, f"{request} is not blocked"
        self._scheduler.check_invariants(live.difference(blocked))

    # The ways out

    def _unblock(self, request: Request) -> None:
        """Let a request wait for its step that waited for something else."""
        self._blocked.pop(request.request_id, None)
        request.move_to(RequestStatus.WAITING)
        self._scheduler.add(request)

    def _end_turn(self, request: Request, status: RequestStatus, new_token_ids: list[int]) -> None:
        """End a session's turn with `status`: the next part begins another one, or will when it comes."""
        assert request.session is not None
        if request.session and request.session[0].is_last:
            self._finish(request, status, new_token_ids)
            return
        self._scheduler.end_turn(request)
        request.move_to(RequestStatus.WAITING_FOR_STREAMING_REQ)
        self._blocked[request.request_id] = request
        self._emit(request, new_token_ids, turn_reason=status.finish_reason)
        request.stop_reason = None
        if request.session:
            self._begin_turn(request)

    def _begin_turn(self, request: Request) -> None:
        """Go on with the first part that a session waiting for input has got."""
        assert request.session is not None
        part = request.session.popleft()
        if part.is_last:
            self._finish(request, RequestStatus.FINISHED_STOPPED)
            return
        num_before = request.num_tokens - bool(request.num_output_tokens)
        refusal = self._limits.prompt_refusal(part.prompt_token_ids, num_before, part.sampling_params)
        if refusal is not None:
            self._finish(request, RequestStatus.FINISHED_ERROR, cause=refusal)
            return
        request.begin_turn(part, self.capacity.max_model_len)
        self._scheduler.begin_turn(request)
        if part.sampling_params.structured_outputs is None:
            self._unblock(request)
            return
        request.move_to(RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR)
        self._turns_awaiting_grammar.append(request)

    def _finish(
        self,
        request: Request,
        status: RequestStatus,
        new_token_ids: list[int] | None = None,
        cause: Cause | None = None,
    ) -> None:
        """End `request`: the one way out, which frees everything and emits the terminal output."""
        self._scheduler.remove(request)
        self._blocked.pop(request.request_id, None)
        request.move_to(status)
        del self._requests[request.request_id]
        self._queue_deadlines.sweep(len(self._requests))
        self._finished_ids.append(request.request_id)
        self._emit(request, new_token_ids or [], cause)

    def _emit(
        self,
        request: Request,
        new_token_ids: list[int],
        cause: Cause | None = None,
        turn_reason: FinishReason | None = None,
    ) -> None:
        """Queue an output; the first one tells how many prompt tokens were cached."""
        events, num_cached_tokens = _NO_EVENTS, None
        if request.events:
            events, request.events = request.events, []
            if any(event.kind == "queued" for event in events):
                num_cached_tokens = request.num_cached_tokens
        logprobs = prompt_logprobs = None
        if request.logprobs is not None:
            logprobs, request.logprobs = request.logprobs.part(0, len(new_token_ids)), None
        if request.prompt_logprobs and new_token_ids:
            prompt_logprobs, request.prompt_logprobs = Logprobs.join(request.prompt_logprobs), []
            num_told = max(0, request.num_tokens_before - 1)  # those of a session's earlier parts and turns
            prompt_logprobs = prompt_logprobs.part(num_told, len(prompt_logprobs))
        self._outputs.append(
            EngineCoreOutput(
                request_id=request.request_id,
                new_token_ids=new_token_ids,
                logprobs=logprobs,
                prompt_logprobs=prompt_logprobs,
                finish_reason=request.status.finish_reason if turn_reason is None else None,
                stop_reason=request.stop_reason,
                num_cached_tokens=num_cached_tokens,
                events=events,
                error=cause,
                step=self._step,
                turn_reason=turn_reason,
            )
        )
