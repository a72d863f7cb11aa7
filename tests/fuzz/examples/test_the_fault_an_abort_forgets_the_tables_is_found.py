"""With an abort forgets the tables: AssertionError: tables are not those of who runs."""

from __future__ import annotations

from fuzz.faults import assert_found
from fuzz.scheduler import Abort, Add, Plan, Settings, Simulation


def test_the_fault_an_abort_forgets_the_tables_is_found() -> None:
    settings = Settings()
    operations = [
        Add(),
        Plan(),
        Abort(),
    ]
    assert_found("an abort forgets the tables", Simulation, settings, operations)
