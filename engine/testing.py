"""What tests and fuzzers may use: a core driven on the integer model, with its invariants checked.

No product file imports this. The integer model is the oracle: every request's tokens must equal `expected_tokens`,
whatever else ran, was aborted, preempted, or failed. What no later state shows is checked on the plans themselves: a
block that a plan in flight names is written by nobody else.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np

from engine.config import EngineConfig
from engine.core import EngineCore
from engine.errors import Cause
from engine.executor.null import NullModelRunner, Windows, expected_tokens
from engine.kv_cache.spec import num_skipped_blocks
from engine.outputs import FinishReason, GrammarMasks, ModelRunnerOutput, RequestId, ScheduledRequest, SchedulerOutput
from engine.protocol import AbortReason, EngineCoreOutput, EngineCoreRequest, PauseMode, SessionPart
from engine.request import Request
from engine.sampling_params import SamplingParams
from engine.structured_output.grammar import BITS_A_WORD

__all__ = ["Completion", "CoreDriver", "NullModelRunner", "TestGrammar", "expected_tokens", "run_core"]

AVAILABLE_MEMORY_BYTES = 2**30
"""What the pages of a driver's runner may take: a constant, for asking the machine takes longer than a short run."""
SIMULATED_FAILURE = Cause("SimulatedFailure", "the step was made to fail")
_FAITHFULLY = contextlib.nullcontext()


class TestGrammar:
    """A grammar of `length` tokens at most: each that, added to the sum of all before it, `step` divides.

    A text of that many tokens is complete if the grammar `ends`; if not, it allows nothing more, which is an error.
    """

    __test__ = False

    def __init__(self, step: int, length: int, *, ends: bool = False) -> None:
        """Start with no token."""
        self.step = step
        self.length = length
        self.ends = ends
        self._num_tokens = self._sum = 0

    def anew(self) -> TestGrammar:
        """Return the same grammar before any token."""
        return TestGrammar(self.step, self.length, ends=self.ends)

    def accept_tokens(self, token_ids: Sequence[int]) -> bool:
        """See `Grammar`."""
        for token_id in token_ids:
            self._sum += token_id
            self._num_tokens += 1
            if self._sum % self.step or self._num_tokens > self.length:
                return False
        return True

    @property
    def is_finished(self) -> bool:
        """See `Grammar`."""
        return self.ends and self._num_tokens == self.length

    @property
    def failure(self) -> str | None:
        """See `Grammar`."""
        return None

    def fill_bitmask(self, bitmask: GrammarMasks) -> None:
        """See `Grammar`."""
        if self._num_tokens == self.length:
            return
        bits = np.zeros(len(bitmask) * BITS_A_WORD, dtype=np.uint8)
        bits[-self._sum % self.step :: self.step] = 1
        bitmask[:] = np.packbits(bits, bitorder="little").view(np.int32)


