"""With who relies on a failed step goes on: AssertionError: Request(r0 RUNNING computed=6/7+0) can be hit for 0 tok."""

from __future__ import annotations

from fuzz.faults import assert_found
from fuzz.scheduler import Add, Finish, Plan, Settings, Simulation


def test_the_fault_who_relies_on_a_failed_step_goes_on_is_found() -> None:
    settings = Settings(
        num_gpu_blocks_override=5,
        block_size=2,
        max_model_len=8,
        max_num_seqs=2,
        max_concurrent_plans=4,
    )
    operations = [
        Add(max_tokens=8),
        Plan(),
        Plan(),
        Add(max_tokens=3),
        Plan(),
        Plan(),
        Finish(),
        Finish(),
        Finish(),
        Plan(fails=True),
        Finish(),
        Finish(culprit=1),
    ]
    assert_found("who relies on a failed step goes on", Simulation, settings, operations)
