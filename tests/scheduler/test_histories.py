from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from engine.protocol import PauseMode
from engine.request import RequestStatus
from fuzz import strategies
from fuzz.driver import Run
from fuzz.history import Operation, replay
from fuzz.scheduler import TARGET, Abort, Add, Finish, Pause, Plan, Reset, Resume, Settings, Simulation


class CoreMachine(RuleBasedStateMachine):
    """Adds, aborts, steps, failures, pauses and resets in any order; each rule is one operation of a history."""

    @initialize(settings=strategies.drawn(Settings))
    def start(self, settings: Settings) -> None:
        self.simulation = Simulation(settings)

    @rule(operation=strategies.operations(TARGET))
    def apply(self, operation: Operation) -> None:
        self.simulation.apply(operation)

    @rule(num_steps=st.integers(1, 8))
    def run(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self.simulation.apply(Plan())
            self.simulation.apply(Finish())

    def teardown(self) -> None:
        if hasattr(self, "simulation"):
            self.simulation.finish()


TestCoreMachine = pytest.mark.slow(CoreMachine.TestCase)
TestCoreMachine.settings = hypothesis_settings(
    max_examples=250, stateful_step_count=40, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)


@pytest.mark.slow
@hypothesis_settings(max_examples=500, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(settings=strategies.drawn(Settings), operations=strategies.histories(TARGET))
def test_in_any_history_each_request_gets_what_it_gets_alone_and_one_end(
    settings: Settings, operations: Sequence[Operation]
) -> None:
    replay(Simulation(settings), operations)


@pytest.mark.slow
def test_seeded_histories_are_clean_and_take_every_move_but_a_rare_one() -> None:
    this = Run(TARGET, seed=1)
    failure = this.find(max_seconds=1e9, max_histories=250)
    assert failure is None
    rare = {(RequestStatus.PREEMPTED, RequestStatus.FINISHED_REPETITION)}  # a long run takes it too
    assert this.coverage.missing_moves <= rare


KEPT: list[tuple[Settings, list[Operation]]] = [
    (  # a preempted request's late token arrives after it gave its blocks back
        Settings(max_model_len=3, max_num_seqs=2, max_num_batched_tokens=512, max_concurrent_plans=2),
        [Add(max_tokens=2), Add(prefix=1, max_tokens=2), Plan(), Plan(), Finish(), Finish()],
    ),
    (  # the sharer of a failed step's block is rewound, and its own step, already in flight, counts for nothing
        Settings(
            num_gpu_blocks_override=9,
            block_size=2,
            max_model_len=12,
            max_num_seqs=64,
            max_num_batched_tokens=512,
            max_concurrent_plans=3,
        ),
        [
            Add(length=6, max_tokens=4),
            Plan(fails=True),
            Add(length=6, max_tokens=4),
            *(Plan(), Plan(), Finish(culprit=0), Finish(), Plan(), Finish()),
        ],
    ),
    (  # a row fails alone and its blocks are forgotten; a later step fails, in which a sharer's block was computed
        Settings(
            num_gpu_blocks_override=8,
            block_size=3,
            max_model_len=23,
            max_num_seqs=6,
            max_num_batched_tokens=26,
            long_prefill_token_threshold=1,
            max_concurrent_plans=3,
        ),
        [
            *(Add(prefix=1, length=6), Add(), Plan(), Finish(culprit=1)),
            *(Plan(), Plan(), Plan(), Finish(), Plan(fails=True), Add(prefix=1, length=7)),
            *(Finish(), Plan(), Finish(culprit=0)),
        ],
    ),
    (  # reset while a step is in flight, then the same prompt
        Settings(
            num_gpu_blocks_override=9,
            block_size=2,
            max_model_len=12,
            max_num_seqs=64,
            max_num_batched_tokens=512,
            max_concurrent_plans=2,
        ),
        [
            *(Add(length=6, max_tokens=4), Plan(), Reset(reset_running=True), Add(length=6, max_tokens=4)),
            *(Plan(), Finish(), Reset(), Plan(), Finish()),
        ],
    ),
    (  # abort, use the id again, pause, resume, all with the first owner's step in flight
        Settings(
            num_gpu_blocks_override=6,
            block_size=2,
            max_model_len=12,
            max_num_seqs=64,
            max_num_batched_tokens=512,
            max_concurrent_plans=2,
        ),
        [
            *(Add(length=5, max_tokens=4), Plan(), Abort(), Add(prefix=1, length=5, max_tokens=4, reuses_name=True)),
            *(Plan(), Pause(PauseMode.KEEP), Finish(), Plan(), Resume(), Plan(), Finish()),
        ],
    ),
]


@pytest.mark.parametrize(("settings", "operations"), KEPT)
@pytest.mark.parametrize("runs_late", [False, True])
def test_histories_worth_keeping_stay_clean(settings: Settings, operations: list[Operation], runs_late: bool) -> None:
    replay(Simulation(dataclasses.replace(settings, runs_late=runs_late)), operations)
