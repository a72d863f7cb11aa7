from __future__ import annotations

import random

from fuzz.history import History
from fuzz.scheduler import TARGET, Abort, Add, Plan, Settings
from fuzz.shrink import shrink


def drawn() -> History:
    return next(
        history
        for number in range(100)
        if len((history := TARGET.draw(random.Random(number), {})).operations) == 480 and _is_bad(history)
    )


def _is_bad(history: History) -> bool:
    adds = [operation for operation in history.operations if isinstance(operation, Add) and operation.length >= 17]
    return len(adds) >= 2 and Abort in map(type, history.operations) and history.settings.block_size >= 3


def test_what_is_not_needed_is_dropped_and_numbers_are_lowered_as_far_as_it_still_fails() -> None:
    least = shrink(drawn(), _is_bad)
    assert least.settings == Settings(block_size=3)
    assert sorted(map(repr, least.operations)) == ["Abort()", "Add(length=17)", "Add(length=17)"]


def test_the_same_history_shrinks_to_the_same_one() -> None:
    assert shrink(drawn(), _is_bad) == shrink(drawn(), _is_bad)


def test_no_more_runs_are_made_than_allowed_and_the_result_fails_still() -> None:
    runs = []

    def fails(history: History) -> bool:
        runs.append(history)
        return _is_bad(history)

    least = shrink(drawn(), fails, max_runs=20)
    assert len(runs) == 20
    assert _is_bad(least)
    assert len(least.operations) < 480


def test_a_value_that_is_never_drawn_is_lowered_too() -> None:
    least = shrink(History(Settings(max_num_seqs=64), [Plan()]), lambda history: True)
    assert least == History(Settings(), [])
