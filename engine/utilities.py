"""The verbs under Trio: begun when they come, waited for beside the steps, each answered under its id.

The step task alone calls these methods, as the core is its own; one task, `run`, asks the runner for one call after the
other, in the order in which they came to it, and hands the answers back. A call is always answered: by the verb, by
what it raised, or by a refusal once the engine stops. The engine's death answers those left, on the client's side.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import trio

from engine.core import EngineCore
from engine.errors import Cause, ExecutorDead
from engine.executor.base import Executor
from engine.operations import OnRunner, Operation, Operations
from engine.protocol import UtilityCall, UtilityResult
from engine.verbs import STOPPING, Verb, plain_value, read_verb

_RESUMED = Cause("Resumed", "resumed before the pause was complete")


class _Running(NamedTuple):
    call_id: int
    operation: Operation


class Utilities:
    """The calls that one engine has taken."""

    def __init__(
        self,
        core: EngineCore,
        operations: Operations,
        executor: Executor,
        wake: Callable[[], None],
    ) -> None:
        """Ask `executor` from `run`; `wake` is called when `settle` has something to do."""
        self._core = core
        self._operations = operations
        self._executor = executor
        self._wake = wake
        self._to_runner, self._asked = trio.open_memory_channel[tuple[_Running, Verb]](float("inf"))
        self._is_stopping = False
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
        """Calls that wait for the runner, or whose answer was not yet taken in."""
        return len(self._on_runner)

    async def run(self) -> None:
        """Ask the runner, until `close`.

        Raises:
            ExecutorDead: The runner was lost.
        """
        async for running, verb in self._asked:
            try:
                answer = await self._executor.call(verb)
            except ExecutorDead:
                raise
            except Exception as error:  # the verb's door
                self._ended.append((running, partial(running.operation.throw, error)))
            else:
                self._ended.append((running, partial(running.operation.send, answer)))
            self._wake()

    def close(self) -> None:
        """End `run` after what the runner was asked for."""
        self._to_runner.close()

    def begin(self, call: UtilityCall) -> None:
        """Run `call` as far as it goes without waiting."""
        if self._is_stopping:
            self._fail(call.call_id, STOPPING)
            return
        try:
            operation = self._operations.run(read_verb(call.verb))
        except (ValueError, TypeError) as error:
            self._fail(call.call_id, Cause.of(error))
            return
        self._advance(_Running(call.call_id, operation), partial(next, operation))

    def settle(self) -> None:
        """Go on with the calls whose wait has ended."""
        while self._ended:
            running, resume = self._ended.popleft()
            self._on_runner.discard(running)
            self._advance(running, resume)
        if self._core.is_paused or self._core.pause_mode is None:
            pausing, self._pausing = self._pausing, []
            for running in pausing:
                if self._core.is_paused:
                    self._advance(running, partial(next, running.operation))
                else:
                    self._fail(running.call_id, _RESUMED)

    def stop(self) -> None:
        """Refuse calls from now on, also those that wait for a pause; what the runner does is still answered."""
        self._is_stopping = True
        for running in self._pausing:
            self._fail(running.call_id, STOPPING)
        self._pausing.clear()

    def take_results(self) -> list[UtilityResult]:
        """Return the answers since the last call."""
        results, self._results = self._results, []
        return results

    def _advance(self, running: _Running, resume: Callable[[], str | OnRunner]) -> None:
        try:
            wait = resume()
        except StopIteration as end:
            self._answer(running.call_id, end.value)
        except Exception as error:  # the verb's door: a call that fails, fails alone
            self._fail(running.call_id, Cause.of(error))
        else:
            if isinstance(wait, OnRunner):
                self._on_runner.add(running)
                self._to_runner.send_nowait((running, wait.verb))
            elif self._core.is_paused:  # at once, lest a verb that came with this one undoes the pause
                self._advance(running, partial(next, running.operation))
            else:
                self._pausing.append(running)

    def _answer(self, call_id: int, value: Any) -> None:
        try:
            self._results.append(UtilityResult(call_id, plain_value(value)))
        except (TypeError, ValueError, OverflowError) as error:  # it cannot be sent
            self._fail(call_id, Cause.of(error))

    def _fail(self, call_id: int, failure: Cause) -> None:
        self._results.append(UtilityResult(call_id, failure=failure))
