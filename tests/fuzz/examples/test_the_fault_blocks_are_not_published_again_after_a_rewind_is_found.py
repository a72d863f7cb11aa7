"""With blocks are not published again after a rewind: AssertionError: Request(r2 RUNNING computed=4/4+1) can be hit."""

from __future__ import annotations

from fuzz.faults import assert_found
from fuzz.scheduler import Abort, Add, Plan, Settings, Simulation


def test_the_fault_blocks_are_not_published_again_after_a_rewind_is_found() -> None:
    settings = Settings(block_size=2, max_model_len=5, max_num_batched_tokens=2, max_concurrent_plans=2)
    operations = [
        Add(),
        Add(max_tokens=2),
        Add(length=2, max_tokens=3),
        Abort(),
        Plan(fails=True),
    ]
    assert_found("blocks are not published again after a rewind", Simulation, settings, operations)
