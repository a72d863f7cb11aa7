"""With a partial block is cached when its owner leaves: AssertionError: r2 got [73], alone it gets [69]."""

from __future__ import annotations

from fuzz.faults import assert_found
from fuzz.scheduler import Add, Plan, Settings, Simulation


def test_the_fault_a_partial_block_is_cached_when_its_owner_leaves_is_found() -> None:
    settings = Settings(num_gpu_blocks_override=4, max_model_len=4, max_num_seqs=2, max_concurrent_plans=2)
    operations = [
        Add(prefix=2),
        Plan(fails=True),
        Add(prefix=2, length=2),
        Add(prefix=2, length=3),
    ]
    assert_found("a partial block is cached when its owner leaves", Simulation, settings, operations)
