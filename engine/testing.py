"""What tests and fuzzers may use: a core driven on the integer model, with its invariants checked after each act.

No product file imports this. The integer model is the oracle: every request's tokens must equal `expected_tokens`,
whatever else ran, was aborted, preempted, or failed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from engine.config import EngineConfig
from engine.core import EngineCore, WaitsFor
from engine.errors import Cause
from engine.executor.null import NullModelRunner, expected_tokens
from engine.outputs import FinishReason, RequestId, SchedulerOutput
from engine.protocol import AbortReason, EngineCoreOutput, EngineCoreRequest
from engine.sampling_params import SamplingParams

__all__ = ["Completion", "CoreDriver", "NullModelRunner", "expected_tokens", "run_core"]

SIMULATED_FAILURE = Cause("SimulatedFailure", "the step was made to fail")


@dataclass
class Completion:
    """All that one request got so far."""

    token_ids: list[int] = field(default_factory=list)
    outputs: list[EngineCoreOutput] = field(default_factory=list)

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why it ended, or None while it goes on."""
        return self.outputs[-1].finish_reason if self.outputs else None

    @property
    def event_kinds(self) -> list[str]:
        """The events of all outputs, in order."""
        return [event.kind for output in self.outputs for event in output.events]


class CoreDriver:
    """A core with a runner, a clock that ticks once a call, and all outputs collected by request."""

    def __init__(self, core: EngineCore, runner: NullModelRunner) -> None:
        """Drive `core` on `runner`, which has been started."""
        self.core = core
        self.runner = runner
        self.plans: deque[tuple[SchedulerOutput, bool]] = deque()
        self.completions: dict[RequestId, Completion] = {}
        self.requests: dict[RequestId, EngineCoreRequest] = {}
        self.past: list[tuple[EngineCoreRequest, Completion]] = []
        self.now = 0.0

    @classmethod
    def of(cls, *, max_concurrent_plans: int = 1, hash_salt: bytes = b"", **settings: Any) -> CoreDriver:
        """Make core and runner from the fields of `EngineConfig`."""
        config = EngineConfig.of(model="null", **settings)
        runner = NullModelRunner(config, max_concurrent_plans)
        capacity = runner.start(lambda phase, done, total: None)
        return cls(EngineCore(config, capacity, hash_salt=hash_salt), runner)

    def add(self, name: str, prompt: Sequence[int], *, cache_salt: str | None = None, **params: Any) -> RequestId:
        """Add a request named `name`; greedy unless `params`, fields of `SamplingParams`, say otherwise.

        A name may be used again once its request has ended; what that one got moves to `past`.
        """
        request = EngineCoreRequest(
            request_id=RequestId(name),
            external_id=name,
            prompt_token_ids=list(prompt),
            sampling_params=SamplingParams(**{"temperature": 0.0, **params}),
            arrival_time=0.0,
            cache_salt=cache_salt,
        )
        self.core.add(request, self._tick())
        if request.request_id in self.completions:
            self.past.append((self.requests[request.request_id], self.completions[request.request_id]))
        self.requests[request.request_id] = request
        self.completions[request.request_id] = Completion()
        self.check()
        return request.request_id

    def abort(self, *names: str, reason: AbortReason = AbortReason.CLIENT) -> None:
        """Abort these requests."""
        self.core.abort([RequestId(name) for name in names], reason)
        self.check()

    def plan(self, *, fails: bool = False) -> SchedulerOutput | None:
        """Make the next plan and execute it, unless its step is to fail.

        A plan that needs the tokens of a failed one fails too, as on a real executor.
        """
        plan = self.core.plan(self._tick())
        if plan is not None:
            self.plans.append((plan, not fails and self._execute(plan)))
        elif self.core.has_work:
            assert self.core.waits_for is not None, "there is work, no plan, and nothing that will change it"
        self.check()
        return plan

    def finish_step(self, *, blamed: Iterable[str] | None = None, broken: Iterable[str] = ()) -> SchedulerOutput:
        """Commit the oldest plan, or fail it if its step failed.

        A failed step is blamed on `blamed` (None: all its rows); of one that ran, the rows of `broken` failed alone.
        """
        plan, has_run = self.plans.popleft()
        if has_run:
            output = self.runner.sample(self.core.grammar_masks(plan))
            failed = {RequestId(name): SIMULATED_FAILURE for name in broken}
            self.core.commit(plan, msgspec.structs.replace(output, failed=failed), self._tick())
        else:
            self.core.fail(plan, SIMULATED_FAILURE, None if blamed is None else [RequestId(name) for name in blamed])
        self.check()
        return plan

    def step(self) -> SchedulerOutput | None:
        """Make one plan and finish the oldest; returns the plan made."""
        plan = self.plan()
        if self.plans:
            self.finish_step()
        return plan

    def run(self) -> dict[RequestId, Completion]:
        """Keep as many plans in flight as may be until nothing is left, or only what waits for a resume."""
        while self.core.has_work:
            while self.plan() is not None:
                pass
            if self.plans:
                self.finish_step()
            elif self.core.waits_for is WaitsFor.RESUME:
                break
        return self.completions

    def expected(self, name: str, num_tokens: int) -> list[int]:
        """Return the first `num_tokens` tokens that request `name` must get."""
        request = self.requests[RequestId(name)]
        return expected_tokens(request.prompt_token_ids, request.sampling_params, num_tokens)

    def _execute(self, plan: SchedulerOutput) -> bool:
        try:
            self.runner.execute(plan)
        except KeyError:
            assert any(not has_run for _, has_run in self.plans), "late tokens are missing although no step failed"
            return False
        return True

    def _tick(self) -> float:
        self.now += 1.0
        return self.now

    def check(self) -> None:
        """Check the core's invariants and collect its outputs; called after each act."""
        self.core.check_invariants()
        for output in self.core.take_outputs():
            completion = self.completions.setdefault(output.request_id, Completion())
            assert completion.finish_reason is None, f"{output.request_id}: an output after the terminal one"
            completion.outputs.append(output)
            completion.token_ids += output.new_token_ids


def run_core(core: EngineCore, runner: NullModelRunner) -> dict[RequestId, Completion]:
    """Run all that `core` was given on `runner` to the end, checking invariants after each act."""
    return CoreDriver(core, runner).run()
