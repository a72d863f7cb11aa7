"""Runs a synchronous runner on one dedicated thread of this process; Trio on one side, tensors on the other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import trio

from engine.config import EngineConfig
from engine.errors import Cause, ExecutorDead
from engine.executor.base import Progress, Runner
from engine.executor.runner_verbs import call_runner
from engine.outputs import Capacity, GrammarMasks, ModelRunnerOutput, SchedulerOutput
from engine.verbs import Verb
from transport.worker import Job, Worker, WorkerLost

T = TypeVar("T")
SubmitSampling = Callable[[GrammarMasks | None], Job[ModelRunnerOutput]]


class InlineExecutor:
    """An `Executor` over one worker thread, on which the runner is made, used and dropped.

    The configuration is the runner's: `start`'s is not read again. Runs plans strictly in order.
    """

    def __init__(self, make_runner: Callable[[], Runner], name: str = "executor") -> None:
        """Own a thread called `name`, started by `start`; `make_runner` is called on it."""
        self._make_runner = make_runner
        self._worker = Worker(name)
        self._runner: Runner | None = None

    async def start(self, config: EngineConfig, progress: Progress) -> Capacity:
        """Start the thread and the runner on it; `progress` is called in the Trio thread and must not raise.

        Cannot be cancelled: a thread that reads weights in C, or waits for the compiler of the operations, is ended by
        nothing but the end of its process. A cancelled start ends once that is done: seconds, at most COMPILE_TIMEOUT_S
        of kernels/library.py for each set of instructions that is tried. Whoever may have to give up a start at once
        runs the engine in a process, whose whole group is killed. No call of `progress` comes after the return.

        Raises:
            ConfigError: The configuration cannot be had on this machine.
            ModelError: The model cannot be served.
            ExecutorDead: The thread was lost.
        """
        token = trio.lowlevel.current_trio_token()

        def report(phase: str, done: int, total: int) -> None:
            token.run_sync_soon(progress, phase, done, total)

        self._worker.start()
        try:
            return await _result_of(self._worker.submit(self._start, report))
        finally:
            all_reported = trio.Event()
            token.run_sync_soon(all_reported.set)
            with trio.CancelScope(shield=True):
                await all_reported.wait()

    def execute(self, plan: SchedulerOutput) -> InlineExecution:
        """Queue `plan` and return at once.

        Forward and sampling are one job, unless the plan has rows that wait for their masks.
        """
        if plan.grammar_rows:
            forward = self._worker.submit(self._execute, plan)
            return InlineExecution(forward, lambda masks: self._worker.submit(self._sample, masks))
        return InlineExecution(self._worker.submit(self._execute_and_sample, plan))

    async def call(self, verb: Verb) -> Any:
        """Run `verb` after the steps launched so far; raises what it raises, see `Executor.call`."""
        return await _result_of(self._worker.submit(self._call, verb))

    def abandon(self) -> None:
        """Count the thread as lost: a job that hangs cannot be ended but with the process."""
        self._worker.abandon()

    async def aclose(self) -> None:
        """End the thread after the jobs given so far and drop the runner; idempotent, shielded."""
        await self._worker.aclose()
        self._runner = None

    def _start(self, progress: Progress) -> Capacity:
        runner = self._make_runner()
        capacity = runner.start(progress)
        self._runner = runner
        return capacity

    def _execute(self, plan: SchedulerOutput) -> None:
        assert self._runner is not None
        self._runner.execute(plan)

    def _sample(self, masks: GrammarMasks | None) -> ModelRunnerOutput:
        assert self._runner is not None
        return self._runner.sample(masks)

    def _call(self, verb: Verb) -> Any:
        assert self._runner is not None
        return call_runner(self._runner, verb)

    def _execute_and_sample(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        self._execute(plan)
        return self._sample(None)


class InlineExecution:
    """A plan given to an `InlineExecutor`; made by `execute`."""

    def __init__(self, job: Job[Any], submit_sampling: SubmitSampling | None = None) -> None:
        """Follow `job`: the whole step, or only its forward where sampling is submitted apart."""
        self._jobs: list[Job[Any]] = [job]
        self._submit_sampling = submit_sampling

    def sample(self, grammar_masks: GrammarMasks | None) -> None:
        """See `Execution.sample`."""
        if self._submit_sampling is not None:
            self._jobs.append(self._submit_sampling(grammar_masks))

    async def result(self) -> ModelRunnerOutput:
        """See `Execution.result`; call it once."""
        output: ModelRunnerOutput
        for job in self._jobs:
            output = await _result_of(job)
        return output


async def _result_of(job: Job[T]) -> T:
    try:
        return await job.result()
    except WorkerLost as error:
        raise ExecutorDead(Cause.of(error)) from error
