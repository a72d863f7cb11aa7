"""The core under Trio: receive, step, send, in one nursery.

::

    inbox ──receive task──▶ waiting messages ──▶ step task ──▶ outbox ──send task──▶ client
                                                   │  ▲
                                             plan  ▼  │  result
                                                 executor's thread

The step task alone touches the core. Before each plan it takes everything that waits; between a result and its commit
it takes what came meanwhile, so that an abort is early yet never overtakes its own add. Plans may be in flight up to
the executor's depth; commits come in plan order. Where there is work and no plan, it waits for the message that ends
that state. Nothing here polls; a step that does not end is the watchdog's business (watchdog.py).
"""

from __future__ import annotations

import logging
import os
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from typing import NamedTuple

import trio

from engine.config import EngineConfig
from engine.core import EngineCore
from engine.errors import Cause, ConfigError, ExecutorDead, ModelError
from engine.executor.base import Execution, Executor
from engine.grammar_compiler import CompiledFor, GrammarCompiler
from engine.metrics import SchedulerStats
from engine.operations import Operations
from engine.outputs import SchedulerOutput
from engine.protocol import (
    AbortReason,
    AbortRequest,
    Acknowledge,
    ClientMessage,
    Drain,
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineDead,
    EngineMessage,
    EngineReady,
    EngineStopped,
    SessionPart,
    Shutdown,
    StartProgress,
    UtilityCall,
)
from engine.step_failures import StepFailures
from engine.step_log import describe_plan
from engine.task_tree import report, telling, write_report, write_stacks
from engine.utilities import Utilities
from engine.watchdog import Watchdog
from transport.services import Services, open_services

logger = logging.getLogger(__name__)
teardown = logging.getLogger("teardown")

LAST_WORD_TIMEOUT_S = 5.0
"""How long an engine that ends waits for its last word to be acknowledged."""

Receive = Callable[[], Awaitable[list[ClientMessage]]]
Send = Callable[[EngineMessage], None]


class _InFlight(NamedTuple):
    plan: SchedulerOutput
    execution: Execution
    launched_s: float


