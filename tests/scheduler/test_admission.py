"""Who may start before whom: look-ahead, the watermark, and places that are lost and kept."""

from __future__ import annotations

import random
from typing import Any

import pytest

from engine.kv_cache.prefix_cache import PrefixCache
from engine.outputs import RequestId, SchedulerOutput
from engine.request import Request, RequestStatus
from engine.scheduler.admission import LOOK_AHEAD, MAX_YIELDS
from engine.testing import CoreDriver


def rows(plan: SchedulerOutput | None) -> dict[str, int]:
    """Return request id → number of tokens of a plan."""
    assert plan is not None
    return {row.request_id: row.num_tokens for row in plan.requests}


def make_driver(**settings: Any) -> CoreDriver:
    defaults = {"max_num_seqs": 16, "max_num_batched_tokens": 64, "max_model_len": 40, "block_size": 4}
    return CoreDriver.of(**{**defaults, "num_gpu_blocks_override": 10, "watermark": 0.0, **settings})


def live(driver: CoreDriver, name: str) -> Request:
    return driver.core._requests[name]


def prompt(length: int, first: int = 0) -> list[int]:
    return [first, *range(100, 99 + length)]


# -- look-ahead -------------------------------------------------------------------------------------------------------


def test_who_fits_starts_before_a_huge_prompt_that_does_not() -> None:
    driver = make_driver()
    driver.add("running", prompt(8, 1), max_tokens=20)
    driver.step()
    driver.add("huge", prompt(36, 2), max_tokens=4)
    driver.add("small", prompt(4, 3), max_tokens=2)
    assert rows(driver.step()) == {"running": 1, "small": 4}
    driver.run()
    assert driver.completions["huge"].token_ids == driver.expected("huge", 4)


@pytest.mark.parametrize("max_overtakes", [0, 1, 5])
def test_the_head_gets_in_after_a_bounded_number_of_admissions_past_it(max_overtakes: int) -> None:
    driver = make_driver(max_overtakes=max_overtakes)
    driver.add("first", prompt(4, 1), max_tokens=3)
    driver.step()
    driver.add("huge", prompt(38, 2), max_tokens=2)
    num_past = 0
    for number in range(40):
        driver.add(f"small{number}", prompt(4, 3 + number), max_tokens=3)
        started = rows(driver.step()).keys()
        if "huge" in started:
            break
        num_past += f"small{number}" in started
    else:
        pytest.fail("the huge prompt starved")
    assert num_past == max_overtakes
    assert live(driver, "huge").num_overtaken == max_overtakes


def test_nobody_passes_one_that_was_overtaken_often_enough_though_others_passed_with_it_were_not() -> None:
    driver = make_driver(max_overtakes=2)
    driver.add("running", prompt(8, 1), max_tokens=20)
    driver.step()
    driver.add("huge", prompt(38, 2), max_tokens=2)
    driver.add("small0", prompt(4, 3), max_tokens=4)
    assert rows(driver.step()) == {"running": 1, "small0": 4}
    driver.add("also huge", prompt(38, 4), max_tokens=2)
    for number in (1, 2):
        driver.add(f"small{number}", prompt(4, 4 + number), max_tokens=4)
    assert rows(driver.step()) == {"running": 1, "small0": 1, "small1": 4}  # small2 would be the third past huge
    assert [live(driver, name).num_overtaken for name in ("huge", "also huge")] == [2, 1]
    driver.run()


def test_a_step_looks_at_a_bounded_number_of_requests_past_the_head() -> None:
    driver = make_driver()
    driver.add("running", prompt(8, 1), max_tokens=30)
    driver.step()
    for number in range(LOOK_AHEAD):
        driver.add(f"huge{number}", prompt(36, 2 + number), max_tokens=2)
    driver.add("small", prompt(4, 90), max_tokens=2)
    assert rows(driver.step()) == {"running": 1, "small": 4}
    driver.add("huge", prompt(36, 91), max_tokens=2)
    driver.add("late", prompt(4, 92), max_tokens=2)
    assert "late" not in rows(driver.step())


def test_nobody_passes_a_preempted_request() -> None:
    driver = make_driver()
    driver.add("elder", prompt(15, 1), max_tokens=25)
    driver.add("younger", prompt(20, 2), max_tokens=20)
    while driver.core.stats().num_preemptions == 0:
        driver.step()
    assert live(driver, "younger").status is RequestStatus.PREEMPTED
    driver.add("small", prompt(1, 3), max_tokens=1)
    while live(driver, "younger").status is RequestStatus.PREEMPTED:
        assert "small" not in rows(driver.step()) or live(driver, "younger").status is RequestStatus.RUNNING
    driver.run()
    assert driver.completions["younger"].token_ids == driver.expected("younger", 20)


