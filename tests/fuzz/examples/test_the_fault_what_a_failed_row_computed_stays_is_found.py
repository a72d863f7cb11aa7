"""With what a failed row computed stays: AssertionError: r1 got [122], alone it gets [84]."""

from __future__ import annotations

from fuzz.faults import assert_found
from fuzz.scheduler import Add, Plan, Settings, Simulation


def test_the_fault_what_a_failed_row_computed_stays_is_found() -> None:
    settings = Settings(max_model_len=3)
    operations = [
        Add(),
        Plan(corrupts=0),
        Add(length=2),
    ]
    assert_found("what a failed row computed stays", Simulation, settings, operations)
