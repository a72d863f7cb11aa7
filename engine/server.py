"""The core under Trio: receive, step, send, in one nursery.

::

    inbox ──receive task──▶ waiting messages ──▶ step task ──▶ outbox ──send task──▶ client
                                                   │  ▲
                                             plan  ▼  │  result
                                                 executor's thread

The step task alone touches the core. Before each plan it takes everything that waits; between a result and its commit
it takes what came meanwhile, so that an abort is early yet never overtakes its own add. Plans may be in flight up to
the executor's depth; commits come in plan order. Where there is work and no plan, it waits for the message that ends
that state. Nothing here polls.
"""

from __future__ import annotations

import logging
import os
from collections import deque
from collections.abc import Awaitable, Callable
from typing import NamedTuple

import trio

from engine.config import EngineConfig
from engine.core import EngineCore
from engine.errors import Cause, ConfigError, ExecutorDead, ModelError
from engine.executor.base import Execution, Executor
from engine.metrics import SchedulerStats
from engine.outputs import SchedulerOutput
from engine.protocol import (
    AbortReason,
    AbortRequest,
    Acknowledge,
    ClientMessage,
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineDead,
    EngineMessage,
    EngineReady,
    EngineStopped,
    Pause,
    ResetPrefixCache,
    Resume,
    Shutdown,
    StartProgress,
    UtilityCall,
    UtilityResult,
)

logger = logging.getLogger(__name__)

LAST_WORD_TIMEOUT_S = 5.0
"""How long an engine that ends waits for its last word to be acknowledged."""

Receive = Callable[[], Awaitable[list[ClientMessage]]]
Send = Callable[[EngineMessage], None]


class _InFlight(NamedTuple):
    plan: SchedulerOutput
    execution: Execution


