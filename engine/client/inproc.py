"""The face of an engine in this very thread: no task, no thread, no socket. One `get_output` is one step."""

from __future__ import annotations

import time
from collections.abc import Iterable

from engine.client.client import EngineCoreClient
from engine.config import EngineConfig
from engine.core import EngineCore
from engine.errors import Cause
from engine.executor.base import Runner
from engine.outputs import ModelRunnerOutput, RequestId, SchedulerOutput
from engine.protocol import AbortReason, EngineCoreOutputs, EngineCoreRequest, EngineReady


class InprocClient(EngineCoreClient):
    """Drives a core and a runner by plain calls; owned by one caller."""

    def __init__(self, config: EngineConfig, ready: EngineReady, core: EngineCore, runner: Runner) -> None:
        """Take over `core` and the started `runner`."""
        super().__init__(config, ready)
        self._core = core
        self._runner = runner

    @property
    def has_work(self) -> bool:
        """Whether another step would do anything."""
        return self._core.has_work

    def add_request(self, request: EngineCoreRequest) -> None:
        """Add `request` straight to the core; raises QueueFull."""
        self._admit(request)
        self._core.add(request, time.monotonic())

    def abort_requests(self, request_ids: Iterable[RequestId], reason: AbortReason) -> None:
        """End live requests; their terminal outputs come with the next `get_output`."""
        self._core.abort(request_ids, reason)

    def get_output(self) -> EngineCoreOutputs:
        """Take one step, if there is one to take, and return what came of it; raises what the step raises."""
        step = 0
        plan = self._core.plan(time.monotonic())
        if plan is not None:
            step = plan.step
            self._core.commit(plan, self._run(plan), time.monotonic())
        message = EngineCoreOutputs(
            engine_index=self.ready.engine_index,
            step=step,
            outputs=self._core.take_outputs(),
            scheduler_stats=self._core.stats(),
            timestamp=time.monotonic(),
        )
        self._settle(message)
        return message

    def _run(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        """Run both halves of a step; one that is interrupted or fails ends its requests."""
        try:
            self._runner.execute(plan)
            while True:
                output = self._runner.sample(self._core.grammar_masks(plan))
                if output.step == plan.step:  # else left over from a step that was interrupted half way
                    return output
        except BaseException as error:
            self._core.fail(plan, Cause.of(error))
            raise
