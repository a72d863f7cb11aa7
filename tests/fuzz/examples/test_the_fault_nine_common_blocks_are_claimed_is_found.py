"""With nine common blocks are claimed: AssertionError: 9 are said to be shared, and are (1,)."""

from __future__ import annotations

from fuzz.faults import assert_found
from fuzz.scheduler import Add, Settings, Simulation


def test_the_fault_nine_common_blocks_are_claimed_is_found() -> None:
    settings = Settings()
    operations = [
        Add(),
    ]
    assert_found("nine common blocks are claimed", Simulation, settings, operations)