class EngineCoreServer:
    """One engine: executor, core and the tasks that join them to a client. `run` is its whole life."""

    def __init__(
        self,
        config: EngineConfig,
        executor: Executor,
        receive: Receive,
        send: Send,
        *,
        engine_index: int = 0,
        alarm: Callable[[float], object] = lambda seconds: None,
    ) -> None:
        """Own `executor` from `run` on. `receive` waits for messages, `send` never waits; `alarm`: see `Watchdog`."""
        self._config = config
        self._executor = executor
        self._receive = receive
        self._send = send
        self._engine_index = engine_index
        self._phase = ""
        self._waiting: deque[ClientMessage | CompiledFor] = deque()
        self._woken = trio.Event()
        self._acknowledged = trio.Event()
        self._is_draining = False
        self._is_stopping = False
        self._in_flight: deque[_InFlight] = deque()
        self._watchdog = Watchdog(config.step_timeout, alarm)
        self._outbox_send, self._outbox_receive = trio.open_memory_channel[EngineMessage](float("inf"))
        self._told_stats: SchedulerStats | None = None
        self._failures = StepFailures()
        self._ended_step = 0
        self._ended_step_s = 0.0

    async def run(self) -> Cause | None:
        """Start, serve until told to stop, say the last word, free everything. Returns what ended it, None if asked.

        Cancelling it ends the engine at the next step boundary without a last word.
        """
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._receive_task)
                try:
                    async with open_services() as services:
                        cause = await self._serve(services)
                        await self._say_last_word(cause)
                except Exception as error:  # a service's door
                    cause = self._cause_of(error)
                    await self._say_last_word(cause)
                teardown.debug("grammar back end closed")
                nursery.cancel_scope.cancel()
        finally:
            await self._executor.aclose()
            teardown.debug("executor closed")
        return cause

    async def _serve(self, services: Services) -> Cause | None:
        """Start and serve until told to stop or something breaks; `services` outlive this."""
        try:
            core = await self._start()
            self._grammars = GrammarCompiler(self._config, core, self._deliver_grammar)
            services.start_soon(self._grammars.run)
            async with trio.open_nursery() as nursery:
                self._operations = Operations(core, report)
                self._utilities = Utilities(core, self._operations, self._executor, self._wake)
                nursery.start_soon(self._send_task)
                nursery.start_soon(self._utilities.run)
                with telling(f"engine {self._engine_index}", lambda: self._describe(core)):
                    await self._watched(core)
                self._utilities.close()
        except Exception as error:  # the step's door: whatever broke is the engine's end, with its cause
            return self._cause_of(error)
        finally:
            teardown.debug("step task ended")
        return None

    def _cause_of(self, error: Exception) -> Cause:
        cause = Cause.of(error, self._phase)
        # What the operator can mend is told by the front, in one line.
        level = logging.DEBUG if isinstance(error, ConfigError | ModelError) else logging.ERROR
        logger.log(level, "%s\n%s", cause, cause.traceback)
        return cause

    async def _say_last_word(self, cause: Cause | None) -> None:
        """Send what the send task had not come to, then the last word, and wait until that is acknowledged."""
        while self._outbox_receive.statistics().current_buffer_used:
            self._send(self._outbox_receive.receive_nowait())
        self._send(EngineStopped(self._engine_index) if cause is None else EngineDead(cause, self._engine_index))
        with trio.move_on_after(LAST_WORD_TIMEOUT_S):
            await self._acknowledged.wait()
            teardown.debug("last word acknowledged")

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

    def _deliver_grammar(self, compiled: CompiledFor) -> None:
        self._waiting.append(compiled)
        self._woken.set()

    async def _send_task(self) -> None:
        """Send apart from the step task, so that the next step is launched before the last one's tokens are encoded."""
        async for message in self._outbox_receive:
            self._send(message)

    async def _watched(self, core: EngineCore) -> None:
        """Run the step task to its end, or until the watchdog has enough of it."""
        with self._outbox_send:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._watchdog.run, self._give_up)
                async with trio.open_nursery() as steps:
                    steps.start_soon(self._step_task, core)
                nursery.cancel_scope.cancel()

    def _give_up(self) -> None:
        """Show what hangs, and do not wait for it any more."""
        write_report()
        write_stacks()
        self._executor.abandon()

    async def _step_task(self, core: EngineCore) -> None:
        in_flight = self._in_flight
        depth = core.capacity.max_concurrent_plans
        while True:
            self._watchdog.expect(True)
            self._take_inputs(core)
            self._utilities.settle()
            while len(in_flight) < depth and (plan := core.plan(trio.current_time())) is not None:
                in_flight.append(_InFlight(plan, self._executor.execute(plan), trio.current_time()))
                in_flight[-1].execution.sample(core.grammar_masks(plan))
                self._failures.launched(plan)
                self._take_inputs(core)
            self._tell(core, is_quiet=not in_flight)
            self._watchdog.expect(self._is_step_pending(core))
            if in_flight:
                await self._finish(core, in_flight[0])
            elif self._is_stopping and not (core.has_work or self._utilities.num_on_runner):
                return
            else:
                await self._wait_for_input(core.next_deadline)

    def _wake(self) -> None:
        """Have the step task take in what the runner answered to a call; a step behind that call has its time now."""
        self._woken.set()
        self._watchdog.expect(bool(self._in_flight))

    def _is_step_pending(self, core: EngineCore) -> bool:
        """Whether a step should end, or be launched, without anything else that may take its time before."""
        if self._in_flight:
            return self._in_flight[0].launched_s <= self._utilities.runner_asked_s
        return core.has_work and core.waits_for is None

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
            logger.error("the executor was lost in %s", describe_plan(step.plan, len(self._in_flight)))
            raise
        except Exception as error:  # the step's door
            self._failures.failed(core, step.plan, error, len(self._in_flight))
        else:
            self._failures.succeeded(step.plan)
            self._take_inputs(core)
            ended_s = trio.current_time()
            core.commit(step.plan, output, ended_s)
            if self._config.log_iterations:
                took_ms = 1000 * (ended_s - step.launched_s)
                logger.info("%s; %.2f ms", describe_plan(step.plan, len(self._in_flight)), took_ms)
            if self._operations.trace is not None:
                self._operations.trace.add(step.plan, output, step.launched_s, ended_s)
        self._in_flight.popleft()
        self._ended_step, self._ended_step_s = step.plan.step, trio.current_time()
        self._watchdog.step_ended()
        self._tell(core, step.plan.step)

    # -- messages ------------------------------------------------------------------------------------------------

    def _take_inputs(self, core: EngineCore) -> None:
        while self._waiting:
            message = self._waiting.popleft()
            match message:
                case EngineCoreRequest():
                    self._add(core, message)
                case CompiledFor(request_id, grammar):
                    core.set_grammar(request_id, grammar)
                case SessionPart():
                    self._extend(core, message)
                case AbortRequest():
                    core.abort(message.request_ids, message.reason)
                case UtilityCall():
                    self._utilities.begin(message)
                case Drain():
                    self._drain(core)
                case Shutdown():
                    self._is_draining = self._is_stopping = True
                    self._utilities.stop()
                    teardown.debug("intake closed")
                    core.resume()
                    core.abort_all(AbortReason.SHUTDOWN)
                case _:
                    logger.warning("ignored %s: it has no place while serving", type(message).__name__)

    def _add(self, core: EngineCore, request: EngineCoreRequest) -> None:
        try:
            asked = request.sampling_params.structured_outputs
            core.add(request, trio.current_time(), awaits_grammar=asked is not None)
        except ValueError:
            logger.exception("request %s was not added", request.request_id)
            return
        if core.awaits_grammar(request.request_id):
            self._grammars.want(request.request_id, request.sampling_params)
        if self._is_draining:
            core.abort([request.request_id], AbortReason.SHUTDOWN)

    def _extend(self, core: EngineCore, part: SessionPart) -> None:
        """Give a session its next part; once nothing new is taken, every session was closed, and it is dropped."""
        if self._is_draining:
            return
        try:
            core.extend(part)
        except ValueError:
            logger.exception("a part for request %s was not taken", part.request_id)

    def _drain(self, core: EngineCore) -> None:
        """Take nothing new; what waits runs, for nobody could resume or wake the engine up any more.

        An engine that cannot wake up ends with that cause, which all who wait for it learn.
        """
        self._is_draining = True
        core.close_sessions()
        self._utilities.stop()
        if self._operations.asleep:
            self._utilities.wake_up()
        else:
            core.resume()

    def _tell(self, core: EngineCore, step: int = 0, *, is_quiet: bool = False) -> None:
        """Queue whatever the core has to say; statistics go with it, whenever a step was done, and before it is quiet.

        Without the last the queue of a paused engine would grow unseen.
        """
        stats = core.stats()
        outputs, results = core.take_outputs(), self._utilities.take_results()
        if not (step or outputs or results or (is_quiet and stats != self._told_stats)):
            return
        self._told_stats = stats
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

    def _describe(self, core: EngineCore) -> Iterator[str]:
        """Yield what one asks first when this engine hangs."""
        stats, now = core.stats(), trio.current_time()
        state = "stopping" if self._is_stopping else "draining" if self._is_draining else "alive"
        paused = f", paused ({core.pause_mode})" if core.pause_mode else ""
        asleep = f", asleep: {', '.join(sorted(self._operations.asleep))}" if self._operations.asleep else ""
        ended = f"last step {self._ended_step} ended {now - self._ended_step_s:.3f} s ago"
        yield f"{state}{paused}{asleep}; {ended if self._ended_step else 'no step yet'}"
        yield (
            f"queues: {stats.num_running} running, {stats.num_waiting} waiting, {len(self._waiting)} messages in the "
            f"inbox, {self._outbox_receive.statistics().current_buffer_used} in the outbox"
        )
        yield f"blocks: {stats.num_used_blocks} of {stats.num_kv_blocks} in use"
        yield f"calls: {self._utilities.num_pausing} wait for a pause, {self._utilities.num_on_runner} for the runner"
        for step in self._in_flight:
            yield f"in flight for {now - step.launched_s:.3f} s: {describe_plan(step.plan, len(self._in_flight))}"
        if core.waits_for is not None and not self._in_flight:
            yield f"no step is possible: the core waits for {core.waits_for}"
