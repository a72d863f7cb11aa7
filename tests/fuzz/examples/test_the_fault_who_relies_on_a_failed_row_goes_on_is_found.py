"""With who relies on a failed row goes on: AssertionError: r3 got [52], alone it gets [114]."""

from __future__ import annotations

from fuzz.faults import assert_found
from fuzz.scheduler import Add, Finish, Plan, Resize, Settings, Simulation


def test_the_fault_who_relies_on_a_failed_row_goes_on_is_found() -> None:
    settings = Settings(max_model_len=4, max_num_seqs=2, max_num_batched_tokens=4)
    operations = [
        Resize(num_blocks=8),
        Add(max_tokens=3),
        Add(max_tokens=3),
        Plan(),
        Finish(num_more=1),
        Add(prefix=2),
        Add(prefix=2, length=10),
        Plan(),
        Finish(),
        Plan(corrupts=0),
    ]
    assert_found("who relies on a failed row goes on", Simulation, settings, operations)
