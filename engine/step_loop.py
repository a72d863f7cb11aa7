"""One engine's steps: plan, launch, wait, commit, tell; with all that came meanwhile taken in between.

The step task alone touches the core. Before each plan it takes everything that waits; between a result and its commit
it takes what came meanwhile, so that an abort is early yet never overtakes its own add. Plans may be in flight up to
the executor's depth; commits come in plan order. Where there is work and no plan, it waits for the message that ends
that state. Nothing here polls; a step that does not end is the watchdog's business (watchdog.py).

An engine whose client does not read holds still: no step is launched while MAX_STEPS_AHEAD are unread. Aborts and
verbs are taken and --queue-timeout is kept then as ever, and nothing is held once it is to stop, for then all that is
left is to be told.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator
from typing import NamedTuple

import trio

from engine.config import EngineConfig
from engine.core import EngineCore
from engine.errors import ExecutorDead
from engine.executor.base import Execution, Executor
from engine.grammar_compiler import CompiledFor, GrammarCompiler
from engine.inbox import Inbox
from engine.metrics import SchedulerStats
from engine.operations import Operations
from engine.outputs import SchedulerOutput
from engine.protocol import (
    MAX_STEPS_AHEAD,
    AbortReason,
    AbortRequest,
    Drain,
    EngineCoreOutputs,
    EngineCoreRequest,
    SessionPart,
    Shutdown,
    UtilityCall,
)
from engine.step_failures import StepFailures
from engine.step_log import describe_plan
from engine.task_tree import report
from engine.utilities import Utilities
from engine.watchdog import Watchdog

logger = logging.getLogger(__name__)
teardown = logging.getLogger("teardown")


class _InFlight(NamedTuple):
    plan: SchedulerOutput
    execution: Execution
    launched_s: float


class StepLoop:
    """Steps one core from its start to its last request. `run` is the step task.

    Attributes:
        grammars: Finds the grammars that requests wait for; its `run` is a task of the owner's.
        utilities: The calls under way; likewise.
    """

    def __init__(
        self,
        core: EngineCore,
        config: EngineConfig,
        executor: Executor,
        inbox: Inbox,
        tell: Callable[[EngineCoreOutputs], None],
        watchdog: Watchdog,
        engine_index: int = 0,
    ) -> None:
        """Own `core`; take from `inbox`, have `executor` run the steps and `tell` what came of them, without waiting.

        `watchdog` is told when a step is pending, and when it has ended.
        """
        self.grammars = GrammarCompiler(config, core, inbox.put)
        self._operations = Operations(core, report, trio.current_time)
        self.utilities = Utilities(core, self._operations, executor, self._wake)
        self._core = core
        self._config = config
        self._executor = executor
        self._inbox = inbox
        self._send = tell
        self._watchdog = watchdog
        self._engine_index = engine_index
        self._in_flight: deque[_InFlight] = deque()
        self._failures = StepFailures()
        self._is_draining = False
        self._is_stopping = False
        self._told_stats: SchedulerStats | None = None
        self._ended_step = 0
        self._ended_step_s = 0.0

    async def run(self) -> None:
        """Step until told to stop and nothing is left to do."""
        core, in_flight = self._core, self._in_flight
        depth = core.capacity.max_concurrent_plans
        while True:
            await trio.lowlevel.checkpoint_if_cancelled()  # the wait for a step is shielded, and steps may never cease
            self._watchdog.expect(True)
            self._take_inputs()
            self.utilities.settle()
            while len(in_flight) < depth and not self._is_held and (plan := core.plan(trio.current_time())) is not None:
                in_flight.append(_InFlight(plan, self._executor.execute(plan), trio.current_time()))
                in_flight[-1].execution.sample(core.grammar_masks(plan))
                self._failures.launched(plan)
                self._take_inputs()
            if self._is_held:  # so that no plan did it
                core.end_overdue(trio.current_time())
            self._tell(is_quiet=not in_flight)
            self._watchdog.expect(self._is_step_pending)
            if in_flight:
                await self._finish(in_flight[0])
            elif self._is_stopping and not (core.has_work or self.utilities.num_on_runner):
                return
            else:
                await self._inbox.wait(core.next_deadline)

    @property
    def _is_held(self) -> bool:
        """Whether the client has to read before another step may begin."""
        return self._ended_step - self._inbox.read_step >= MAX_STEPS_AHEAD and not self._is_stopping

    @property
    def _is_step_pending(self) -> bool:
        """Whether a step should end, or be launched, without anything else that may take its time before."""
        if self._in_flight:
            return self._in_flight[0].launched_s <= self.utilities.runner_asked_s
        return self._core.has_work and self._core.waits_for is None and not self._is_held

    def _wake(self) -> None:
        """Have the step task take in what the runner answered to a call; a step behind that call has its time now."""
        self._inbox.wake()
        self._watchdog.expect(bool(self._in_flight))

    async def _finish(self, step: _InFlight) -> None:
        """Wait for the oldest step, take the inputs that came meanwhile, and commit."""
        try:
            output = await step.execution.result()
        except ExecutorDead:
            logger.error("the executor was lost in %s", describe_plan(step.plan, len(self._in_flight)))
            raise
        except Exception as error:  # the step's door
            self._failures.failed(self._core, step.plan, error, len(self._in_flight))
        else:
            self._failures.succeeded(step.plan)
            self._take_inputs()
            ended_s = trio.current_time()
            self._core.commit(step.plan, output, ended_s)
            self._want_grammars_of_turns()
            if self._config.log_iterations:
                took_ms = 1000 * (ended_s - step.launched_s)
                logger.info("%s; %.2f ms", describe_plan(step.plan, len(self._in_flight)), took_ms)
            if self._operations.trace is not None:
                self._operations.trace.add(step.plan, output, step.launched_s, ended_s)
        self._in_flight.popleft()
        self._ended_step, self._ended_step_s = step.plan.step, trio.current_time()
        self._watchdog.step_ended()
        self._tell(step.plan.step)

    # -- messages ------------------------------------------------------------------------------------------------

    def _take_inputs(self) -> None:
        core = self._core
        for message, at_s in self._inbox.take_all():
            match message:
                case EngineCoreRequest():
                    self._add(message)
                case CompiledFor(request_id, grammar):
                    core.set_grammar(request_id, grammar)
                case SessionPart():
                    self._extend(message)
                case AbortRequest():
                    core.abort(message.request_ids, message.reason)
                    if self._operations.trace is not None:
                        self._operations.trace.add_abort(len(message.request_ids), at_s)
                case UtilityCall():
                    self.utilities.begin(message)
                case Drain():
                    self._drain()
                case Shutdown():
                    self._is_draining = self._is_stopping = True
                    self.utilities.stop()
                    teardown.debug("intake closed")
                    core.resume()
                    core.abort_all(AbortReason.SHUTDOWN)
                case _:
                    logger.warning("ignored %s: it has no place while serving", type(message).__name__)

    def _add(self, request: EngineCoreRequest) -> None:
        core = self._core
        try:
            asked = request.sampling_params.structured_outputs
            core.add(request, trio.current_time(), awaits_grammar=asked is not None)
        except ValueError:
            logger.exception("request %s was not added", request.request_id)
            return
        if core.awaits_grammar(request.request_id):
            self.grammars.want(request.request_id, request.sampling_params, request.client_key)
        if self._is_draining:
            core.abort([request.request_id], AbortReason.SHUTDOWN)

    def _extend(self, part: SessionPart) -> None:
        """Give a session its next part; once nothing new is taken, every session was closed, and it is dropped."""
        if self._is_draining:
            return
        try:
            self._core.extend(part)
        except ValueError:
            logger.exception("a part for request %s was not taken", part.request_id)
        self._want_grammars_of_turns()

    def _want_grammars_of_turns(self) -> None:
        for turn in self._core.take_turns_awaiting_grammar():
            self.grammars.want(turn.request_id, turn.sampling_params, turn.client_key)

    def _drain(self) -> None:
        """Take nothing new; what waits runs, for nobody could resume or wake the engine up any more.

        An engine that cannot wake up ends with that cause, which all who wait for it learn.
        """
        self._is_draining = True
        self._core.close_sessions()
        self.utilities.stop()
        if self._operations.asleep:
            self.utilities.wake_up()
        else:
            self._core.resume()

    def _tell(self, step: int = 0, *, is_quiet: bool = False) -> None:
        """Queue whatever the core has to say; statistics go with it, whenever a step was done, and before it is quiet.

        Without the last the queue of a paused engine would grow unseen.
        """
        stats = self._core.stats()
        outputs, results = self._core.take_outputs(), self.utilities.take_results()
        if not (step or outputs or results or (is_quiet and stats != self._told_stats)):
            return
        now = trio.current_time()
        if self._operations.trace is not None:
            self._operations.trace.add_load(stats.num_used_blocks, stats.num_running + stats.num_waiting, now)
        self._told_stats = stats
        self._send(
            EngineCoreOutputs(
                engine_index=self._engine_index,
                step=step,
                outputs=outputs,
                utility_results=results,
                scheduler_stats=stats,
                timestamp=now,
            )
        )

    def describe(self, num_unsent: int) -> Iterator[str]:
        """Yield what one asks first when this engine hangs; `num_unsent` messages of it were not sent yet."""
        core = self._core
        stats, now = core.stats(), trio.current_time()
        state = "stopping" if self._is_stopping else "draining" if self._is_draining else "alive"
        paused = f", paused ({core.pause_mode})" if core.pause_mode else ""
        asleep = f", asleep: {', '.join(sorted(self._operations.asleep))}" if self._operations.asleep else ""
        ended = f"last step {self._ended_step} ended {now - self._ended_step_s:.3f} s ago"
        yield f"{state}{paused}{asleep}; {ended if self._ended_step else 'no step yet'}"
        yield (
            f"queues: {stats.num_running} running, {stats.num_waiting} waiting, {len(self._inbox)} messages in the "
            f"inbox, {num_unsent} in the outbox"
        )
        yield f"blocks: {stats.num_used_blocks} of {stats.num_kv_blocks} in use"
        yield f"calls: {self.utilities.num_pausing} wait for a pause, {self.utilities.num_on_runner} for the runner"
        for step in self._in_flight:
            yield f"in flight for {now - step.launched_s:.3f} s: {describe_plan(step.plan, len(self._in_flight))}"
        if self._is_held:
            yield f"no step is launched: the client has read the outputs of steps up to {self._inbox.read_step} only"
        elif core.waits_for is not None and not self._in_flight:
            yield f"no step is possible: the core waits for {core.waits_for}"
