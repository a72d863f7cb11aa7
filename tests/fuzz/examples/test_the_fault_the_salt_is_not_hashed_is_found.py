"""With the salt is not hashed: AssertionError: Request(r3 WAITING computed=1/2+0) reads others' K/V at 0."""

from __future__ import annotations

from fuzz.faults import assert_found
from fuzz.kv_cache import Admit, Settings, Simulation


def test_the_fault_the_salt_is_not_hashed_is_found() -> None:
    settings = Settings()
    operations = [
        Admit(salt=1),
        Admit(length=2),
    ]
    assert_found("the salt is not hashed", Simulation, settings, operations)
