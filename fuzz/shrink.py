"""A small delta debugger: drop operations, then lower numbers, as long as the history still fails in the same way.

Deterministic, and bounded by a number of runs. Dropping is ddmin without its complements: chunks of half the history,
then of a quarter, down to one operation (Zeller and Hildebrandt, Simplifying and isolating failure-inducing input).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from fuzz.history import History

Fails = Callable[[History], bool]


def shrink(history: History, fails: Fails, max_runs: int = 3000) -> History:
    """Return a history that fails like `history`, from which nothing can be dropped or lowered any more.

    Unless `max_runs` runs of `fails` were used up first: then what was reached by then.
    """
    return _Shrinker(history, fails, max_runs).run()


class _Shrinker:
    """The smallest failing history so far."""

    def __init__(self, history: History, fails: Fails, max_runs: int) -> None:
        self._best = history
        self._fails = fails
        self._runs_left = max_runs

    def run(self) -> History:
        before = None
        while before != self._best and self._runs_left:
            before = self._best
            self._drop_operations()
            self._lower_settings()
            for index in range(len(self._best.operations)):
                self._lower_operation(index)
        return self._best

    def _takes(self, candidate: History) -> bool:
        """Whether this smaller history fails too; if so it is the best from now on."""
        if not self._runs_left:
            return False
        self._runs_left -= 1
        if not self._fails(candidate):
            return False
        self._best = candidate
        return True

    def _drop_operations(self) -> None:
        size = max(1, len(self._best.operations) // 2)
        while size:
            for end in range(len(self._best.operations), 0, -size):  # from the end: what follows the failure goes first
                operations = self._best.operations
                kept = [*operations[: max(0, end - size)], *operations[end:]]
                self._takes(self._best._replace(operations=kept))
            size //= 2

    def _lower_settings(self) -> None:
        for name, values in self._best.settings.choices():
            while any(
                self._takes(self._best._replace(settings=replace(self._best.settings, **{name: value})))
                for value in _plainer(getattr(self._best.settings, name), values)
            ):
                pass

    def _lower_operation(self, index: int) -> None:
        for name, values in self._best.operations[index].choices():
            while any(
                self._takes(self._with_operation(index, name, value))
                for value in _plainer(getattr(self._best.operations[index], name), values)
            ):
                pass

    def _with_operation(self, index: int, name: str, value: object) -> History:
        operations = list(self._best.operations)
        operations[index] = replace(operations[index], **{name: value})
        return self._best._replace(operations=operations)


def _plainer(value: object, values: tuple[object, ...]) -> Iterator[object]:
    """Yield values to try in place of `value`: the plainest, halfway there, and the next plainer one."""
    distinct = list(dict.fromkeys(values))
    place = distinct.index(value) if value in distinct else len(distinct)
    yield from (distinct[index] for index in dict.fromkeys((0, place // 2, place - 1)) if 0 <= index < place)
