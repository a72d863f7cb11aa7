"""A few rounds of `python -m fuzz lifecycle`, which people run for minutes."""

from __future__ import annotations

import random

import pytest

from fuzz.lifecycle import Case, play

pytestmark = pytest.mark.slow

CASES = [
    Case("server", "decode", "engine", "KILL", num_engines=1, num_streams=4, after_s=0.2, between_s=0.0),
    Case("server", "stop", "all", "TERM TERM", num_engines=2, num_streams=4, after_s=0.2, between_s=0.05),
    Case("server", "prefill", "engine", "STOP CONT", num_engines=1, num_streams=4, after_s=0.5, between_s=0.2),
    Case("owner", "decode", "engine", "KILL", num_engines=2, num_streams=4, after_s=0.9, between_s=0.0),
    Case("owner", "prefill", "front", "KILL", num_engines=1, num_streams=4, after_s=0.2, between_s=0.0),
    Case("owner", "stop", "engine", "TERM", num_engines=1, num_streams=4, after_s=0.2, between_s=0.0),
    Case("owner", "stop", "front", "INT", num_engines=1, num_streams=4, after_s=0.2, between_s=0.0),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.front}-{case.phase}-{case.target}-{case.blow}")
async def test_a_round_tells_every_waiter_and_leaves_nothing(case: Case) -> None:
    await play(case, "null")


def test_cases_are_drawn_by_the_seed_alone() -> None:
    assert Case.drawn(random.Random(3)) == Case.drawn(random.Random(3)) != Case.drawn(random.Random(4))
