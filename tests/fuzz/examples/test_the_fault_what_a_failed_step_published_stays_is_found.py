"""With what a failed step published stays: AssertionError: r1 got [112], alone it gets [85]."""

from __future__ import annotations

from fuzz.faults import assert_found
from fuzz.scheduler import Add, Plan, Settings, Simulation


def test_the_fault_what_a_failed_step_published_stays_is_found() -> None:
    settings = Settings(block_size=2, max_model_len=5, max_concurrent_plans=2)
    operations = [
        Add(length=32),
        Plan(fails=True),
        Add(length=3),
    ]
    assert_found("what a failed step published stays", Simulation, settings, operations)
