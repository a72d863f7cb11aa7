"""With the last token is hit too: AssertionError: there is work, no plan, and nothing that will change it."""

from __future__ import annotations

from fuzz.faults import assert_found
from fuzz.scheduler import Add, Settings, Simulation


def test_the_fault_the_last_token_is_hit_too_is_found() -> None:
    settings = Settings()
    operations = [
        Add(),
        Add(),
    ]
    assert_found("the last token is hit too", Simulation, settings, operations)
