"""With evicted blocks keep their hash: AssertionError: the map of hashes and the hashes of blocks disagree."""

from __future__ import annotations

from fuzz.faults import assert_found
from fuzz.scheduler import Add, Settings, Simulation


def test_the_fault_evicted_blocks_keep_their_hash_is_found() -> None:
    settings = Settings(max_model_len=3)
    operations = [
        Add(max_tokens=2),
        Add(max_tokens=2, salt=1),
    ]
    assert_found("evicted blocks keep their hash", Simulation, settings, operations)
