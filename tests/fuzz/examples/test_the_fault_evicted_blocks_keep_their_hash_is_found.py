"""With evicted blocks keep their hash: AssertionError: block 2 is hit under a hash that is not its own."""

from __future__ import annotations

from fuzz.faults import assert_found
from fuzz.scheduler import Add, Settings, Simulation


def test_the_fault_evicted_blocks_keep_their_hash_is_found() -> None:
    settings = Settings(max_model_len=3)
    operations = [
        Add(max_tokens=2),
        Add(prefix=1, max_tokens=2),
    ]
    assert_found("evicted blocks keep their hash", Simulation, settings, operations)
