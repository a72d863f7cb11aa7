"""With a complete text goes on: AssertionError: r0 ends with its last token, and not later: EngineCoreOutput(reques."""

from __future__ import annotations

from fuzz.faults import assert_found
from fuzz.scheduler import Add, Compiled, Settings, Simulation


def test_the_fault_a_complete_text_goes_on_is_found() -> None:
    settings = Settings(block_size=2, max_model_len=4)
    operations = [
        Add(max_tokens=3, kind="grammar"),
        Compiled(length=3, ends=True),
    ]
    assert_found("a complete text goes on", Simulation, settings, operations)