@dataclass
class Completion:
    """All that one request got so far; `parts` and `grammars` are what it was given beyond its first prompt."""

    token_ids: list[int] = field(default_factory=list)
    outputs: list[EngineCoreOutput] = field(default_factory=list)
    parts: list[SessionPart] = field(default_factory=list)
    grammars: list[TestGrammar] = field(default_factory=list)

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why it ended, or None while it goes on."""
        return self.outputs[-1].finish_reason if self.outputs else None

    @property
    def event_kinds(self) -> list[str]:
        """The events of all outputs, in order."""
        return [event.kind for output in self.outputs for event in output.events]


@dataclass(slots=True)
class LaunchedPlan:
    """A plan in flight, and what became of its step.

    Attributes:
        plan: The plan.
        fails: Whether its step is to fail, or has failed.
        corrupted: Whose row is to compute wrong K/V and to fail alone.
        masks: Of its grammar rows.
        output: The result of its step, once it was executed.
        follows_failure: Whether an earlier step, or a row of it, failed after this plan was made: rows may be void.
        reads: For each row whose it is, which blocks it reads or writes, and which it writes.
    """

    plan: SchedulerOutput
    fails: bool
    corrupted: RequestId | None = None
    masks: GrammarMasks | None = None
    output: ModelRunnerOutput | None = None
    follows_failure: bool = False
    reads: list[tuple[EngineCoreRequest | RequestId, set[int], set[int]]] = field(default_factory=list)


class CoreDriver:
    """A core with a runner, a clock that ticks once a call, and all outputs collected by request."""

    def __init__(
        self, core: EngineCore, runner: NullModelRunner, *, runs_late: bool = False, checks_acts: bool = True
    ) -> None:
        """Drive `core` on `runner`, which has been started.

        A plan runs when it is made or, with `runs_late`, only when its result is asked for: between the two nothing
        that it refers to may change. Invariants are checked after each step and, if it `checks_acts`, after each
        plan, abort and whatever else: what an act breaks shows at the latest when the next step ends.
        """
        self.core = core
        self.runner = runner
        self.runs_late = runs_late
        self.checks_acts = checks_acts
        self.plans: deque[LaunchedPlan] = deque()
        self.completions: dict[RequestId, Completion] = {}
        self.requests: dict[RequestId, EngineCoreRequest] = {}
        self.past: list[tuple[EngineCoreRequest, Completion]] = []
        self.now = 0.0
        self.num_outputs = 0

    @classmethod
    def of(
        cls,
        *,
        max_concurrent_plans: int = 1,
        windows: Windows = (None, None),
        hash_salt: bytes = b"",
        runs_late: bool = False,
        checks_acts: bool = True,
        **settings: Any,
    ) -> CoreDriver:
        """Make core and runner from the fields of `EngineConfig`."""
        config = EngineConfig.of(model="null", **settings)
        runner = NullModelRunner(
            config, max_concurrent_plans, windows=windows, available_memory=lambda: AVAILABLE_MEMORY_BYTES
        )
        capacity = runner.start(lambda phase, done, total: None)
        core = EngineCore(config, capacity, hash_salt=hash_salt)
        return cls(core, runner, runs_late=runs_late, checks_acts=checks_acts)

    @property
    def live_requests(self) -> Collection[Request]:
        """All requests that have not ended."""
        return self.core._requests.values()

    @property
    def num_preemptions(self) -> int:
        """How often a request's blocks were taken back."""
        return self.core._scheduler.num_preemptions

    def is_live(self, request: EngineCoreRequest | RequestId) -> bool:
        """Whether this very request, added here, has not ended."""
        if not isinstance(request, EngineCoreRequest):
            return False
        name = request.request_id
        return self.requests[name] is request and self.completions[name].finish_reason is None

    def add(
        self,
        name: str,
        prompt: Sequence[int],
        *,
        cache_salt: str | None = None,
        priority: int = 0,
        client_key: str | None = None,
        is_session: bool = False,
        awaits_grammar: bool = False,
        **params: Any,
    ) -> RequestId:
        """Add a request named `name`; greedy unless `params`, fields of `SamplingParams`, say otherwise.

        A name may be used again once its request has ended; what that one got moves to `past`.
        """
        request = EngineCoreRequest(
            request_id=RequestId(name),
            external_id=name,
            prompt_token_ids=list(prompt),
            sampling_params=_sampling_params(**{"temperature": 0.0, **params}),
            arrival_time=0.0,
            priority=priority,
            client_key=client_key,
            cache_salt=cache_salt,
            extras={"session": True} if is_session else None,
        )
        self.core.add(request, self._tick(), awaits_grammar=awaits_grammar)
        if request.request_id in self.completions:
            self.past.append((self.requests[request.request_id], self.completions[request.request_id]))
        self.requests[request.request_id] = request
        self.completions[request.request_id] = Completion()
        self._end_act()
        return request.request_id

    def set_grammar(self, name: str, grammar: TestGrammar | Cause) -> None:
        """Give a request the grammar it awaits, or say why there is none."""
        if isinstance(grammar, TestGrammar):
            self.completions[RequestId(name)].grammars.append(grammar.anew())
        self.core.set_grammar(RequestId(name), grammar)
        self._end_act()

    def extend(self, name: str, prompt: Sequence[int], **params: Any) -> None:
        """Add the next part of a session; an empty one ends it."""
        part = SessionPart(RequestId(name), list(prompt), _sampling_params(**{"temperature": 0.0, **params}))
        self.core.extend(part)
        self.completions[part.request_id].parts.append(part)
        self._end_act()

    def abort(self, *names: str, reason: AbortReason = AbortReason.CLIENT) -> None:
        """Abort these requests."""
        self.core.abort([RequestId(name) for name in names], reason)
        self._end_act()

    def plan(self, *, fails: bool = False, corrupts: int | None = None) -> SchedulerOutput | None:
        """Make the next plan and execute it, unless its step is to fail.

        A plan that needs the tokens of a failed one fails too, as on a real executor. Of one that runs, the
        `corrupts`-th row computes wrong K/V, so that whoever relies on them gets wrong tokens, and fails alone.
        """
        plan = self.core.plan(self._tick())
        if plan is not None:
            rows = plan.requests
            corrupted = None if corrupts is None or not rows else rows[corrupts % len(rows)].request_id
            launched = LaunchedPlan(plan, fails, corrupted, self.core.grammar_masks(plan))
            self._check_blocks(launched)
            _check_common_prefix(plan)
            self.plans.append(launched)
            if not self.runs_late:
                self._execute(launched)
            self._end_act()
            return plan
        if self.core.has_work:
            assert self.core.waits_for is not None, "there is work, no plan, and nothing that will change it"
            self._collect()
        return None

    def finish_step(
        self,
        *,
        blamed: Iterable[str] | None = None,
        broken: Iterable[str] = (),
        more: Mapping[str, Sequence[int]] | None = None,
    ) -> SchedulerOutput:
        """Commit the oldest plan, or fail it if its step failed.

        A failed step is blamed on `blamed` (None: all its rows); of one that ran, the rows of `broken` failed alone,
        and those of `more` sampled further tokens.
        """
        launched = self.plans[0]
        if self.runs_late:
            self._execute(launched)
        self.plans.popleft()
        plan = launched.plan
        output = launched.output
        if output is not None:
            if more:
                for row, token_ids in zip(plan.requests, output.sampled_token_ids, strict=True):
                    token_ids += more.get(row.request_id, ())
            names = [*broken] if launched.corrupted is None else [*broken, launched.corrupted]
            if names:
                failed = {**output.failed, **dict.fromkeys(map(RequestId, names), SIMULATED_FAILURE)}
                output = msgspec.structs.replace(output, failed=failed)
            self.core.commit(plan, output, self._tick())
        else:
            self.core.fail(plan, SIMULATED_FAILURE, None if blamed is None else [RequestId(name) for name in blamed])
        if output is None or output.failed:
            for later in self.plans:
                later.follows_failure = True
        self.check()
        return plan

    def pause(self, mode: PauseMode) -> None:
        """Pause."""
        self.core.pause(mode)
        self._end_act()

    def resume(self) -> None:
        """Undo the pause."""
        self.core.resume()
        self._end_act()

    def reset_prefix_cache(self, *, reset_running: bool = False) -> bool:
        """Reset the prefix cache; returns whether it was done."""
        done = self.core.reset_prefix_cache(reset_running)
        self._end_act()
        return done

    def step(self) -> SchedulerOutput | None:
        """Make one plan and finish the oldest; returns the plan made."""
        plan = self.plan()
        if self.plans:
            self.finish_step()
        return plan

    def run(self) -> dict[RequestId, Completion]:
        """Keep as many plans in flight as may be until nothing is left, or only what waits for something else."""
        while self.core.has_work:
            while self.plan() is not None:
                pass
            if self.plans:
                self.finish_step()
            elif self.core.waits_for is not None:
                break
        return self.completions

    def expected(self, name: str, num_tokens: int) -> list[int]:
        """Return the first `num_tokens` tokens that request `name` must get."""
        request = self.requests[RequestId(name)]
        return expected_tokens(request.prompt_token_ids, request.sampling_params, num_tokens, self.runner.windows)

    def _execute(self, launched: LaunchedPlan) -> None:
        if launched.fails or launched.output is not None:
            return
        try:
            with _corrupting(self.runner, launched.corrupted) if launched.corrupted else _FAITHFULLY:
                self.runner.execute(launched.plan)
            launched.output = self.runner.sample(launched.masks)
        except KeyError:
            earlier = itertools.takewhile(lambda other: other is not launched, self.plans)
            excused = launched.follows_failure or any(other.fails for other in earlier)
            assert excused, "late tokens are missing although no step failed"
            launched.fails = True

    def _check_blocks(self, launched: LaunchedPlan) -> None:
        """Check that the plan writes into no block that another request's row, of an earlier plan or above, reads.

        Rows of plans that follow a failed step count for nothing.
        """
        block_size, groups = self.core.capacity.block_size, self.core.capacity.kv_cache_groups
        above = [reads for earlier in self.plans if not earlier.follows_failure for reads in earlier.reads]
        for row in launched.plan.requests:
            owner = self.requests.get(row.request_id, row.request_id)
            first, last = row.start // block_size, (row.start + row.num_tokens - 1) // block_size
            written: set[int] = set()
            read: set[int] = set()
            for table, group in zip(row.block_tables, groups, strict=True):
                blocks = table.tolist()
                written.update(blocks[first : last + 1])
                read.update(blocks[num_skipped_blocks(group, row.start, block_size) :])
            for other, other_read, _ in above:
                is_apart = other is owner or written.isdisjoint(other_read)
                assert is_apart, (
                    f"{row.request_id} writes one of blocks {written}, which an earlier row in flight reads"
                )
            above.append((owner, read, written))
            launched.reads.append((owner, read, written))

    def num_cached_tokens(self, request: Request) -> int:
        """Return how many tokens of `request` one could hit who comes with the same."""
        return self.core._kv_cache.new_match(request).num_tokens

    def _tick(self) -> float:
        self.now += 1.0
        return self.now

    def check(self) -> None:
        """Check the core's invariants and collect its outputs."""
        self.core.check_invariants()
        self._collect()

    def _end_act(self) -> None:
        if self.checks_acts:
            self.core.check_invariants()
        self._collect()

    def _collect(self) -> None:
        for output in self.core.take_outputs():
            completion = self.completions.get(output.request_id)
            if completion is None:  # of a request that the core was given by others
                completion = self.completions[output.request_id] = Completion()
            assert completion.finish_reason is None, f"{output.request_id}: an output after the terminal one"
            completion.outputs.append(output)
            self.num_outputs += 1
            completion.token_ids += output.new_token_ids


