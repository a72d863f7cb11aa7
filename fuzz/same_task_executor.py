"""An executor without a thread: with it everything an engine does happens in an order that Trio alone decides."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import trio

from engine.config import EngineConfig
from engine.executor.base import Progress, Runner
from engine.executor.runner_verbs import call_runner
from engine.outputs import Capacity, GrammarMasks, ModelRunnerOutput, SchedulerOutput
from engine.verbs import Verb


class SameTaskExecutor:
    """An `Executor` that runs its runner in the task that waits for the result: no thread, so Trio's order is all.

    Attributes:
        num_steps: Steps with rows begun so far.
    """

    def __init__(self, make_runner: Callable[[], Runner], name: str = "executor") -> None:
        """Take what `InlineExecutor` takes."""
        self.num_steps = 0
        self._make_runner = make_runner
        self._runner: Runner | None = None

    async def start(self, config: EngineConfig, progress: Progress) -> Capacity:
        """See `Executor`; a checkpoint after each phase, which like a load cannot be cancelled."""
        reports: list[tuple[str, int, int]] = []
        self._runner = self._make_runner()
        capacity = self._runner.start(lambda *report: reports.append(report))
        for report in reports:
            progress(*report)
            await trio.lowlevel.cancel_shielded_checkpoint()
        return capacity

    def execute(self, plan: SchedulerOutput) -> SameTaskExecution:
        """See `Executor`."""
        assert self._runner is not None
        self.num_steps += bool(plan.requests)
        return SameTaskExecution(self._runner, plan)

    async def call(self, verb: Verb) -> Any:
        """See `Executor`; others run before and after."""
        assert self._runner is not None
        await trio.lowlevel.cancel_shielded_checkpoint()
        answer = call_runner(self._runner, verb)
        await trio.lowlevel.cancel_shielded_checkpoint()
        return answer

    def abandon(self) -> None:
        """Do nothing: there is no thread to be lost."""

    async def aclose(self) -> None:
        """See `Executor`."""
        await trio.lowlevel.cancel_shielded_checkpoint()


class SameTaskExecution:
    """A plan given to a `SameTaskExecutor`."""

    def __init__(self, runner: Runner, plan: SchedulerOutput) -> None:
        """Run `plan` on `runner` once its result is waited for."""
        self._runner = runner
        self._plan = plan
        self._masks: GrammarMasks | None = None

    def sample(self, grammar_masks: GrammarMasks | None) -> None:
        """See `Execution`."""
        self._masks = grammar_masks

    async def result(self) -> ModelRunnerOutput:
        """See `Execution`; others run before, between forward and sampling, and after."""
        await trio.lowlevel.cancel_shielded_checkpoint()
        self._runner.execute(self._plan)
        await trio.lowlevel.cancel_shielded_checkpoint()
        output = self._runner.sample(self._masks)
        await trio.lowlevel.cancel_shielded_checkpoint()
        return output
