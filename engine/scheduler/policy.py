"""Orders over requests.

A policy gives each request a place (urgency, position); the least is admitted first and loses its blocks last. Among
requests of one urgency those that were preempted come before those that never ran. Places end in the arrival number, so
that they are unique and no clock decides. A policy may also let a waiting request take a running one's place; such a
rule must be strict, for who lost its place waits again and must not take it back.

A new order is a class here and an entry in `POLICIES`; the setting's choices are in `engine/config.py`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import takewhile

from engine.request import Request

MAX_DEBTORS = 1024
"""How many clients that have nothing live the fair policy remembers at least."""
Place = tuple[int, int]
"""Urgency and, within it, position; less is sooner."""


class Fcfs:
    """First come, first served."""

    def place(self, request: Request) -> Place:
        """Return the place of `request`, which arrives."""
        return 0, request.arrival_number

    def place_again(self, request: Request, made_way_for: Request | None = None) -> Place:
        """Return the place of `request`, which has run and waits again; it comes after whom it made way for."""
        return request.place

    def place_turn(self, request: Request) -> Place:
        """Return the place of `request`, a session that begins another turn."""
        return request.place

    def victims(self, waiting: Request, running: Sequence[Request]) -> Iterable[Request]:
        """Return those of `running`, given in order, whose place `waiting` may take, the first victim first."""
        return ()

    def started(self, request: Request) -> None:
        """`request` runs from now on."""

    def stopped(self, request: Request) -> None:
        """`request` runs no more."""

    def ended(self, request: Request) -> None:
        """`request` will not come back."""


class Priority(Fcfs):
    """The least `priority` first; one that is strictly more urgent may take a running one's place."""

    def place(self, request: Request) -> Place:
        """See `Fcfs`."""
        return request.priority, request.arrival_number

    def victims(self, waiting: Request, running: Sequence[Request]) -> Iterable[Request]:
        """See `Fcfs`."""
        return takewhile(lambda victim: waiting.priority < victim.priority, reversed(running))


class Fair(Fcfs):
    """Clients in turn, by the tokens they ask for; a client's own requests by arrival.

    Start-time fair queueing (Goyal, Vin and Cheng, 1996): a request starts at a virtual time, after the request before
    it of the same client, which takes as long as its prompt and its most output are tokens; who ends before it ran is
    not charged. The virtual time is that of the last request admitted. A client that owes nothing comes in just before
    it, so that who asks once never waits for all that another one has queued. What a client owes outlives its last
    request, or asking one by one would come before everybody who queues. A client of which nothing runs may take the
    place of a request of a client of which several run.
    """

    def __init__(self) -> None:
        """Start at virtual time 0, knowing no client."""
        self._virtual_time = 0
        self._next_start: dict[str | None, int] = {}
        self._num_live: Counter[str | None] = Counter()
        self._num_running: Counter[str | None] = Counter()

    def place(self, request: Request) -> Place:
        """See `Fcfs`."""
        self._num_live[request.client_key] += 1
        return self.place_turn(request)

    def place_turn(self, request: Request) -> Place:
        """See `Fcfs`; each turn is charged."""
        just_before = self._virtual_time - 1
        start = max(just_before, self._next_start.pop(request.client_key, just_before))
        self._next_start[request.client_key] = start + _cost(request)
        return start, request.arrival_number

    def place_again(self, request: Request, made_way_for: Request | None = None) -> Place:
        """See `Fcfs`; it is not charged again, yet a client that has been idle comes before it."""
        if made_way_for is None:
            return self._virtual_time, request.arrival_number
        return max(self._virtual_time, made_way_for.place[0]) + 1, request.arrival_number

    def victims(self, waiting: Request, running: Sequence[Request]) -> Iterable[Request]:
        """See `Fcfs`."""
        if self._num_running[waiting.client_key]:
            return
        num_left = self._num_running.copy()
        for victim in reversed(running):
            if num_left[victim.client_key] > 1:
                num_left[victim.client_key] -= 1
                yield victim

    def started(self, request: Request) -> None:
        """See `Fcfs`."""
        self._virtual_time = max(self._virtual_time, request.place[0])
        self._num_running[request.client_key] += 1

    def stopped(self, request: Request) -> None:
        """See `Fcfs`."""
        _count_down(self._num_running, request.client_key)

    def ended(self, request: Request) -> None:
        """See `Fcfs`."""
        if request.num_cached_tokens is None:
            self._next_start[request.client_key] -= _cost(request)
        _count_down(self._num_live, request.client_key)
        if len(self._next_start) > 2 * len(self._num_live) + MAX_DEBTORS:
            self._forget_debtors()

    def _forget_debtors(self) -> None:
        """Keep of those who have nothing live only who owes something, and of them the latest."""
        gone = [client for client in self._next_start if client not in self._num_live]
        paid = [client for client in gone if self._next_start[client] < self._virtual_time]
        for client in paid or gone[: -MAX_DEBTORS // 2]:
            del self._next_start[client]


def _cost(request: Request) -> int:
    """Return the tokens that `request` asks for: what its prompt adds to what is known, and its most output."""
    return request.max_num_tokens - request.num_tokens_before


def _count_down(counter: Counter[str | None], client: str | None) -> None:
    counter[client] -= 1
    if not counter[client]:
        del counter[client]


Policy = Fcfs
POLICIES: dict[str, type[Policy]] = {"fcfs": Fcfs, "priority": Priority, "fair": Fair}
