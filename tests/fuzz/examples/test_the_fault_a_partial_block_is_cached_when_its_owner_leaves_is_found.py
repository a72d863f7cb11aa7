"""With a partial block is cached when its owner leaves: AssertionError: r1 got [83], alone it gets [85]."""

from __future__ import annotations

from fuzz.faults import assert_found
from fuzz.scheduler import Abort, Add, Plan, Settings, Simulation


def test_the_fault_a_partial_block_is_cached_when_its_owner_leaves_is_found() -> None:
    settings = Settings(block_size=2, max_model_len=4)
    operations = [
        Add(length=2),
        Plan(),
        Abort(),
        Add(length=39),
    ]
    assert_found("a partial block is cached when its owner leaves", Simulation, settings, operations)
