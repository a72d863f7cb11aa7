"""With the parts of a session that wait are not bounded: AssertionError: r0: refused False, no room to wait True: [."""

from __future__ import annotations

from fuzz.faults import assert_found
from fuzz.scheduler import Add, Extend, Settings, Simulation


def test_the_fault_the_parts_of_a_session_that_wait_are_not_bounded_is_found() -> None:
    settings = Settings(max_num_waiting=1)
    operations = [
        Add(kind="session"),
        Extend(),
        Extend(),
    ]
    assert_found("the parts of a session that wait are not bounded", Simulation, settings, operations)
