"""With a victim has a row in the same plan: AssertionError: {'r0'} lost their blocks in a plan with a row of theirs."""

from __future__ import annotations

from fuzz.faults import assert_found
from fuzz.scheduler import Add, Settings, Simulation


def test_the_fault_a_victim_has_a_row_in_the_same_plan_is_found() -> None:
    settings = Settings(max_model_len=3, max_num_seqs=2)
    operations = [
        Add(max_tokens=2),
        Add(max_tokens=2),
    ]
    assert_found("a victim has a row in the same plan", Simulation, settings, operations)
