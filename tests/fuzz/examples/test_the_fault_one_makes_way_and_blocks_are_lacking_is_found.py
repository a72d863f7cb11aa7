"""With one makes way and blocks are lacking: AssertionError: somebody made way for Request(r2 WAITING computed=0/1+."""

from __future__ import annotations

from fuzz.faults import assert_found
from fuzz.scheduler import Add, Finish, Settings, Simulation


def test_the_fault_one_makes_way_and_blocks_are_lacking_is_found() -> None:
    settings = Settings(
        block_size=3,
        max_model_len=9,
        max_num_seqs=3,
        max_num_batched_tokens=5,
        long_prefill_token_threshold=3,
        scheduling_policy="fair",
    )
    operations = [
        Add(length=6, max_tokens=3),
        Add(max_tokens=3),
        Finish(),
        Add(client=1),
    ]
    assert_found("one makes way and blocks are lacking", Simulation, settings, operations)