class EngineCoreServer:
    """One engine: executor, core and the tasks that join them to a client. `run` is its whole life."""

    def __init__(
        self, config: EngineConfig, executor: Executor, receive: Receive, send: Send, *, engine_index: int = 0
    ) -> None:
        """Own `executor` from `run` on. `receive` waits for messages, `send` never waits."""
        self._config = config
        self._executor = executor
        self._receive = receive
        self._send = send
        self._engine_index = engine_index
        self._phase = ""
        self._waiting: deque[ClientMessage] = deque()
        self._woken = trio.Event()
        self._acknowledged = trio.Event()
        self._is_stopping = False
        self._pausing: list[UtilityCall] = []
        self._results: list[UtilityResult] = []
        self._outbox_send, self._outbox_receive = trio.open_memory_channel[EngineMessage](float("inf"))
        self._told_stats: SchedulerStats | None = None
        self._failed_last_step = False
        self._newest_step = 0
        self._follows_failure_until = 0

    async def run(self) -> Cause | None:
        """Start, serve until told to stop, say the last word, free everything. Returns what ended it, None if asked.

        Cancelling it ends the engine at the next step boundary without a last word.
        """
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._receive_task)
                cause = await self._serve()
                last_word = (
                    EngineStopped(self._engine_index) if cause is None else EngineDead(cause, self._engine_index)
                )
                self._send(last_word)
                with trio.move_on_after(LAST_WORD_TIMEOUT_S):
                    await self._acknowledged.wait()
                nursery.cancel_scope.cancel()
        finally:
            await self._executor.aclose()
        return cause

    async def _serve(self) -> Cause | None:
        try:
            core = await self._start()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._send_task)
                nursery.start_soon(self._step_task, core)
        except Exception as error:  # the step's door: whatever broke is the engine's end, with its cause
            cause = Cause.of(error, self._phase)
            # What the operator can mend is told by the front, in one line.
            level = logging.DEBUG if isinstance(error, ConfigError | ModelError) else logging.ERROR
            logger.log(level, "%s\n%s", cause, cause.traceback)
            self._flush()
            return cause
        return None

    # -- start ---------------------------------------------------------------------------------------------------

    async def _start(self) -> EngineCore:
        capacity = await self._executor.start(self._config, self._enter_phase)
        self._enter_phase("scheduler", 0, 1)
        salt = (self._config.prefix_hash_seed or "").encode()
        core = EngineCore(self._config, capacity, hash_salt=salt)
        self._phase = ""
        self._send(EngineReady.of(capacity, engine_index=self._engine_index, pid=os.getpid()))
        return core

    def _enter_phase(self, phase: str, done: int, total: int) -> None:
        if phase != self._phase:
            logger.info("starting: %s", phase)
        self._phase = phase
        self._send(StartProgress(phase, done, total, self._engine_index))

    # -- the tasks -----------------------------------------------------------------------------------------------

    async def _receive_task(self) -> None:
        while True:
            for message in await self._receive():
                if isinstance(message, Acknowledge):
                    self._acknowledged.set()
                else:
                    self._waiting.append(message)
            self._woken.set()

    async def _send_task(self) -> None:
        """Send apart from the step task, so that the next step is launched before the last one's tokens are encoded."""
        async for message in self._outbox_receive:
            self._send(message)

    def _flush(self) -> None:
        """Send what the send task had not come to, so that the engine's last word stays the last."""
        while self._outbox_receive.statistics().current_buffer_used:
            self._send(self._outbox_receive.receive_nowait())

    async def _step_task(self, core: EngineCore) -> None:
        in_flight: deque[_InFlight] = deque()
        depth = core.capacity.max_concurrent_plans
        with self._outbox_send:
            while True:
                self._take_inputs(core)
                while len(in_flight) < depth and (plan := core.plan(trio.current_time())) is not None:
                    in_flight.append(_InFlight(plan, self._executor.execute(plan)))
                    in_flight[-1].execution.sample(core.grammar_masks(plan))
                    self._newest_step = plan.step
                    self._take_inputs(core)
                self._tell(core, is_quiet=not in_flight)
                if in_flight:
                    await self._finish(core, in_flight.popleft())
                elif self._is_stopping and not core.has_work:
                    return
                else:
                    await self._wait_for_input(core.next_deadline)

    async def _wait_for_input(self, deadline: float) -> None:
        if not self._waiting:
            self._woken = trio.Event()
            with trio.move_on_at(deadline):
                await self._woken.wait()

    async def _finish(self, core: EngineCore, step: _InFlight) -> None:
        """Wait for the oldest step, take the inputs that came meanwhile, and commit."""
        try:
            output = await step.execution.result()
        except ExecutorDead:
            raise
        except Exception as error:  # the step's door
            self._fail(core, step.plan, error)
        else:
            self._failed_last_step &= not step.plan.requests
            self._take_inputs(core)
            core.commit(step.plan, output, trio.current_time())
        self._tell(core, step.plan.step)

    def _fail(self, core: EngineCore, plan: SchedulerOutput, error: Exception) -> None:
        """End the requests of a failed step; the second in a row ends the engine.

        A plan that was in flight behind a failed one rests on what that one did not compute: it failing too says
        nothing, and costs nobody.
        """
        if plan.step <= self._follows_failure_until:
            core.fail(plan, Cause.of(error), [])
            return
        if self._failed_last_step:
            raise error
        self._failed_last_step = True
        self._follows_failure_until = self._newest_step
        logger.error("step %d failed", plan.step, exc_info=error)
        newest = [plan.requests[-1].request_id] if isinstance(error, MemoryError) and plan.requests else None
        core.fail(plan, Cause.of(error), newest)

    # -- messages ------------------------------------------------------------------------------------------------

    def _take_inputs(self, core: EngineCore) -> None:
        while self._waiting:
            message = self._waiting.popleft()
            match message:
                case EngineCoreRequest():
                    self._add(core, message)
                case AbortRequest():
                    core.abort(message.request_ids, message.reason)
                case UtilityCall():
                    self._run_verb(core, message)
                case Shutdown():
                    self._is_stopping = True
                    core.resume()
                    core.abort_all(AbortReason.SHUTDOWN)
                case _:
                    logger.warning("ignored %s: it has no place while serving", type(message).__name__)

    def _add(self, core: EngineCore, request: EngineCoreRequest) -> None:
        try:
            core.add(request, trio.current_time())
        except ValueError:
            logger.exception("request %s was not added", request.request_id)
            return
        if self._is_stopping:
            core.abort([request.request_id], AbortReason.SHUTDOWN)

    def _run_verb(self, core: EngineCore, call: UtilityCall) -> None:
        try:
            value = None
            match call.verb:
                case ResetPrefixCache(reset_running):
                    value = core.reset_prefix_cache(reset_running)
                case Pause(mode):
                    core.pause(mode)
                    self._pausing.append(call)
                    return
                case Resume():
                    core.resume()
                    self._answer_pauses(Cause("Resumed", "resumed before the pause was complete"))
        except Exception as error:  # a call that fails, fails alone
            self._results.append(UtilityResult(call.call_id, failure=Cause.of(error)))
        else:
            self._results.append(UtilityResult(call.call_id, value))

    def _answer_pauses(self, failure: Cause | None) -> None:
        self._results.extend(UtilityResult(call.call_id, failure=failure) for call in self._pausing)
        self._pausing.clear()

    def _tell(self, core: EngineCore, step: int = 0, *, is_quiet: bool = False) -> None:
        """Queue whatever the core has to say; statistics go with it, whenever a step was done, and before it is quiet.

        Without the last the queue of a paused engine would grow unseen.
        """
        stats = core.stats()
        if core.is_paused:
            self._answer_pauses(None)
        outputs = core.take_outputs()
        if not (step or outputs or self._results or (is_quiet and stats != self._told_stats)):
            return
        self._told_stats = stats
        results, self._results = self._results, []
        self._outbox_send.send_nowait(
            EngineCoreOutputs(
                engine_index=self._engine_index,
                step=step,
                outputs=outputs,
                utility_results=results,
                scheduler_stats=stats,
                timestamp=trio.current_time(),
            )
        )
