"""What a failed step costs: its requests where the device is sound, the engine where the next step fails too.

A step that raises has told the worst it can tell: the next one shows whether the device still works. Two in a row end
the engine; a plan that was in flight behind a failed one rests on what that one did not compute, so that it failing too
says nothing and costs nobody. A memory error costs the newest request alone.
"""

from __future__ import annotations

import logging

from engine.core import EngineCore
from engine.errors import Cause
from engine.outputs import SchedulerOutput
from engine.step_log import describe_plan

logger = logging.getLogger(__name__)


class StepFailures:
    """Remembers whether the last step failed, and which plans follow from it."""

    def __init__(self) -> None:
        """Start with a sound device."""
        self._failed_last_step = False
        self._newest_step = 0
        self._follows_failure_until = 0

    def launched(self, plan: SchedulerOutput) -> None:
        """Note that `plan` is in flight, behind all before it."""
        self._newest_step = plan.step

    def succeeded(self, plan: SchedulerOutput) -> None:
        """Note that `plan` was computed; an empty one proves nothing."""
        self._failed_last_step &= not plan.requests

    def failed(self, core: EngineCore, plan: SchedulerOutput, error: Exception, num_in_flight: int) -> None:
        """End the requests of a failed step, whose plan is logged once; raises `error` where the engine must end."""
        if plan.step <= self._follows_failure_until:
            core.fail(plan, Cause.of(error), [])
            return
        logger.error("a step failed, %s", describe_plan(plan, num_in_flight), exc_info=error)
        if self._failed_last_step:
            raise error
        self._failed_last_step = True
        self._follows_failure_until = self._newest_step
        newest = [plan.requests[-1].request_id] if isinstance(error, MemoryError) and plan.requests else None
        core.fail(plan, Cause.of(error), newest)
