"""Orders over requests.

A policy is a function from a request to a key: the least key is admitted first and loses its blocks last. Keys end in
the arrival number, so that they are unique and no clock decides.

A new order is a function here and an entry in `POLICIES`; the setting's choices are in `engine/config.py`.
"""

from __future__ import annotations

from collections.abc import Callable

from engine.request import Request

OrderKey = tuple[int, ...]
Policy = Callable[[Request], OrderKey]


def fcfs(request: Request) -> OrderKey:
    """First come, first served."""
    return (request.arrival_number,)


POLICIES: dict[str, Policy] = {"fcfs": fcfs}
