"""With late tokens of the preempted are dropped: AssertionError: r0 did not get the token that its row sampled."""

from __future__ import annotations

from fuzz.faults import assert_found
from fuzz.scheduler import Add, Plan, Settings, Simulation


def test_the_fault_late_tokens_of_the_preempted_are_dropped_is_found() -> None:
    settings = Settings(scheduling_policy="priority", max_concurrent_plans=2)
    operations = [
        Add(priority=1),
        Plan(),
        Add(),
    ]
    assert_found("late tokens of the preempted are dropped", Simulation, settings, operations)
