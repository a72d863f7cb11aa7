"""What a run of histories has met: each kind of event in each status of a request, and each move between statuses."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterable, Iterator

from engine.request import TRANSITIONS, Request, RequestStatus

Move = tuple[RequestStatus, RequestStatus]

LEGAL_MOVES: frozenset[Move] = frozenset(
    (before, after) for before, all_after in TRANSITIONS.items() for after in all_after
)


class Coverage:
    """Counts what happened; several simulations may share one."""

    def __init__(self) -> None:
        """Start with nothing met."""
        self._events: Counter[tuple[str, frozenset[object]]] = Counter()
        self.moves: Counter[Move] = Counter()

    def saw(self, event: str, statuses: Iterable[object]) -> None:
        """`event` has happened while requests were in `statuses`."""
        self._events[event, frozenset(statuses)] += 1

    @property
    def events(self) -> Counter[tuple[str, str]]:
        """How often each event has happened while requests were in each status, by their names."""
        counts: Counter[tuple[str, str]] = Counter()
        for (event, statuses), number in self._events.items():
            for status in statuses:
                counts[event, str(status)] += number
        return counts

    @contextlib.contextmanager
    def recording_moves(self) -> Iterator[None]:
        """Count every move of every request while the block lasts."""
        move_to = Request.move_to

        def recorded(request: Request, status: RequestStatus) -> None:
            self.moves[request.status, status] += 1
            move_to(request, status)

        Request.move_to = recorded
        try:
            yield
        finally:
            Request.move_to = move_to

    @property
    def missing_moves(self) -> set[Move]:
        """Legal moves that nobody has taken."""
        return set(LEGAL_MOVES - self.moves.keys())

    def summary(self) -> str:
        """Return the coverage in a few words, for a line of progress."""
        moves = f"{len(LEGAL_MOVES & self.moves.keys())}/{len(LEGAL_MOVES)} moves, " if self.moves else ""
        return f"{moves}{len(self.events)} pairs of status and event"

    def report(self) -> str:
        """Return two tables: events by status, and legal moves with how often each was taken."""
        counts = self.events
        events, statuses = sorted({event for event, _ in counts}), sorted({status for _, status in counts})
        short = {status: status.removeprefix("FINISHED_").removeprefix("WAITING_FOR_")[:12] for status in statuses}
        lines = [f"{'event':<16}" + "".join(f"{short[status]:>13}" for status in statuses)]
        lines += [f"{event:<16}" + "".join(f"{counts[event, one]:>13}" for one in statuses) for event in events]
        if not self.moves:
            return "\n".join(lines)  # a target without a scheduler
        lines += ["", "legal moves"]
        for before, all_after in TRANSITIONS.items():
            taken = [f"{after} {self.moves[before, after] or 'NEVER'}" for after in sorted(all_after)]
            lines.append(f"{before} → {', '.join(taken)}")
        lines.append(f"not taken: {len(self.missing_moves)} of {len(LEGAL_MOVES)}")
        return "\n".join(lines)
