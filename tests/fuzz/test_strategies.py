from __future__ import annotations

import pytest
from hypothesis import HealthCheck, Phase, find, settings
from hypothesis import strategies as st

from fuzz import kv_cache, scheduler, strategies
from fuzz.driver import error_of
from fuzz.faults import planted
from fuzz.history import History, Target

QUICK = settings(
    max_examples=1000,
    phases=[Phase.generate],
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)


def histories(target: Target) -> st.SearchStrategy[History]:
    return st.builds(History, strategies.drawn(target.settings), strategies.histories(target))


@pytest.mark.parametrize(
    ("target", "fault"),
    [
        (scheduler.TARGET, "blocks are published before they are full"),
        (scheduler.TARGET, "the last token is hit too"),
        (kv_cache.TARGET, "the salt is not hashed"),
    ],
    ids=["published", "last token", "salt"],
)
@pytest.mark.slow
def test_hypothesis_finds_planted_faults(target: Target, fault: str) -> None:
    with planted(fault):
        found = find(histories(target), lambda history: error_of(target, history) is not None, settings=QUICK)
    assert error_of(target, found) is None
