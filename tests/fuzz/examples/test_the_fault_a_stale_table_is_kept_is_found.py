"""With a stale table is kept: AssertionError: r0 writes blocks {1}, which an earlier row in flight reads."""

from __future__ import annotations

from fuzz.faults import assert_found
from fuzz.scheduler import Abort, Add, Plan, Settings, Simulation


def test_the_fault_a_stale_table_is_kept_is_found() -> None:
    settings = Settings(max_concurrent_plans=2)
    operations = [
        Add(),
        Plan(),
        Abort(),
        Add(reuses_name=True),
    ]
    assert_found("a stale table is kept", Simulation, settings, operations)
