"""Whatever order requests come, end, fail and are preempted in: each gets the tokens it gets alone, and one end.

A history is a list of plain operations that one interpreter, `Simulation`, applies to a core on the integer model, with
tiny pools and up to `max_concurrent_plans` plans in flight. The core's invariants are checked after each operation.
Histories come from Hypothesis (`fuzz/strategies.py`) or, for long runs, from a seeded generator::

    python -m fuzz scheduler --minutes 10 --seed 7
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from engine.errors import Cause
from engine.outputs import FinishReason, SchedulerOutput
from engine.protocol import AbortReason, EngineCoreRequest, PauseMode
from engine.testing import Completion, CoreDriver, expected_tokens

STOP_TOKENS = tuple(range(32, 127, 12))
"""Tokens that stop or end a request that asks for it; about one in twelve of what the integer model says."""


@dataclass(frozen=True)
class Add:
    """Add a request: `length` prompt tokens, the first of them shared by all of the same `prefix`."""

    prefix: int = 0
    length: int = 1
    max_tokens: int | None = 4
    min_tokens: int = 0
    stops: bool = False
    salt: int = 0
    seed: int | None = None
    reuses_name: bool = False


@dataclass(frozen=True)
class Abort:
    """Abort the `index`-th request ever named, whether it lives or not."""

    index: int = 0
    by_stop_string: bool = False


@dataclass(frozen=True)
class Plan:
    """Make a plan, if one may be in flight, and execute it; or let its step fail."""

    fails: bool = False


@dataclass(frozen=True)
class Finish:
    """Commit or fail the oldest plan; `culprit` is the row blamed or broken alone, None for all or no row."""

    culprit: int | None = None


@dataclass(frozen=True)
class Pause:
    """Pause in a mode."""

    mode: PauseMode = PauseMode.ABORT


@dataclass(frozen=True)
class Resume:
    """Undo a pause."""


@dataclass(frozen=True)
class Reset:
    """Reset the prefix cache."""

    reset_running: bool = False


Operation = Add | Abort | Plan | Finish | Pause | Resume | Reset


@dataclass
class Simulation:
    """Applies a history to a core with the given `EngineConfig` fields and depth."""

    settings: dict[str, Any]
    num_steps: int = 0
    names: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Start the core."""
        self.driver = CoreDriver.of(**self.settings)
        self.told: list[str] = []

    def apply(self, operation: Operation) -> None:
        """Apply one operation; one that cannot be applied now does nothing."""
        driver = self.driver
        match operation:
            case Add():
                self._add(operation)
            case Abort(index, by_stop_string):
                reason = AbortReason.STOP_STRING if by_stop_string else AbortReason.CLIENT
                driver.abort(self.names[index % len(self.names)] if self.names else "unknown", reason=reason)
            case Plan(fails):
                self._told(driver.plan(fails=fails))
            case Finish(culprit):
                self._finish(culprit)
            case Pause(mode):
                driver.core.pause(mode)
            case Resume():
                driver.core.resume()
            case Reset(reset_running):
                driver.core.reset_prefix_cache(reset_running)
        driver.check()

    def finish(self) -> None:
        """Resume, run everything to its end, and compare every request with its run alone.

        Raises:
            AssertionError: Something differs, leaked, or did not end exactly once.
        """
        self.driver.core.resume()
        while self.driver.core.has_work:
            self.apply(Plan())
            self.apply(Finish())
        assert self.driver.core.stats().num_used_blocks == 0, "blocks leaked"
        completions = self.driver.completions
        everyone = [*self.driver.past, *((self.driver.requests[name], completions[name]) for name in completions)]
        for request, completion in everyone:
            self._check(request, completion)
        assert sorted(self.told) == sorted(request.request_id for request, _ in everyone), "ends not told exactly once"

    def _add(self, operation: Add) -> None:
        name = f"r{len(self.names)}"
        ended = [name for name in self.names if self.driver.completions[name].finish_reason is not None]
        if operation.reuses_name and ended:
            name = ended[-1]
        else:
            self.names.append(name)
        prompt = [
            65 + (operation.prefix + position // 6 * operation.prefix) % 26 for position in range(operation.length)
        ]
        stops = STOP_TOKENS if operation.stops else ()
        self.driver.add(
            name,
            prompt,
            cache_salt=f"salt {operation.salt}" if operation.salt else None,
            max_tokens=operation.max_tokens,
            min_tokens=min(operation.min_tokens, operation.max_tokens or operation.min_tokens),
            stop_token_ids=stops[::2],
            eos_token_ids=stops[1::2],
            temperature=0.0 if operation.seed is None else 1.0,
            seed=operation.seed,
        )

    def _finish(self, culprit: int | None) -> None:
        if not self.driver.plans:
            return
        plan, has_run = self.driver.plans[0]
        names = [row.request_id for row in plan.requests]
        guilty = [names[culprit % len(names)]] if culprit is not None and names else []
        if has_run:
            self.driver.finish_step(broken=guilty)
        else:
            self.driver.finish_step(blamed=guilty if guilty else None)
        self.num_steps += 1

    def _told(self, plan: SchedulerOutput | None) -> None:
        if plan is not None:
            self.told += plan.finished_request_ids

    def _check(self, request: EngineCoreRequest, completion: Completion) -> None:
        outputs = completion.outputs
        assert outputs, f"{request.request_id} never got its end"
        ends = [output.finish_reason for output in outputs if output.finish_reason is not None]
        assert len(ends) == 1, f"{request.request_id} ended {len(ends)} times"
        tokens, reason, stop_reason = run_alone(request, self.driver.core.capacity.max_model_len)
        if completion.finish_reason in (FinishReason.STOP, FinishReason.LENGTH) and completion.token_ids == tokens:
            stop_string = completion.finish_reason is FinishReason.STOP and not outputs[-1].new_token_ids
            assert stop_string or (completion.finish_reason, outputs[-1].stop_reason) == (reason, stop_reason)
            return
        assert completion.finish_reason is not FinishReason.LENGTH, f"{request.request_id}: {completion.token_ids}"
        got = completion.token_ids
        assert got == tokens[: len(got)], f"{request.request_id} got {got}, alone it gets {tokens}"
        error: Cause | None = outputs[-1].error
        assert (error is not None) == (completion.finish_reason is FinishReason.ERROR)


def run_alone(request: EngineCoreRequest, max_model_len: int) -> tuple[list[int], FinishReason, int | None]:
    """Return the tokens, finish reason and stop reason of `request` by definition."""
    params = request.sampling_params
    room = max_model_len - len(request.prompt_token_ids)
    limit = max(0, room if params.max_tokens is None else min(room, params.max_tokens))
    tokens = expected_tokens(request.prompt_token_ids, params, limit)
    for count, token in enumerate(tokens, start=1):
        if count < params.min_tokens:
            continue
        if token in params.eos_token_ids:
            return tokens[:count], FinishReason.STOP, None
        if token in params.stop_token_ids:
            return tokens[:count], FinishReason.STOP, token
    return tokens, FinishReason.LENGTH, None


def draw_settings(random: random.Random) -> dict[str, Any]:
    """Draw a tiny engine."""
    num_blocks = random.randint(3, 14)
    block_size = random.choice([1, 2, 3, 4, 8])
    max_model_len = random.randint(2, num_blocks * block_size)
    max_num_seqs = random.randint(1, 6)
    chunked = random.random() < 0.8
    least_budget = max_num_seqs if chunked else max(max_num_seqs, max_model_len)
    return {
        "num_gpu_blocks_override": num_blocks,
        "block_size": block_size,
        "max_model_len": max_model_len,
        "max_num_seqs": max_num_seqs,
        "max_num_batched_tokens": least_budget + random.choice([0, 1, 5, 20]),
        "enable_chunked_prefill": chunked,
        "enable_prefix_caching": random.random() < 0.8,
        "long_prefill_token_threshold": random.choice([0, 0, 1, 3, 7]) if chunked else 0,
        "max_concurrent_plans": random.randint(1, 4),
    }


def draw_history(random: random.Random, num_operations: int, max_model_len: int) -> Iterator[Operation]:
    """Draw operations, most of them steps and arrivals."""
    kinds = random.choices("PPFFAAAXpsrR", weights=[30, 10, 35, 5, 8, 6, 4, 6, 1, 1, 3, 1], k=num_operations)
    for kind in kinds:
        yield _draw_operation(random, kind, max_model_len)


def _draw_operation(random: random.Random, kind: str, max_model_len: int) -> Operation:
    match kind:
        case "P":
            return Plan(fails=random.random() < 0.04)
        case "F":
            return Finish(culprit=random.randint(0, 9) if random.random() < 0.05 else None)
        case "A":
            return Add(
                prefix=random.randint(0, 2),
                length=random.randint(1, max_model_len),
                max_tokens=random.choice([None, 1, 2, 3, 5, 8, 13]),
                min_tokens=random.choice([0, 0, 2, 6]),
                stops=random.random() < 0.5,
                salt=random.choice([0, 0, 0, 1]),
                seed=random.choice([None, None, 7]),
                reuses_name=random.random() < 0.3,
            )
        case "X":
            return Abort(random.randint(0, 40), by_stop_string=random.random() < 0.3)
        case "p":
            return Pause(random.choice(list(PauseMode)))
        case "s":
            return Reset(reset_running=random.random() < 0.5)
        case _:
            return Resume()


def run(minutes: float, seed: int) -> int:
    """Run drawn histories until the time is over; returns how many steps were made.

    Raises:
        AssertionError: A history broke a promise; its settings and operations are printed first.
    """
    deadline = time.monotonic() + 60 * minutes
    num_steps = num_histories = 0
    while time.monotonic() < deadline:
        drawn = random.Random(f"{seed}.{num_histories}")
        settings = draw_settings(drawn)
        history = list(draw_history(drawn, drawn.choice([10, 40, 160]), settings["max_model_len"]))
        simulation = Simulation(settings)
        try:
            for operation in history:
                simulation.apply(operation)
            simulation.finish()
        except BaseException:
            print(f"seed {seed}, history {num_histories}: {settings}\n{history}")
            raise
        num_steps += simulation.num_steps
        num_histories += 1
    print(f"scheduler: {num_histories} histories, {num_steps} steps, clean")
    return num_steps
