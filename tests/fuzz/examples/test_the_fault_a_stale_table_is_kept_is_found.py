"""With a stale table is kept: AssertionError: r2 writes blocks {2}, which an earlier row in flight reads."""

from __future__ import annotations

from fuzz.faults import assert_found
from fuzz.scheduler import Abort, Add, Finish, Plan, Settings, Simulation


def test_the_fault_a_stale_table_is_kept_is_found() -> None:
    settings = Settings(max_concurrent_plans=2)
    operations = [
        Add(),
        Abort(),
        Add(),
        Plan(),
        Finish(),
        Add(),
        Plan(),
        Abort(index=20),
        Add(reuses_name=True),
    ]
    assert_found("a stale table is kept", Simulation, settings, operations)
