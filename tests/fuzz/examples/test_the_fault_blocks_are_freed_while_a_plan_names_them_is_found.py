"""With blocks are freed while a plan names them: AssertionError: r1 writes blocks {1}, which an earlier row in flig."""

from __future__ import annotations

from fuzz.faults import assert_found
from fuzz.scheduler import Add, Plan, Settings, Simulation


def test_the_fault_blocks_are_freed_while_a_plan_names_them_is_found() -> None:
    settings = Settings(block_size=2, scheduling_policy="priority", max_concurrent_plans=2)
    operations = [
        Add(priority=1),
        Plan(),
        Add(),
    ]
    assert_found("blocks are freed while a plan names them", Simulation, settings, operations)
