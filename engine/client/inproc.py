"""The face of an engine in this very thread: no task, no thread, no socket. One step at a time, by plain calls.

Ctrl-C may interrupt the runner's part of a step alone. The step is undone before the next, and its tokens are computed
again: nothing is lost.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from engine.client.interrupts import InterruptsHeld
from engine.client.synchronous import STOP_TIMEOUT_S, SynchronousClient
from engine.config import EngineConfig
from engine.core import EngineCore
from engine.errors import Cause, EngineDeadError, UtilityError, UtilityTimeout
from engine.executor.base import Runner
from engine.executor.runner_verbs import call_runner
from engine.operations import OnRunner, Operations
from engine.outputs import ModelRunnerOutput, RequestId, SchedulerOutput
from engine.protocol import (
    AbortReason,
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineReady,
    SessionPart,
)
from engine.sampling_params import SamplingParams
from engine.step_failures import StepFailures
from engine.structured_output.grammar import Grammar
from engine.structured_output.manager import StructuredOutputManager
from engine.verbs import Verb, check_call, plain_value, read_verb, value_of

logger = logging.getLogger(__name__)


class InprocClient(SynchronousClient):
    """Drives a core and a runner by plain calls; owned by one caller.

    Attributes:
        core, runner: What it drives, for who measures them; nobody else calls them. Gone once it has ended.
    """

    def __init__(self, config: EngineConfig, ready: EngineReady, core: EngineCore, runner: Runner) -> None:
        """Take over `core` and the started `runner`."""
        super().__init__(config, ready)
        self.core = core
        self.runner = runner
        self._grammars = StructuredOutputManager(config.model, ready.vocab_size)
        self._operations = Operations(core)
        self._failures = StepFailures()
        self._turns: deque[tuple[RequestId, SamplingParams]] = deque()
        self._plan: SchedulerOutput | None = None

    @property
    def has_work(self) -> bool:
        """Whether another step would do anything."""
        return self.death is None and self.core.has_work

    def add_request(self, request: EngineCoreRequest) -> None:
        """Add `request` straight to the core, its grammar compiled here and now.

        Raises QueueFull, or EngineDeadError after a shutdown.
        """
        self.prepare_request(request)()

    def prepare_request(self, request: EngineCoreRequest) -> Callable[[], None]:
        """Compile the grammar of `request`, which may be interrupted; raises as `add_request`."""
        if self.death is not None:
            raise self.death
        self.check_room(1, request.data_parallel_rank)
        params = request.sampling_params
        grammar = None if params.structured_outputs is None else self._grammars.compile(params)
        return partial(self._add, request, grammar)

    def _add(self, request: EngineCoreRequest, grammar: Grammar | Cause | None) -> None:
        if self.death is not None:
            raise self.death
        with InterruptsHeld():
            self.check_room(1, request.data_parallel_rank)
            self.core.add(request, time.monotonic(), awaits_grammar=grammar is not None)
            if grammar is not None and self.core.awaits_grammar(request.request_id):
                self.core.set_grammar(request.request_id, grammar)
            self._live.add(request.request_id)

    def extend(self, part: SessionPart) -> None:
        """Give a session's next part to the core; raises EngineDeadError, or ValueError where it takes none."""
        if self.death is not None:
            raise self.death
        with InterruptsHeld():
            self.core.extend(part)

    def abort_requests(self, request_ids: Iterable[RequestId], reason: AbortReason) -> None:
        """End live requests; their terminal outputs come with the next `get_output`."""
        if self.death is not None:
            return
        with InterruptsHeld():
            self.core.abort(request_ids, reason)

    def call(self, verb: Verb, timeout_s: float | None = None) -> Any:
        """Run `verb` now; a pause takes the steps it waits for, and their outputs are kept for `get_output`."""
        check_call(verb, timeout_s)
        if self.death is not None:
            raise self.death
        timeout_s = verb.timeout_s if timeout_s is None else timeout_s
        try:
            value = plain_value(self._run_verb(verb, timeout_s))
        except (UtilityTimeout, EngineDeadError):
            raise
        except Exception as error:  # the verb's door: a call that fails, fails alone
            raise UtilityError(type(verb).__name__, Cause.of(error)) from error
        return value_of(verb, value, None)

    def shutdown(self, timeout_s: float = STOP_TIMEOUT_S) -> None:
        """See `SynchronousClient.shutdown`; there is nothing to wait for."""
        if self.death is not None:
            return
        with InterruptsHeld():
            self._undo()
            self.core.abort_all(AbortReason.SHUTDOWN)
            self._collect(0)
            self.has_stopped = True
            self._end(EngineDeadError(Cause("EngineStopped", "the engine was shut down")))

    def _advance(self) -> None:
        """Take one step, if there is one to take, and keep what came of it; the second to fail in a row is the end."""
        self._compile_turns()
        with InterruptsHeld():
            plan = self._plan = self.core.plan(time.monotonic())
        launched_s = time.monotonic()
        output = None if plan is None else self._run(plan)
        with InterruptsHeld():
            if plan is not None and output is not None:
                ended_s = time.monotonic()
                self._plan = None
                if self._operations.trace is not None:
                    self._operations.trace.add(plan, output, launched_s, ended_s)
                self.core.commit(plan, output, ended_s)
            if self.death is None:
                self._collect(0 if plan is None else plan.step)

    def _run_verb(self, verb: Verb, timeout_s: float) -> Any:
        """Do what `verb` waits for until it returns its answer.

        Raises:
            UtilityTimeout: Steps take too long.
            EngineDeadError: Steps fail.
            Exception: What the verb raises.
        """
        deadline_s = time.monotonic() + timeout_s
        operation = self._operations.run(read_verb(verb))
        resume = partial(next, operation)
        while True:
            with InterruptsHeld():
                self._undo()
                try:
                    wait = resume()
                except StopIteration as end:
                    return end.value
            if isinstance(wait, OnRunner):
                try:
                    resume = partial(operation.send, call_runner(self.runner, wait.verb))
                except Exception as error:  # the verb's door: the operation puts right what it had begun
                    resume = partial(operation.throw, error)
                continue
            resume = partial(next, operation)
            while not self.core.is_paused:
                if time.monotonic() >= deadline_s:
                    raise UtilityTimeout(type(verb).__name__, timeout_s)
                self._advance()
                if self.death is not None:
                    raise self.death

    def _run(self, plan: SchedulerOutput) -> ModelRunnerOutput | None:
        """Run both halves of a step; None where it failed."""
        self._failures.launched(plan)
        try:
            self.runner.execute(plan)
            while True:
                output = self.runner.sample(self.core.grammar_masks(plan))
                if output.step == plan.step:  # else left over from a step that was interrupted half way
                    self._failures.succeeded(plan)
                    return output
        except Exception as error:  # the step's door
            with InterruptsHeld():
                self._plan = None
                self._fail(plan, error)
            return None

    def _fail(self, plan: SchedulerOutput, error: Exception) -> None:
        try:
            self._failures.failed(self.core, plan, error, num_in_flight=1)
        except Exception as last:  # the second in a row: the engine's end
            logger.error("the engine ended: two steps in a row have failed")
            self._end(EngineDeadError(Cause.of(last)))

    def _end(self, death: EngineDeadError) -> None:
        """Count the engine as ended, and let go of all that it holds."""
        self.death = death
        del self.core, self.runner, self._operations, self._grammars

    def _undo(self) -> None:
        """Undo a step that was interrupted: its requests go on from where it found them."""
        if self._plan is not None:
            plan, self._plan = self._plan, None
            self.core.fail(plan, Cause("Interrupted", "the step was interrupted"), [])

    def _compile_turns(self) -> None:
        """Undo a step that was interrupted, and give sessions whose turn asks for a form their grammar.

        A compile may be interrupted: it is done again before the next step.
        """
        with InterruptsHeld():
            self._undo()
            turns = self.core.take_turns_awaiting_grammar()
            self._turns.extend((turn.request_id, turn.sampling_params) for turn in turns)
        while self._turns:
            request_id, params = self._turns[0]
            grammar = self._grammars.compile(params) if self.core.awaits_grammar(request_id) else None
            with InterruptsHeld():
                self._turns.popleft()
                if grammar is not None:
                    self.core.set_grammar(request_id, grammar)

    def _collect(self, step: int) -> None:
        """Keep what the core has to say for `get_output`."""
        self._outputs.append(
            EngineCoreOutputs(
                engine_index=self.ready.engine_index,
                step=step,
                outputs=self.core.take_outputs(),
                scheduler_stats=self.core.stats(),
                timestamp=time.monotonic(),
            )
        )
