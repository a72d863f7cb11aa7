"""With blocks are published before they are full: AssertionError: r1 got [119], alone it gets [69]."""

from __future__ import annotations

from fuzz.faults import assert_found
from fuzz.scheduler import Add, Settings, Simulation


def test_the_fault_blocks_are_published_before_they_are_full_is_found() -> None:
    settings = Settings(block_size=2, max_model_len=4, max_num_seqs=2, long_prefill_token_threshold=1)
    operations = [
        Add(prefix=2, length=2),
        Add(prefix=2, length=3),
    ]
    assert_found("blocks are published before they are full", Simulation, settings, operations)
