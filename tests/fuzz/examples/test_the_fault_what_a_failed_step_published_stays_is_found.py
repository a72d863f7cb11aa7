"""With what a failed step published stays: AssertionError: r3 got [75], alone it gets [85]."""

from __future__ import annotations

from fuzz.faults import assert_found
from fuzz.scheduler import Add, Finish, Plan, Settings, Simulation


def test_the_fault_what_a_failed_step_published_stays_is_found() -> None:
    settings = Settings(block_size=2, max_model_len=5, enable_chunked_prefill=False)
    operations = [
        Add(max_tokens=2),
        Add(max_tokens=5),
        Add(length=2),
        Plan(),
        Finish(),
        Plan(),
        Finish(),
        Plan(),
        Finish(),
        Plan(),
        Add(length=3),
        Finish(),
        Plan(),
        Finish(),
        Plan(),
        Finish(),
        Plan(fails=True),
    ]
    assert_found("what a failed step published stays", Simulation, settings, operations)
