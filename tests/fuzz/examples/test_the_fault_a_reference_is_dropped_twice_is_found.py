"""With a reference is dropped twice: AssertionError: references [0, -1, 0, 0] are not those of tables and plans [0,."""

from __future__ import annotations

from fuzz.faults import assert_found
from fuzz.scheduler import Add, Settings, Simulation


def test_the_fault_a_reference_is_dropped_twice_is_found() -> None:
    settings = Settings()
    operations = [
        Add(),
    ]
    assert_found("a reference is dropped twice", Simulation, settings, operations)
