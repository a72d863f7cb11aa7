"""With who relies on a failed step goes on: AssertionError: r3 got [37], alone it gets [85]."""

from __future__ import annotations

from fuzz.faults import assert_found
from fuzz.scheduler import Add, Plan, Settings, Simulation


def test_the_fault_who_relies_on_a_failed_step_goes_on_is_found() -> None:
    settings = Settings(
        num_gpu_blocks_override=4,
        block_size=2,
        max_model_len=8,
        max_num_seqs=4,
        max_concurrent_plans=2,
    )
    operations = [
        Add(),
        Add(length=18),
        Add(),
        Add(length=35),
        Plan(fails=True),
    ]
    assert_found("who relies on a failed step goes on", Simulation, settings, operations)
