"""With a token in flight is dropped: AssertionError: r0 did not get the token that its row sampled."""

from __future__ import annotations

from fuzz.faults import assert_found
from fuzz.scheduler import Add, Plan, Settings, Simulation


def test_the_fault_a_token_in_flight_is_dropped_is_found() -> None:
    settings = Settings(max_model_len=3, max_concurrent_plans=2)
    operations = [
        Add(max_tokens=2),
        Plan(),
    ]
    assert_found("a token in flight is dropped", Simulation, settings, operations)
