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
import math
from collections import deque
from collections.abc import Iterable

import msgspec

from engine.config import EngineConfig
from engine.errors import Cause, ConfigError
from engine.kv_cache.manager import KVCacheManager
from engine.kv_cache.spec import num_blocks_for
from engine.metrics import SchedulerStats
from engine.outputs import Capacity, GrammarMasks, ModelRunnerOutput, RequestId, SchedulerOutput
from engine.protocol import AbortReason, EngineCoreEvent, EngineCoreOutput, EngineCoreRequest, PauseMode
from engine.request import Request, RequestStatus
from engine.scheduler.scheduler import Scheduler


class WaitsFor(enum.StrEnum):
    """What must happen before there is a plan again."""

    COMMIT = "commit"
    """The oldest plan in flight must end: it holds blocks, tokens or the last place in flight."""
    RESUME = "resume"
    """The engine is paused."""


class EngineCore:
    """Owns every request from `add` to its terminal output."""

    def __init__(self, config: EngineConfig, capacity: Capacity, *, hash_salt: bytes = b"") -> None:
        """Start without requests, for an executor that holds `capacity`.

        Raises:
            ConfigError: Chunked prefill is off and a prompt of full length would never fit a step.
        """
        if not config.enable_chunked_prefill and config.max_num_batched_tokens < capacity.max_model_len:
            raise ConfigError(
                f"without chunked prefill --max-num-batched-tokens {config.max_num_batched_tokens} must be at least "
                f"the context of {capacity.max_model_len} tokens: raise it or lower --max-model-len"
            )
        self.config = config
        self.capacity = capacity
        self._kv_cache = KVCacheManager(
            capacity.num_kv_blocks,
            capacity.block_size,
            enable_prefix_caching=config.enable_prefix_caching,
            hash_salt=hash_salt,
        )
        self._scheduler = Scheduler(config, capacity, self._kv_cache)
        self._requests: dict[RequestId, Request] = {}
        self._outputs: list[EngineCoreOutput] = []
        self._finished_ids: list[RequestId] = []
        self._queue_deadlines: deque[tuple[float, Request]] = deque()
        self._num_arrivals = 0
        self._now = 0.0
        self._step = 0

    # Requests

    def add(self, request: EngineCoreRequest, now: float) -> None:
        """Take over `request`; one that can never run gets its terminal output, with reason error, at once.

        Raises:
            ValueError: A request of this id has not ended; it goes on. The caller's fault.
        """
        if request.request_id in self._requests:
            raise ValueError(f"request id {request.request_id!r} is in use: ids are unique for the engine's life")
        self._now = now
        self._num_arrivals += 1
        refusal = self._refusal(request)
        if refusal is not None:
            request = msgspec.structs.replace(request, prompt_token_ids=[])
        taken = Request(request, self._num_arrivals, self.capacity.max_model_len)
        self._requests[taken.request_id] = taken
        if refusal is not None:
            self._finish(taken, RequestStatus.FINISHED_ERROR, cause=refusal)
            return
        taken.events.append(EngineCoreEvent("queued", now))
        if self.config.queue_timeout is not None:
            self._queue_deadlines.append((now + self.config.queue_timeout, taken))
        self._scheduler.add(taken)

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
        self._now = now
        self._end_overdue(now)
        plan = self._scheduler.schedule(now, tuple(self._finished_ids))
        if plan is not None:
            self._finished_ids.clear()
        return plan

    def grammar_masks(self, plan: SchedulerOutput) -> GrammarMasks | None:
        """Return the masks of the plan's `grammar_rows`, or None where it has none, as today no plan has."""
        return None

    def commit(self, plan: SchedulerOutput, output: ModelRunnerOutput, now: float) -> None:
        """Take in the result of the oldest plan in flight; rows whose request has ended meanwhile are dropped.

        Raises:
            ValueError: `plan` is not the oldest in flight, or `output` is not its result; the caller's fault.
        """
        self._now = now
        results = self._scheduler.update(plan, output)
        self._step = plan.step
        for result in results:
            if result.status is not None:
                self._finish(result.request, result.status, result.new_token_ids, result.cause)
            elif result.new_token_ids:
                self._emit(result.request, result.new_token_ids)

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
            request_ids = [planned.request.request_id for planned in rows if planned.counts]
        for request_id in request_ids:
            request = self._requests.get(request_id)
            if request is not None:
                self._finish(request, RequestStatus.FINISHED_ERROR, cause=cause)
        self._scheduler.rewind(plan, self._now)

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
        return None

    @property
    def next_deadline(self) -> float:
        """When `plan` must be called again at the latest although nothing else happened; infinity for never."""
        while self._queue_deadlines and self._queue_deadlines[0][1].status is not RequestStatus.WAITING:
            self._queue_deadlines.popleft()
        return self._queue_deadlines[0][0] if self._queue_deadlines else math.inf

    def stats(self) -> SchedulerStats:
        """Count requests, blocks and what happened since the start."""
        return SchedulerStats(
            num_running=len(self._scheduler.running),
            num_waiting=len(self._scheduler.waiting),
            num_kv_blocks=self._kv_cache.pool.num_blocks,
            num_used_blocks=self._kv_cache.pool.num_used_blocks,
            num_preemptions=self._scheduler.num_preemptions,
            prefix_cache_queries=self._scheduler.prefix_cache_queries,
            prefix_cache_hits=self._scheduler.prefix_cache_hits,
        )

    def check_invariants(self) -> None:
        """Derive all bookkeeping again and compare; for tests.

        Raises:
            AssertionError: Something leaked, is owned twice, or is counted wrongly.
        """
        queued = [*self._scheduler.running, *self._scheduler.waiting]
        by_id = {request.request_id: request for request in queued}
        assert len(by_id) == len(queued), "a request is queued twice"
        assert by_id == self._requests, "queues and live requests differ"
        self._scheduler.check_invariants()

    # The ways out

    def _refusal(self, request: EngineCoreRequest) -> Cause | None:
        """Say why `request` can never run here, with the numbers, or None if it can."""
        num_prompt = len(request.prompt_token_ids)
        max_len, params = self.capacity.max_model_len, request.sampling_params
        if request.extras:
            return Cause("InvalidRequest", f"extras {sorted(request.extras)} are not supported by this version")
        if params.n != 1:
            return Cause("InvalidRequest", f"n is {params.n}: a request in the engine is one completion")
        if num_prompt == 0:
            return Cause("InvalidRequest", "the prompt has no tokens; it needs at least one")
        lowest, highest = min(request.prompt_token_ids), max(request.prompt_token_ids)
        if lowest < 0 or highest >= self.capacity.vocab_size:
            message = (
                f"prompt token ids are from {lowest} to {highest}, allowed are 0 to {self.capacity.vocab_size - 1}"
            )
            return Cause("InvalidRequest", message)
        if num_prompt >= max_len:
            message = f"the prompt has {num_prompt} tokens and the context holds {max_len}, one of them to generate"
            return Cause("PromptTooLong", f"{message}: shorten the prompt or raise --max-model-len")
        num_total = max_len if params.max_tokens is None else min(max_len, num_prompt + params.max_tokens)
        num_blocks = num_blocks_for(num_total - 1, self.capacity.block_size)  # the last token's K/V is never needed
        if num_blocks > self._kv_cache.pool.num_blocks:
            message = f"prompt of {num_prompt} and max_tokens {params.max_tokens} need {num_blocks} KV blocks of "
            message += f"{self.capacity.block_size} tokens, there are {self._kv_cache.pool.num_blocks}"
            return Cause("PromptTooLong", f"{message}: lower max_tokens or raise --kv-cache-memory-bytes")
        return None

    def _end_overdue(self, now: float) -> None:
        while self.next_deadline <= now:
            _, request = self._queue_deadlines.popleft()
            message = f"the request waited for its first step longer than --queue-timeout {self.config.queue_timeout}"
            cause = Cause(
                "QueueTimeout", f"{message} seconds, behind {len(self._scheduler.running)} that run: try later"
            )
            self._finish(request, RequestStatus.FINISHED_ERROR, cause=cause)

    def _finish(
        self,
        request: Request,
        status: RequestStatus,
        new_token_ids: list[int] | None = None,
        cause: Cause | None = None,
    ) -> None:
        """End `request`: the one way out, which frees everything and emits the terminal output."""
        self._scheduler.remove(request)
        request.move_to(status)
        del self._requests[request.request_id]
        self._finished_ids.append(request.request_id)
        self._emit(request, new_token_ids or [], cause)

    def _emit(self, request: Request, new_token_ids: list[int], cause: Cause | None = None) -> None:
        """Queue an output; the first one tells how many prompt tokens were cached."""
        events, request.events = request.events, []
        is_first = any(event.kind == "queued" for event in events)
        self._outputs.append(
            EngineCoreOutput(
                request_id=request.request_id,
                new_token_ids=new_token_ids,
                finish_reason=request.status.finish_reason,
                stop_reason=request.stop_reason,
                num_cached_tokens=request.num_cached_tokens if is_first else None,
                events=events,
                error=cause,
                step=self._step,
            )
        )
