"""With a reference is not dropped: AssertionError: references [0, 1, 0, 0] are not those of tables and plans [0, 0,."""

from __future__ import annotations

from fuzz.faults import assert_found
from fuzz.scheduler import Add, Settings, Simulation


def test_the_fault_a_reference_is_not_dropped_is_found() -> None:
    settings = Settings()
    operations = [
        Add(),
    ]
    assert_found("a reference is not dropped", Simulation, settings, operations)
