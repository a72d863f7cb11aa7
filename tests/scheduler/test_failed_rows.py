"""A row that fails alone has computed wrong K/V: nothing that rests on it reaches a client or a later request."""

from __future__ import annotations

import pytest

from engine.outputs import FinishReason, RequestId
from engine.testing import SIMULATED_FAILURE, CoreDriver
from fuzz.history import Operation, replay
from fuzz.scheduler import Abort, Add, Finish, Plan, Settings, Simulation

PREFIX = list(range(65, 73))
"""Two blocks, which the guilty request fills and everybody else hits."""
SHARER = [*PREFIX, *range(73, 85)]


def make_driver(depth: int = 1, max_num_batched_tokens: int = 64) -> CoreDriver:
    return CoreDriver.of(
        max_num_seqs=8,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=64,
        block_size=4,
        num_gpu_blocks_override=64,
        max_concurrent_plans=depth,
    )


def preempt(driver: CoreDriver, name: str) -> None:
    (request,) = (request for request in driver.live_requests if request.request_id == name)
    driver.core._scheduler.preempt(request, driver.now)


def assert_all_get_what_they_get_alone(driver: CoreDriver) -> None:
    driver.run()
    for name, completion in driver.completions.items():
        if completion.finish_reason is FinishReason.LENGTH:
            assert completion.token_ids == driver.expected(name, 4), name
    assert driver.core.stats().num_used_blocks == 0


def assert_next_gets_what_it_gets_alone(driver: CoreDriver, prompt: list[int], num_cached_tokens: int) -> None:
    driver.add("next", prompt, max_tokens=4)
    assert_all_get_what_they_get_alone(driver)
    assert driver.completions[RequestId("next")].outputs[0].num_cached_tokens == num_cached_tokens


def test_a_sharer_in_the_same_plan_gets_no_token_of_it_and_computes_anew() -> None:
    driver = make_driver()
    driver.add("guilty", PREFIX, max_tokens=4)
    driver.add("sharer", SHARER[:13], max_tokens=4)
    driver.plan(corrupts=0)
    driver.finish_step()
    assert driver.completions[RequestId("sharer")].token_ids == []
    plan = driver.plan()
    assert plan is not None
    assert [(row.request_id, row.start) for row in plan.requests] == [("sharer", 0)]
    driver.finish_step()
    assert_all_get_what_they_get_alone(driver)


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_the_blocks_a_sharer_filled_cannot_be_hit(depth: int) -> None:
    driver = make_driver(depth, max_num_batched_tokens=16)
    driver.add("guilty", PREFIX, max_tokens=4)
    driver.add("sharer", SHARER, max_tokens=4)
    driver.plan(corrupts=0)
    while driver.plan() is not None:
        pass
    driver.finish_step()
    assert_all_get_what_they_get_alone(driver)
    assert_next_gets_what_it_gets_alone(driver, [*SHARER, 90], num_cached_tokens=20)  # as the sharer computed it anew


def test_a_late_token_of_a_preempted_sharer_counts_for_nothing() -> None:
    driver = make_driver(3, max_num_batched_tokens=16)
    driver.add("guilty", PREFIX, max_tokens=4)
    driver.add("sharer", SHARER, max_tokens=4)
    driver.plan(corrupts=0)
    driver.plan()
    preempt(driver, "sharer")
    driver.finish_step()
    driver.finish_step()
    assert driver.completions[RequestId("sharer")].token_ids == []
    assert_all_get_what_they_get_alone(driver)
    assert_next_gets_what_it_gets_alone(driver, [*SHARER, 90], num_cached_tokens=20)


def test_the_blocks_of_an_aborted_sharer_cannot_be_hit() -> None:
    driver = make_driver(3, max_num_batched_tokens=16)
    driver.add("guilty", PREFIX, max_tokens=4)
    driver.add("sharer", SHARER, max_tokens=4)
    driver.plan(corrupts=0)
    driver.plan()
    driver.abort("sharer")
    driver.run()
    driver.add("prefix", [*PREFIX, 90], max_tokens=4)
    driver.run()
    assert_next_gets_what_it_gets_alone(driver, [*SHARER, 90], num_cached_tokens=8)


def test_of_an_id_used_again_at_once_the_first_owners_blocks_are_forgotten() -> None:
    driver = make_driver(2)
    driver.add("name", [*PREFIX, 73], max_tokens=4)
    driver.plan(corrupts=0)
    driver.abort("name")
    driver.add("name", range(90, 96), max_tokens=4)
    driver.plan()
    driver.finish_step()
    assert driver.num_preemptions == 0  # the second owner has nothing to do with it
    assert_next_gets_what_it_gets_alone(driver, [*PREFIX, 90], num_cached_tokens=0)


def test_sharers_of_sharers_compute_anew_and_others_do_not() -> None:
    driver = make_driver()
    driver.add("guilty", PREFIX, max_tokens=4)
    driver.add("sharer", SHARER, max_tokens=4)
    driver.add("sharer's sharer", [*SHARER, 90], max_tokens=4)
    driver.add("other", range(97, 110), max_tokens=4)
    driver.plan(corrupts=0)
    driver.finish_step()
    given = {name: len(completion.token_ids) for name, completion in driver.completions.items()}
    assert given == {"guilty": 0, "sharer": 0, "sharer's sharer": 0, "other": 1}
    assert driver.completions[RequestId("guilty")].outputs[-1].error == SIMULATED_FAILURE
    assert_all_get_what_they_get_alone(driver)
    assert driver.num_preemptions == 2


def test_who_failed_for_what_another_row_computed_wrongly_computes_anew() -> None:
    driver = make_driver()
    driver.add("guilty", PREFIX, max_tokens=4)
    driver.add("sharer", SHARER, max_tokens=4)
    driver.plan(corrupts=0)
    driver.finish_step(broken=["sharer"])  # as NaN spreads
    assert_all_get_what_they_get_alone(driver)
    reasons = {name: completion.finish_reason for name, completion in driver.completions.items()}
    assert reasons == {"guilty": FinishReason.ERROR, "sharer": FinishReason.LENGTH}


KEPT: list[tuple[Settings, list[Operation]]] = [
    (  # the sharer in the very same plan
        Settings(max_model_len=3, max_num_seqs=2),
        [Add(prefix=1, salt=1), Add(prefix=1, length=2, salt=1), Plan(corrupts=0), Finish()],
    ),
    (  # the aborted sharer's blocks, whose own beginning is computed anew by another one
        Settings(
            num_gpu_blocks_override=14,
            max_model_len=10,
            max_num_seqs=3,
            max_num_batched_tokens=4,
            max_concurrent_plans=3,
        ),
        [
            *(Add(prefix=1, length=2), Add(prefix=1, length=6), Plan(corrupts=0), Plan(), Abort(index=1)),
            *(Finish(), Finish(), Add(prefix=1, length=3), Plan(), Finish(), Add(prefix=1, length=7)),
        ],
    ),
]


@pytest.mark.parametrize(("settings", "operations"), KEPT)
def test_histories_worth_keeping_stay_clean(settings: Settings, operations: list[Operation]) -> None:
    replay(Simulation(settings), operations)
