"""With blocks are freed while a plan names them: AssertionError: r1 writes blocks {2}, which an earlier row in flig."""

from __future__ import annotations

from fuzz.faults import assert_found
from fuzz.scheduler import Abort, Add, Plan, Settings, Simulation


def test_the_fault_blocks_are_freed_while_a_plan_names_them_is_found() -> None:
    settings = Settings(max_model_len=3, max_concurrent_plans=2)
    operations = [
        Add(max_tokens=2),
        Plan(),
        Add(),
        Plan(),
        Abort(),
    ]
    assert_found("blocks are freed while a plan names them", Simulation, settings, operations)