@contextlib.contextmanager
def _corrupting(runner: NullModelRunner, request_id: RequestId) -> Iterator[None]:
    """Let the rows of `request_id` write wrong K/V while the block lasts."""
    write = runner._write

    def write_wrong(layer: int, row: ScheduledRequest, numbers: Any) -> None:
        write(layer, row, numbers ^ 1 if row.request_id == request_id else numbers)

    vars(runner)["_write"] = write_wrong
    try:
        yield
    finally:
        del vars(runner)["_write"]


def _check_common_prefix(plan: SchedulerOutput) -> None:
    """Check that the leading blocks which all rows are said to share are the same in all their tables."""
    for group, num_common in enumerate(plan.num_common_prefix_blocks):
        if num_common:
            leading = {tuple(row.block_tables[group][:num_common].tolist()) for row in plan.requests}
            shared = min(leading, default=())
            assert len(leading) <= 1, f"{num_common} leading blocks are said to be shared, and differ: {leading}"
            assert not leading or len(shared) == num_common, f"{num_common} are said to be shared, and are {shared}"


@functools.lru_cache(maxsize=4096)
def _sampling_params(**params: Any) -> SamplingParams:
    """Return parameters, checked once however many requests of a history have them."""
    return SamplingParams(**params)


def run_core(core: EngineCore, runner: NullModelRunner) -> dict[RequestId, Completion]:
    """Run all that `core` was given on `runner` to the end, checking invariants after each act."""
    return CoreDriver(core, runner).run()
