"""With blocks are published before they are full: AssertionError: r1 got [83], alone it gets [85]."""

from __future__ import annotations

from fuzz.faults import assert_found
from fuzz.scheduler import Abort, Add, Plan, Settings, Simulation


def test_the_fault_blocks_are_published_before_they_are_full_is_found() -> None:
    settings = Settings(block_size=2, max_model_len=4)
    operations = [
        Add(length=2),
        Plan(),
        Add(length=3),
        Abort(),
    ]
    assert_found("blocks are published before they are full", Simulation, settings, operations)
