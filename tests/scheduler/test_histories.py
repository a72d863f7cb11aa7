from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from engine.protocol import PauseMode
from engine.request import TRANSITIONS, Request, RequestStatus
from fuzz import strategies
from fuzz.__main__ import TARGETS
from fuzz.scheduler import Abort, Add, Finish, Operation, Pause, Plan, Reset, Resume, Simulation, draw_history
from fuzz.scheduler import draw_settings as draw_engine


class CoreMachine(RuleBasedStateMachine):
    """Adds, aborts, steps, failures, pauses and resets in any order; each rule is one operation of a history."""

    @initialize(engine=strategies.settings())
    def start(self, engine: dict[str, Any]) -> None:
        self.simulation = Simulation(engine)

    @rule(operation=strategies.operations)
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
TestCoreMachine.settings = settings(
    max_examples=250, stateful_step_count=40, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)


@pytest.mark.slow
@settings(max_examples=500, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(engine=strategies.settings(), history=strategies.histories)
def test_in_any_history_each_request_gets_what_it_gets_alone_and_one_end(
    engine: dict[str, Any], history: list[Operation]
) -> None:
    simulation = Simulation(engine)
    for operation in history:
        simulation.apply(operation)
    simulation.finish()


@pytest.mark.slow
def test_seeded_histories_are_clean_and_take_every_transition_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: set[tuple[RequestStatus, RequestStatus]] = set()
    move_to = Request.move_to

    def recorded(request: Request, status: RequestStatus) -> None:
        taken.add((request.status, status))
        move_to(request, status)

    monkeypatch.setattr(Request, "move_to", recorded)
    for number in range(400):
        drawn = random.Random(number)
        engine = draw_engine(drawn)
        simulation = Simulation(engine)
        for operation in draw_history(drawn, 60, engine["max_model_len"]):
            simulation.apply(operation)
        simulation.finish()
    not_built = {
        RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR,
        RequestStatus.WAITING_FOR_STREAMING_REQ,
        RequestStatus.FINISHED_IGNORED,
        RequestStatus.FINISHED_REPETITION,
    }
    possible = {
        (before, after)
        for before in set(TRANSITIONS) - not_built
        for after in TRANSITIONS[before] - not_built - {RequestStatus.WAITING}
    }
    assert taken == possible


KEPT: list[tuple[dict[str, Any], list[Operation]]] = [
    (  # a preempted request's late token arrives after it gave its blocks back
        {
            "num_gpu_blocks_override": 3,
            "block_size": 1,
            "max_model_len": 3,
            "max_num_seqs": 2,
            "max_concurrent_plans": 2,
        },
        [Add(length=1, max_tokens=2), Add(prefix=1, length=1, max_tokens=2), Plan(), Plan(), Finish(), Finish()],
    ),
    (  # the sharer of a failed step's block is rewound, and its own step, already in flight, counts for nothing
        {"num_gpu_blocks_override": 9, "block_size": 2, "max_model_len": 12, "max_concurrent_plans": 3},
        [Add(length=6), Plan(fails=True), Add(length=6), Plan(), Plan(), Finish(culprit=0), Finish(), Plan(), Finish()],
    ),
    (  # a row fails alone and its blocks are forgotten; a later step fails, in which a sharer's block was computed
        {
            **{"num_gpu_blocks_override": 8, "block_size": 3, "max_model_len": 23, "max_num_seqs": 6},
            **{"max_num_batched_tokens": 26, "long_prefill_token_threshold": 1, "max_concurrent_plans": 3},
        },
        [
            *(Add(prefix=1, length=6, max_tokens=1), Add(max_tokens=1), Plan(), Finish(culprit=1)),
            *(Plan(), Plan(), Plan(), Finish(), Plan(fails=True), Add(prefix=1, length=7, max_tokens=1)),
            *(Finish(), Plan(), Finish(culprit=0)),
        ],
    ),
    (  # reset while a step is in flight, then the same prompt
        {"num_gpu_blocks_override": 9, "block_size": 2, "max_model_len": 12, "max_concurrent_plans": 2},
        [Add(length=6), Plan(), Reset(reset_running=True), Add(length=6), Plan(), Finish(), Reset(), Plan(), Finish()],
    ),
    (  # abort, use the id again, pause, resume, all with the first owner's step in flight
        {"num_gpu_blocks_override": 6, "block_size": 2, "max_model_len": 12, "max_concurrent_plans": 2},
        [
            *(Add(length=5), Plan(), Abort(0), Add(prefix=1, length=5, reuses_name=True), Plan()),
            *(Pause(PauseMode.KEEP), Finish(), Plan(), Resume(), Plan(), Finish()),
        ],
    ),
]


@pytest.mark.parametrize(("engine", "history"), KEPT)
def test_histories_worth_keeping_stay_clean(engine: dict[str, Any], history: list[Operation]) -> None:
    simulation = Simulation(engine)
    for operation in history:
        simulation.apply(operation)
    simulation.finish()


@pytest.mark.parametrize("target", sorted(TARGETS))
def test_every_target_of_the_fuzzer_runs_from_a_seed_and_says_what_it_did(
    target: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert TARGETS[target](0.001, 1) > 0
    assert capsys.readouterr().out.startswith(f"{target}: ")
