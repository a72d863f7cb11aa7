"""Plans that were made and have not ended, oldest first: what is counted ahead, and what still counts of it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from engine.outputs import ScheduledRequest, SchedulerOutput
from engine.request import Request

PlannedRow = tuple[Request, ScheduledRequest, int]
"""A row of a plan with its request, and the request's generation when it was planned. Its result is wanted only while
that is still the request's generation: not once the request has ended or was rewound."""


class PlansInFlight:
    """A queue of plans with their rows; a plan leaves it committed or failed, in the order of entry."""

    def __init__(self) -> None:
        """Start with none made."""
        self.last_step = 0
        self._settled_step = 0
        self._plans: deque[tuple[SchedulerOutput, list[PlannedRow]]] = deque()

    def __len__(self) -> int:
        return len(self._plans)

    @property
    def steps(self) -> set[int]:
        """The steps of all plans in flight."""
        return {plan.step for plan, _ in self._plans}

    def rows(self) -> Iterator[PlannedRow]:
        """Yield every row in flight, in the order in which they are computed."""
        return (row for _, rows in self._plans for row in rows)

    def wanted(self) -> Iterator[PlannedRow]:
        """Yield every row in flight whose result is still wanted when its turn comes, oldest plan first."""
        return (row for _, rows in self._plans for row in rows if row[2] == row[0].generation)

    def push(self, plan: SchedulerOutput, rows: list[PlannedRow]) -> None:
        """Take in the newest plan."""
        self.last_step = plan.step
        self._plans.append((plan, rows))

    def oldest(self, plan: SchedulerOutput) -> list[PlannedRow]:
        """Return the rows of `plan`.

        Raises:
            ValueError: `plan` is not the oldest in flight; the caller must commit or fail in plan order.
        """
        if not self._plans or self._plans[0][0] is not plan:
            expected = f"step {self._plans[0][0].step}" if self._plans else "none"
            raise ValueError(f"step {plan.step} is not the oldest plan in flight, which is {expected}")
        return self._plans[0][1]

    def settle(self) -> int:
        """Let the oldest plan go and return its step."""
        self._settled_step = self._plans.popleft()[0].step
        return self._settled_step

    def has_row_of(self, request: Request) -> bool:
        """Whether a plan in flight has a row of `request`, whether or not it is wanted."""
        return request.last_step > self._settled_step
