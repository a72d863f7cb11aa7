"""With a step that has ended stays uncommitted: AssertionError: steps {1} have ended, and what they published or he."""

from __future__ import annotations

from fuzz.faults import assert_found
from fuzz.scheduler import Add, Settings, Simulation


def test_the_fault_a_step_that_has_ended_stays_uncommitted_is_found() -> None:
    settings = Settings()
    operations = [
        Add(),
    ]
    assert_found("a step that has ended stays uncommitted", Simulation, settings, operations)
