"""The verbs under Trio: begun when they come, waited for beside the steps, each answered under its id.

The step task alone calls these methods, as the core is its own; one task, `run`, asks the runner and hands the answers
back. Calls that come to the runner, or change what sleeps, form a line: each begins when the one before it has ended,
as it came. All others are done at once. A call is always answered: by the verb, by what it raised, or by a refusal once
the engine stops. The engine's death answers those left, on the client's side.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import trio

from engine.core import EngineCore
from engine.errors import Cause, ExecutorDead
from engine.executor.base import Executor
from engine.operations import IN_ORDER, OnRunner, Operation, Operations
from engine.protocol import UtilityCall, UtilityResult
from engine.verbs import STOPPING, UNSENDABLE, Verb, WakeUp, plain_value, read_verb


class _Running(NamedTuple):
    call_id: int | None
    """None for what the engine does on its own behalf: there it cannot fail alone."""
    operation: Operation


class Utilities:
    """The calls that one engine has taken.

    Attributes:
        runner_asked_s: When the runner was asked for the call that it is at, infinite where it is at none. Steps
            launched later wait for it, and there is no telling how long.
    """

    def __init__(
        self,
        core: EngineCore,
        operations: Operations,
        executor: Executor,
        wake: Callable[[], None],
    ) -> None:
        """Ask `executor` from `run`; `wake` is called when `settle` has something to do."""
        self.runner_asked_s = math.inf
        self._core = core
        self._operations = operations
        self._executor = executor
        self._wake = wake
        self._to_runner, self._asked = trio.open_memory_channel[tuple[_Running, Verb]](float("inf"))
        self._is_stopping = False
        self._line: deque[_Running] = deque()
        self._first: _Running | None = None
        self._pausing: list[_Running] = []
        self._on_runner: set[_Running] = set()
        self._ended: deque[tuple[_Running, Callable[[], str | OnRunner]]] = deque()
        self._results: list[UtilityResult] = []

    @property
    def num_pausing(self) -> int:
        """Calls that wait for a pause to take effect."""
        return len(self._pausing)

    @property
    def num_on_runner(self) -> int:
        """Calls that wait for the runner or for their turn, or whose answer was not yet taken in."""
        return len(self._on_runner) + len(self._line)

    async def run(self) -> None:
        """Ask the runner, until cancelled; what it was asked for is waited for.

        Raises:
            ExecutorDead: The runner was lost.
        """
        async for running, verb in self._asked:
            self.runner_asked_s = trio.current_time()
            try:
                answer = await self._executor.call(verb)
            except ExecutorDead:
                raise
            except Exception as error:  # the verb's door
                self._ended.append((running, partial(running.operation.throw, error)))
            else:
                self._ended.append((running, partial(running.operation.send, answer)))
            self.runner_asked_s = math.inf
            self._wake()

    def begin(self, call: UtilityCall) -> None:
        """Run `call` as far as it goes without waiting."""
        if self._is_stopping:
            self._fail(call.call_id, STOPPING)
            return
        try:
            verb = read_verb(call.verb)
        except UNSENDABLE as error:
            self._fail(call.call_id, Cause.of(error))
            return
        running = _Running(call.call_id, self._operations.run(verb))
        if isinstance(verb, IN_ORDER):
            self._line_up(running)
        else:
            self._advance(running, partial(next, running.operation))

    def wake_up(self) -> None:
        """Wake up on the engine's own behalf, after what is under way; what that raises, `settle` or this raises."""
        self._line_up(_Running(None, self._operations.run(WakeUp())))

    def settle(self) -> None:
        """Go on with the calls whose wait has ended."""
        while self._ended:
            running, resume = self._ended.popleft()
            self._on_runner.discard(running)
            self._advance(running, resume)
        pausing, self._pausing = self._pausing, []
        for running in pausing:
            self._advance(running, partial(next, running.operation))
        self._begin_next()

    def stop(self) -> None:
        """Refuse calls from now on, also those that wait for a pause or their turn; the runner's are still answered."""
        self._is_stopping = True
        if self._first in self._pausing:
            self._first = None
        for running in (*self._pausing, *self._line):
            self._fail(running.call_id, STOPPING)
        self._pausing.clear()
        self._line.clear()

    def take_results(self) -> list[UtilityResult]:
        """Return the answers since the last call."""
        results, self._results = self._results, []
        return results

    def _line_up(self, running: _Running) -> None:
        self._line.append(running)
        self._begin_next()

    def _begin_next(self) -> None:
        while self._line and self._first is None:
            self._first = self._line.popleft()
            self._advance(self._first, partial(next, self._first.operation))

    def _advance(self, running: _Running, resume: Callable[[], str | OnRunner]) -> None:
        try:
            wait = resume()
        except StopIteration as end:
            self._end(running)
            self._answer(running.call_id, end.value)
        except Exception as error:  # the verb's door: a call that fails, fails alone
            if running.call_id is None:
                raise
            self._end(running)
            self._fail(running.call_id, Cause.of(error))
        else:
            if isinstance(wait, OnRunner):
                self._on_runner.add(running)
                self._to_runner.send_nowait((running, wait.verb))
            elif self._core.is_paused:  # at once, lest a verb that came with this one undoes the pause
                self._advance(running, partial(next, running.operation))
            else:
                self._pausing.append(running)

    def _end(self, running: _Running) -> None:
        if running is self._first:
            self._first = None

    def _answer(self, call_id: int | None, value: Any) -> None:
        if call_id is None:
            return
        try:
            self._results.append(UtilityResult(call_id, plain_value(value)))
        except (TypeError, ValueError, OverflowError) as error:  # it cannot be sent
            self._fail(call_id, Cause.of(error))

    def _fail(self, call_id: int | None, failure: Cause) -> None:
        if call_id is not None:
            self._results.append(UtilityResult(call_id, failure=failure))
