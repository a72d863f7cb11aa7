"""With what a failed step published stays: AssertionError: r1 got [86], alone it gets [69]."""

from __future__ import annotations

from fuzz.faults import assert_found
from fuzz.scheduler import Add, Plan, Settings, Simulation


def test_the_fault_what_a_failed_step_published_stays_is_found() -> None:
    settings = Settings(block_size=2, max_model_len=4, max_concurrent_plans=2)
    operations = [
        Add(prefix=2, length=10),
        Plan(fails=True),
        Add(prefix=2, length=3),
    ]
    assert_found("what a failed step published stays", Simulation, settings, operations)