def test_a_request_that_does_not_fit_is_looked_up_once_and_not_again_at_each_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looked_up = 0
    find = PrefixCache.find

    def counting(self: PrefixCache, block_hash: bytes, group: int = 0) -> int | None:
        nonlocal looked_up
        looked_up += 1
        return find(self, block_hash, group)

    driver = make_driver(max_model_len=400, num_gpu_blocks_override=100, max_num_batched_tokens=400)
    driver.add("running", prompt(200, 1), max_tokens=100)
    driver.step()
    driver.add("huge", prompt(380, 2), max_tokens=4)
    driver.step()
    monkeypatch.setattr(PrefixCache, "find", counting)
    for _ in range(50):
        driver.step()
    assert looked_up <= 50  # at most whether its next block has come into the cache


def test_a_request_that_does_not_fit_starts_as_soon_as_another_computes_its_beginning() -> None:
    driver = make_driver(num_gpu_blocks_override=12, max_num_batched_tokens=17)
    shared = prompt(32, 1)
    driver.add("other", prompt(8, 5), max_tokens=30)
    driver.add("first", shared, max_tokens=8)
    driver.step()
    driver.add("second", shared, max_tokens=4)  # alone it takes eight blocks, two are free
    started = [sorted(rows(driver.step())) for _ in range(4)]
    assert any("second" in names for names in started), started
    driver.run()
    assert driver.completions["second"].token_ids == driver.expected("second", 4)


# -- the watermark ----------------------------------------------------------------------------------------------------


def test_the_watermark_is_left_free_beside_who_runs_and_asked_of_nobody_who_would_run_alone() -> None:
    driver = make_driver(watermark=0.5)
    driver.add("alone", prompt(36, 1), max_tokens=1)
    assert rows(driver.step()) == {"alone": 36}
    driver.add("a", prompt(16, 1), max_tokens=9)
    driver.add("b", prompt(8, 2), max_tokens=9)
    assert rows(driver.step()) == {"a": 4}  # beside its four blocks, two more would leave four of ten
    driver.run()
    assert driver.completions["b"].token_ids == driver.expected("b", 9)


# -- places lost and kept ---------------------------------------------------------------------------------------------


def test_nobody_yields_its_place_more_often_than_allowed_however_tight_the_pool() -> None:
    worst = 0
    for seed in range(8):
        draw = random.Random(seed)
        driver = make_driver(num_gpu_blocks_override=12, max_num_seqs=8, enable_prefix_caching=seed % 2 == 0)
        for number in range(30):
            length = draw.randint(1, 12)
            driver.add(f"r{number}", prompt(length, number), max_tokens=draw.randint(1, 28))
        requests = list(driver.core._requests.values())
        driver.run()
        worst = max(worst, *(request.num_yields for request in requests))
        for name, completion in driver.completions.items():
            assert completion.token_ids == driver.expected(name, len(completion.token_ids))
    assert 1 < worst <= MAX_YIELDS


def test_a_protected_request_runs_before_its_elders_and_is_not_the_victim() -> None:
    driver = make_driver()
    driver.add("elder", prompt(4, 1), max_tokens=36)
    driver.add("younger", prompt(4, 2), max_tokens=30)
    live(driver, "younger").num_yields = MAX_YIELDS
    driver.step()
    assert [request.request_id for request in driver.core._scheduler.running] == ["younger", "elder"]
    younger = live(driver, "younger")
    driver.run()
    assert driver.core.stats().num_preemptions > 0
    assert younger.num_preemptions == 0


def test_protected_requests_run_together_only_if_all_of_them_fit_at_full_length() -> None:
    driver = make_driver()
    for name in "ab":
        driver.add(name, prompt(4, ord(name)), max_tokens=30)
        live(driver, name).num_yields = MAX_YIELDS
    driver.add("c", prompt(4, 3), max_tokens=2)
    assert rows(driver.step()) == {"a": 4, "c": 4}
    driver.run()
    assert driver.core.stats().num_preemptions == 0


# -- promises and places, block by block -------------------------------------------------------------------------------


def test_nobody_is_admitted_on_blocks_that_a_prompt_in_chunks_was_promised() -> None:
    driver = make_driver(max_num_batched_tokens=16, long_prefill_token_threshold=4)
    driver.add("long", prompt(32, 1), max_tokens=2)
    driver.add("other", prompt(8, 2), max_tokens=2)
    driver.add("third", prompt(4, 3), max_tokens=2)
    assert rows(driver.step()) == {"long": 4, "other": 4}  # eight of ten blocks are long's, two other's
    for _ in range(2):  # until other ends
        assert "third" not in rows(driver.step())
    driver.run()
    assert driver.core.stats().num_preemptions == 0


def test_what_a_window_shares_is_not_counted_on_for_its_blocks_are_given_back() -> None:
    driver = make_driver(windows=(4, 4), num_gpu_blocks_override=20, block_size=2)
    driver.add("a", prompt(20, 1), max_tokens=12)
    driver.step()
    cache, newcomer = driver.core._kv_cache, Request(driver.requests["a"], 9, 40)
    match = cache.match(newcomer)
    assert any(cache.pool.num_references(block) for block in match.blocks[0] if block)
    assert not cache.has_room(newcomer, match, num_reserved=20)
    assert newcomer.shortage is not None
    assert newcomer.shortage.num_blocks == cache.max_blocks(20)


