from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from fuzz import strategies
from fuzz.driver import Run
from fuzz.history import Operation, replay
from fuzz.kv_cache import TARGET, Settings, Simulation


class CacheMachine(RuleBasedStateMachine):
    """Admits, computes, releases, settles, undoes and clears in any order; each rule is one operation of a history."""

    @initialize(settings=strategies.drawn(Settings))
    def start(self, settings: Settings) -> None:
        self.simulation = Simulation(settings)

    @rule(operation=strategies.operations(TARGET))
    def apply(self, operation: Operation) -> None:
        self.simulation.apply(operation)

    def teardown(self) -> None:
        if hasattr(self, "simulation"):
            self.simulation.finish()


TestCacheMachine = pytest.mark.slow(CacheMachine.TestCase)
TestCacheMachine.settings = hypothesis_settings(
    max_examples=150, stateful_step_count=50, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)


@pytest.mark.slow
@hypothesis_settings(max_examples=400, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(settings=strategies.drawn(Settings), operations=strategies.histories(TARGET))
def test_a_request_reads_only_its_own_tokens_in_any_history(
    settings: Settings, operations: Sequence[Operation]
) -> None:
    replay(Simulation(settings), operations)


@pytest.mark.slow
def test_seeded_histories_of_a_tiny_pool_are_clean() -> None:
    assert Run(TARGET, seed=1).find(max_seconds=1e9, max_histories=200) is None
