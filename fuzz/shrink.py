"""A small delta debugger: drop operations, then lower numbers, as long as the history still fails in the same way.

Deterministic, and bounded by a number of runs. Dropping is ddmin without its complements: chunks of half the history,
then of a quarter, down to one operation (Zeller and Hildebrandt, Simplifying and isolating failure-inducing input).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from fuzz.history import Drawn, History

Fails = Callable[[History], bool]


def shrink(history: History, fails: Fails, max_runs: int = 3000) -> History:
    """Return a history that fails like `history`, from which nothing can be dropped or lowered any more.

    Unless `max_runs` runs of `fails` were used up first: then what was reached by then.
    """
    return _Shrinker(history, fails, max_runs).run()


class _Shrinker:
    """The smallest failing history so far."""

    def __init__(self, history: History, fails: Fails, max_runs: int) -> None:
        self.best = history
        self._fails = fails
        self._runs_left = max_runs

    def run(self) -> History:
        before = None
        while before != self.best and self._runs_left:
            before = self.best
            self._drop_operations()
            self._lower_settings()
            self._lower_operations()
        return self.best

    def _takes(self, settings: Drawn, operations: list) -> bool:
        """Whether this smaller history fails too; if so it is the best from now on."""
        candidate = History(settings, operations)
        if not self._runs_left or not self._fails_after_counting(candidate):
            return False
        self.best = candidate
        return True

    def _fails_after_counting(self, candidate: History) -> bool:
        self._runs_left -= 1
        return self._fails(candidate)

    def _drop_operations(self) -> None:
        size = max(1, len(self.best.operations) // 2)
        while size:
            end = len(self.best.operations)
            while end > 0:  # from the end: what comes after the failure goes at once
                start = max(0, end - size)
                kept = [*self.best.operations[:start], *self.best.operations[end:]]
                self._takes(self.best.settings, kept)
                end = start
            size //= 2

    def _lower_settings(self) -> None:
        self._lower(lambda: self.best.settings, lambda lower: self._takes(lower, list(self.best.operations)))

    def _lower_operations(self) -> None:
        for index in range(len(self.best.operations)):

            def take(lower: Drawn, index: int = index) -> bool:
                operations = list(self.best.operations)
                operations[index] = lower
                return self._takes(self.best.settings, operations)

            self._lower(lambda index=index: self.best.operations[index], take)

    def _lower(self, current: Callable[[], Drawn], take: Callable[[Drawn], bool]) -> None:
        """Lower each field of one piece of the history as far as it goes."""
        for name, values in current().choices():
            while any(
                take(replace(current(), **{name: lower})) for lower in _plainer(getattr(current(), name), values)
            ):
                pass


def _plainer(value: object, values: tuple[object, ...]) -> Iterator[object]:
    """Yield values to try in place of `value`: the plainest, halfway there, and the next plainer one."""
    distinct = list(dict.fromkeys(values))
    place = distinct.index(value) if value in distinct else len(distinct)
    yield from (distinct[index] for index in dict.fromkeys((0, place // 2, place - 1)) if 0 <= index < place)
