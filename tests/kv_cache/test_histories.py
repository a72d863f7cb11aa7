from __future__ import annotations

import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fuzz.kv_cache import Admit, Clear, Compute, Operation, Release, Settle, Simulation, Undo, draw_history

OPERATIONS = st.one_of(
    st.builds(Compute, index=st.integers(0, 4), num_tokens=st.integers(1, 5)),
    st.just(Settle()),
    st.builds(
        Admit,
        prefix=st.integers(0, 2),
        length=st.integers(1, 14),
        chunk=st.integers(1, 14),
        salt=st.integers(0, 1),
    ),
    st.builds(Release, index=st.integers(0, 4)),
    st.just(Undo()),
    st.just(Clear()),
)


def replay(simulation: Simulation, history: list[Operation]) -> None:
    for operation in history:
        simulation.apply(operation)
    simulation.finish()


@pytest.mark.slow
@settings(max_examples=400, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(
    num_blocks=st.integers(3, 12),
    block_size=st.integers(1, 4),
    caching=st.booleans(),
    history=st.lists(OPERATIONS, max_size=60),
)
def test_a_request_reads_only_its_own_tokens_in_any_history(
    num_blocks: int, block_size: int, caching: bool, history: list[Operation]
) -> None:
    replay(Simulation(num_blocks, block_size, caching), history)


@pytest.mark.slow
def test_seeded_histories_of_a_tiny_pool_are_clean() -> None:
    for number in range(150):
        drawn = random.Random(number)
        replay(Simulation(drawn.randint(3, 16), drawn.randint(1, 4)), list(draw_history(drawn, 80)))
