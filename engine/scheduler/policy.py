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
from heapq import heapify, heappop, heappush
from itertools import takewhile

from engine.request import PREEMPTED, Request, RequestStatus

MAX_DEBTORS = 1024
"""How many clients that have nothing live the fair policy remembers at least."""
Place = tuple[int, int]
"""Urgency and, within it, position; less is sooner."""
_Owing = tuple[int, int, Request]
"""The start and the arrival number of a request that waits for what its client has asked for before."""


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

    After start-time fair queueing (Goyal, Vin and Cheng, 1996): a request starts at a virtual time, after the request
    before it of the same client, which takes as long as its prompt and its most output are tokens; who ends before it
    ran is charged no more than has gone by. A client that owes nothing starts now, so that who asks once never waits
    for all that another one has queued. What a client owes outlives its last request, or asking one by one would come
    before everybody who queues. A client of which nothing runs may take the place of a request of a client of which
    several run.

    An admission moves the virtual time to the start of who is admitted and on by what it asks for, shared among the
    live clients and one that may come; yet not past who waits and owes, or who comes next would wait for more than one
    request of each client. So nobody starves, whatever clients come that were never here before:

    - Who owes nothing, and who is preempted for want of blocks, which keeps its start, is never passed by who comes
      later.
    - Who owes, starting at S while the virtual time is V, is passed by nobody who comes after (S - V) * (1 + W)
      admissions, W the most that wait: each moves the time by at least 1, but where it rests at the first who owes.
      Then who comes later is behind that one, and at most W are before it. Where n clients ask for like amounts it is
      passed until about (n + 1) * (S - V) tokens have been asked for.
    """

    def __init__(self) -> None:
        """Start at virtual time 0, knowing no client."""
        self._virtual_time = 0
        self._next_start: dict[str | None, int] = {}
        self._num_live: Counter[str | None] = Counter()
        self._num_running: Counter[str | None] = Counter()
        self._owing: list[_Owing] = []
        self._max_owing = MAX_DEBTORS

    def place(self, request: Request) -> Place:
        """See `Fcfs`."""
        self._num_live[request.client_key] += 1
        return self.place_turn(request)

    def place_turn(self, request: Request) -> Place:
        """See `Fcfs`; each turn is charged."""
        start = max(self._virtual_time, self._next_start.pop(request.client_key, self._virtual_time))
        self._next_start[request.client_key] = start + _cost(request)
        return self._placed(request, start)

    def place_again(self, request: Request, made_way_for: Request | None = None) -> Place:
        """See `Fcfs`; it is not charged again."""
        if made_way_for is None:
            return request.place
        return self._placed(request, max(self._virtual_time, made_way_for.place[0]) + 1)

    def _placed(self, request: Request, start: int) -> Place:
        if len(self._owing) > self._max_owing:
            self._owing = [entry for entry in self._owing if _waits_at(entry)]
            heapify(self._owing)
            self._max_owing = 2 * len(self._owing) + MAX_DEBTORS
        if start > self._virtual_time:
            heappush(self._owing, (start, request.arrival_number, request))
        return start, request.arrival_number

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
        now = max(self._virtual_time, request.place[0])
        later = now + max(1, _cost(request) // (len(self._num_live) + 1))
        while self._owing and not _waits_at(self._owing[0]):
            heappop(self._owing)
        self._virtual_time = max(now, min(later, self._owing[0][0])) if self._owing else later
        self._num_running[request.client_key] += 1

    def stopped(self, request: Request) -> None:
        """See `Fcfs`."""
        _count_down(self._num_running, request.client_key)

    def ended(self, request: Request) -> None:
        """See `Fcfs`."""
        if request.num_cached_tokens is None:
            cost = _cost(request)
            num_left = request.place[0] + cost - self._virtual_time
            self._next_start[request.client_key] -= max(0, min(cost, num_left))
        _count_down(self._num_live, request.client_key)
        if len(self._next_start) > 2 * len(self._num_live) + MAX_DEBTORS:
            self._forget_debtors()

    def _forget_debtors(self) -> None:
        """Keep of those who have nothing live only who owes something, and of them the latest."""
        gone = [client for client in self._next_start if client not in self._num_live]
        paid = [client for client in gone if self._next_start[client] <= self._virtual_time]
        for client in paid or gone[: -MAX_DEBTORS // 2]:
            del self._next_start[client]


def _cost(request: Request) -> int:
    """Return the tokens that `request` asks for: what its prompt adds to what is known, and its most output."""
    return request.max_num_tokens - request.num_tokens_before


def _waits_at(entry: _Owing) -> bool:
    """Whether this request still waits to be admitted at this place, and not for a grammar or a session's next part."""
    start, arrival_number, request = entry
    return request.place == (start, arrival_number) and request.status in (RequestStatus.WAITING, PREEMPTED)


def _count_down(counter: Counter[str | None], client: str | None) -> None:
    counter[client] -= 1
    if not counter[client]:
        del counter[client]


Policy = Fcfs
POLICIES: dict[str, type[Policy]] = {"fcfs": Fcfs, "priority": Priority, "fair": Fair}