def test_what_a_window_shares_is_promised_once_more_so_that_the_reserve_is_whole_from_the_start() -> None:
    settings = {"max_num_seqs": 4, "max_num_batched_tokens": 5, "max_model_len": 64, "num_gpu_blocks_override": 60}
    driver = make_driver(windows=(None, 9), **settings)
    driver.add("first", range(65, 90), max_tokens=30)
    while not driver.completions[RequestId("first")].token_ids:
        driver.step()
    cache = driver.core._kv_cache
    num_available = cache.num_available_blocks
    driver.add("second", [*range(65, 89), *range(200, 216)], max_tokens=2)
    match = cache.match(live(driver, "second"))
    assert not cache.has_room(live(driver, "second"), match, num_reserved=60)
    shortage = live(driver, "second").shortage
    assert shortage is not None
    for _ in range(3):  # in chunks, while the window passes what it shares
        driver.step()
        assert cache.num_available_blocks == num_available - shortage.num_blocks


def test_who_waits_for_blocks_in_flight_takes_no_further_places_meanwhile() -> None:
    driver = make_driver(scheduling_policy="priority", max_concurrent_plans=3, max_num_seqs=8)
    for number in range(5):
        driver.add(f"low{number}", prompt(7, number), priority=5, max_tokens=30)
    driver.plan()
    driver.add("urgent", prompt(12, 9), priority=1, max_tokens=4)
    driver.plan()  # it is tried for the first time
    driver.plan()
    num_preemptions = driver.core.stats().num_preemptions
    assert num_preemptions > 0
    driver.finish_step()
    assert driver.core._kv_cache.has_held_blocks
    driver.plan()
    assert driver.core.stats().num_preemptions == num_preemptions
    driver.run()
    assert driver.completions["urgent"].token_ids == driver.expected("urgent", 4)


def test_nobody_passes_a_request_for_which_another_had_to_make_way() -> None:
    driver = make_driver(scheduling_policy="priority", max_num_seqs=2, max_num_batched_tokens=2)
    driver.add("low", prompt(2, 1), priority=5, max_tokens=20)
    driver.add("lower", prompt(2, 2), priority=6, max_tokens=20)
    driver.step()
    driver.step()
    driver.add("urgent", prompt(30, 3), priority=1, max_tokens=2)
    driver.step()
    urgent = live(driver, "urgent")
    assert urgent.num_overtaken == driver.core.config.max_overtakes


def test_a_request_looks_again_once_the_blocks_it_would_hit_are_in_use() -> None:
    driver = make_driver(num_gpu_blocks_override=12, max_num_batched_tokens=40)
    shared = prompt(16, 1)
    driver.add("first", shared, max_tokens=1)
    driver.run()
    driver.add("other", prompt(20, 2), max_tokens=4)
    driver.step()
    driver.add("long", [*shared, *range(200, 220)], max_tokens=4)  # nine blocks, of which four are free hits
    assert rows(driver.step()) == {"other": 1}
    driver.add("short", [*shared, 7], max_tokens=20)
    assert "short" in rows(driver.step())  # now four of the nine are in use: five are enough, and come with other's end
    while driver.completions["other"].finish_reason is None:
        driver.step()
    assert "long" in rows(driver.step())
    driver.run()
    assert driver.completions["long"].token_ids == driver.expected("long", 4)


def test_requests_that_share_their_blocks_can_make_way_together() -> None:
    driver = make_driver(scheduling_policy="priority", max_num_seqs=8)
    for name in "abc":
        driver.add(name, prompt(24, 1), priority=5, max_tokens=8)
    driver.step()
    driver.add("urgent", prompt(32, 2), priority=1, max_tokens=2)
    started = [sorted(rows(driver.step())) for _ in range(3)]
    assert any("urgent" in names for names in started), started
    driver.run()
    for name in "abc":
        assert driver.completions[name].token_ids == driver.expected(name, 8)


def test_a_protected_request_that_waits_for_others_does_not_idle_the_engine() -> None:
    driver = make_driver(max_overtakes=3)
    for name in "ab":
        driver.add(name, prompt(4, ord(name)), max_tokens=30)
        live(driver, name).num_yields = MAX_YIELDS
    driver.step()
    waiting = live(driver, "b")
    waiting.move_to(RequestStatus.RUNNING)  # as if it had run and lost its place
    waiting.move_to(RequestStatus.PREEMPTED)
    driver.add("c", prompt(4, 3), max_tokens=2)
    assert "c" in rows(driver.step())
    driver.run()


def test_deadlines_of_requests_that_have_ended_are_not_kept() -> None:
    driver = make_driver(queue_timeout=1e5)
    driver.add("front", prompt(4, 1), max_tokens=30)
    for number in range(300):
        driver.add(f"r{number}", prompt(4, 2), max_tokens=2)
        driver.abort(f"r{number}")
    assert len(driver.core._queue_deadlines) <= 2
