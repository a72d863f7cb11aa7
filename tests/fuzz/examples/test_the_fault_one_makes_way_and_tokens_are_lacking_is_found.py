"""With one makes way and tokens are lacking: AssertionError: somebody made way for Request(r2 WAITING computed=0/1+."""

from __future__ import annotations

from fuzz.faults import assert_found
from fuzz.scheduler import Add, Finish, Settings, Simulation


def test_the_fault_one_makes_way_and_tokens_are_lacking_is_found() -> None:
    settings = Settings(block_size=3, max_model_len=6, max_num_seqs=2, scheduling_policy="priority")
    operations = [
        Add(max_tokens=3),
        Finish(),
        Add(length=5, priority=-1),
        Add(priority=-1),
    ]
    assert_found("one makes way and tokens are lacking", Simulation, settings, operations)
