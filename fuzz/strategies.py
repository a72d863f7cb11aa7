"""What Hypothesis draws: the same values as the seeded driver, from the fields of settings and operations.

Everything shrinks towards the plainest value, and a history towards fewer operations.
"""

from __future__ import annotations

from typing import TypeVar

from hypothesis import strategies as st

from fuzz.history import Drawn, Operation, Target

AnyDrawn = TypeVar("AnyDrawn", bound=Drawn)


def drawn(kind: type[AnyDrawn]) -> st.SearchStrategy[AnyDrawn]:
    """Draw settings or one kind of operation."""
    return st.builds(kind, **{name: st.sampled_from(values) for name, values in kind.choices()})


def operations(target: Target) -> st.SearchStrategy[Operation]:
    """Draw any operation of `target`; those of great weight more often than others, yet not by as much."""
    return st.one_of(*(drawn(kind) for kind in target.operations for _ in range(1 + kind.weight // 10)))


def histories(target: Target, max_size: int = 60) -> st.SearchStrategy[list[Operation]]:
    """Draw a whole history of `target`; half of them are long, which lists that may be short hardly ever are."""
    any_size = st.lists(operations(target), max_size=max_size)
    return any_size | st.lists(operations(target), min_size=max_size // 2, max_size=max_size)
