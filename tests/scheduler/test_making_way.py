"""Whose place a waiting request takes: only where that is enough for it, counted block by block."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from engine.kv_cache.block_pool import BlockPool
from engine.kv_cache.manager import KVCacheManager
from engine.kv_cache.prefix_cache import PrefixCache
from engine.outputs import SchedulerOutput
from engine.request import Request
from engine.scheduler.policy import Fair, Priority
from engine.testing import CoreDriver


def rows(plan: SchedulerOutput | None) -> dict[str, int]:
    """Return request id → number of tokens of a plan."""
    assert plan is not None
    return {row.request_id: row.num_tokens for row in plan.requests}


def make_driver(policy: str = "priority", **settings: Any) -> CoreDriver:
    defaults = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "max_model_len": 40, "block_size": 4}
    settings = {**defaults, "num_gpu_blocks_override": 10, "watermark": 0.0, **settings}
    return CoreDriver.of(scheduling_policy=policy, **settings)


def prompt(length: int, first: int = 0) -> list[int]:
    return [first, *range(100, 99 + length)]


def run_and_compare(driver: CoreDriver) -> None:
    for name, completion in driver.run().items():
        assert completion.token_ids == driver.expected(name, len(completion.token_ids))


@pytest.mark.parametrize("policy", ["priority", "fair"])
def test_blocks_that_were_promised_to_who_makes_way_are_free_too(policy: str) -> None:
    driver = make_driver(policy, max_num_batched_tokens=12, long_prefill_token_threshold=8)
    driver.add("first", prompt(4, 1), priority=5, client_key="many", max_tokens=12)
    driver.step()
    driver.add("long", prompt(32, 2), priority=5, client_key="many", max_tokens=2)  # holds two blocks, is promised six
    driver.step()
    driver.add("urgent", prompt(24, 3), priority=1, client_key="one", max_tokens=2)  # needs six, none is to be had
    driver.step()
    plan = driver.step()
    assert rows(plan) == {"first": 1, "urgent": 8}
    assert plan is not None
    assert plan.preempted_request_ids == ("long",)
    run_and_compare(driver)


def test_the_watermark_is_not_asked_of_who_will_run_alone_once_all_have_made_way() -> None:
    driver = make_driver(watermark=0.3)
    driver.add("low", prompt(10, 1), priority=5, max_tokens=10)
    driver.step()
    driver.add("urgent", prompt(38, 2), priority=1, max_tokens=2)  # all ten blocks; three are the watermark
    driver.step()
    assert rows(driver.step()) == {"urgent": 38}
    run_and_compare(driver)


def test_where_others_go_on_the_watermark_counts_and_nobody_makes_way_in_vain() -> None:
    driver = make_driver(watermark=0.3)
    driver.add("stays", prompt(5, 1), priority=0, max_tokens=4)
    driver.add("low", prompt(13, 2), priority=5, max_tokens=4)
    driver.step()
    driver.add("urgent", prompt(23, 3), priority=1, max_tokens=2)  # six blocks of the eight that low would leave
    for _ in range(3):
        assert rows(driver.step()) == {"stays": 1, "low": 1}
    assert driver.core.stats().num_preemptions == 0
    run_and_compare(driver)
    assert driver.core.stats().num_preemptions == 0


def test_where_the_watermark_is_lacking_once_some_have_made_way_all_make_way_and_it_is_waived() -> None:
    driver = make_driver(watermark=0.3, enable_prefix_caching=False)
    driver.add("low1", prompt(9, 1), priority=5, max_tokens=20)
    driver.step()
    driver.add("low2", prompt(9, 2), priority=5, max_tokens=20)
    driver.step()
    driver.add("urgent", prompt(21, 3), priority=1, max_tokens=2)  # six of the seven that low2 would leave
    driver.step()
    plan = driver.step()
    assert plan is not None
    assert (rows(plan), plan.preempted_request_ids) == ({"urgent": 21}, ("low2", "low1"))
    run_and_compare(driver)


def test_one_makes_way_only_if_the_watermark_stays_free_beside_those_who_go_on() -> None:
    driver = make_driver("fair", watermark=0.3, enable_prefix_caching=False)
    for number in range(3):
        driver.add(f"many{number}", prompt(5, number), client_key="many", max_tokens=7)
        driver.step()
    driver.add("one", prompt(17, 9), client_key="one", max_tokens=2)  # five of the eight that two would leave
    for _ in range(40):
        num_before = driver.num_preemptions
        plan = driver.step()
        assert plan is not None
        if "one" in rows(plan):
            break
        assert driver.num_preemptions == num_before  # nobody makes way while it cannot start
    run_and_compare(driver)


def test_nobody_makes_way_in_vain_for_who_would_have_shared_its_blocks() -> None:
    driver = make_driver()
    driver.add("stays", prompt(6, 1), priority=0, max_tokens=12)
    driver.add("low", prompt(21), priority=5, max_tokens=10)
    driver.step()
    driver.add("urgent", prompt(36), priority=1, max_tokens=4)  # nine blocks, five of them now those of low
    for _ in range(3):
        assert rows(driver.step()) == {"stays": 1, "low": 1}
    assert driver.core.stats().num_preemptions == 0
    run_and_compare(driver)


@pytest.fixture
def matched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Who was matched, each time."""
    names: list[str] = []
    match = KVCacheManager.match

    def recording(self: KVCacheManager, request: Request) -> Any:
        names.append(request.request_id)
        return match(self, request)

    monkeypatch.setattr(KVCacheManager, "match", recording)
    return names


def test_who_needs_more_than_all_could_give_is_matched_once_and_takes_nobodys_place(matched: list[str]) -> None:
    driver = make_driver()
    driver.add("stays", prompt(20, 1), priority=0, max_tokens=5)
    driver.add("low", prompt(6, 2), priority=5, max_tokens=5)
    driver.step()
    driver.add("urgent", prompt(36, 3), priority=1, max_tokens=2)  # nine blocks of the five that low would leave
    for _ in range(4):
        assert rows(driver.step()) == {"stays": 1, "low": 1}
    assert matched == ["stays", "low", "urgent"]
    run_and_compare(driver)


def test_where_victims_share_a_prefix_with_who_stays_they_are_weighed_once_until_somebody_leaves(
    matched: list[str],
) -> None:
    driver = make_driver(num_gpu_blocks_override=64, max_model_len=256, max_num_batched_tokens=512)
    driver.add("stays", prompt(41), priority=0, max_tokens=60)
    driver.step()
    for number in range(4):
        driver.add(f"low{number}", [*prompt(40), number], priority=5, max_tokens=24 if number else 40)
    driver.step()
    matched.clear()
    urgent = [*range(30, 250)]  # 55 blocks: more than can be had, less than the sum of what the victims hold
    driver.add("urgent", urgent, priority=1, max_tokens=2)
    for _ in range(20):
        driver.step()
    assert matched == ["urgent"] * 2  # to start, and to take places
    for _ in range(4):
        driver.step()
    assert driver.completions["low1"].finish_reason is not None
    assert matched == ["urgent"] * 3  # three have left at once
    assert driver.num_preemptions == 0
    run_and_compare(driver)


def looks_while_victims_come_and_go(num_victims: int, monkeypatch: pytest.MonkeyPatch) -> list[Counter[str]]:
    """Return what is asked of the cache in each step in which an urgent request is refused, and one victim is new."""
    driver = make_driver(
        num_gpu_blocks_override=96, max_model_len=384, max_num_batched_tokens=512, max_num_seqs=20, checks_acts=False
    )
    driver.add("stays", prompt(41), priority=0, max_tokens=60)
    driver.step()
    for number in range(num_victims):
        driver.add(f"low{number}", [*prompt(40), number], priority=5, max_tokens=40)
    driver.step()
    driver.add("urgent", [number % 250 for number in range(350)], priority=1, max_tokens=2)
    looks: Counter[str] = Counter()
    steps = []
    with monkeypatch.context() as patch:
        for owner, method in ((PrefixCache, "match"), (BlockPool, "num_references"), (KVCacheManager, "num_victims")):
            patch.setattr(owner, method, counted(vars(owner)[method], looks))
        for number in range(3):
            driver.abort(f"low{number}")
            driver.add(f"new{number}", [*prompt(40), 90 + number], priority=5, max_tokens=40)
            looks.clear()
            driver.plan()
            steps.append(looks.copy())
            driver.finish_step()
    assert driver.num_preemptions == 0
    assert driver.completions["urgent"].token_ids == []
    return steps


def counted(method: Any, calls: Counter[str]) -> Any:
    def counting(*args: Any) -> Any:
        calls[method.__name__] += 1
        return method(*args)

    return counting


def test_weighing_victims_that_come_and_go_looks_at_none_of_their_blocks_and_matches_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    few, many = (looks_while_victims_come_and_go(number, monkeypatch) for number in (4, 16))
    assert few == many
    assert [step["num_victims"] for step in many] == [0, 1, 1]  # weighed, once it was tried, and in vain
    assert all(step["match"] == 2 for step in many)  # it and the new victim, once each


def test_who_lacks_tokens_alone_is_matched_once_and_takes_nobodys_place(matched: list[str]) -> None:
    driver = make_driver(enable_chunked_prefill=False, max_num_batched_tokens=40, num_gpu_blocks_override=40)
    for number in range(3):
        driver.add(f"low{number}", prompt(6, number), priority=5, max_tokens=8)
    driver.step()
    matched.clear()
    driver.add("urgent", prompt(38, 9), priority=1, max_tokens=2)  # there are blocks, and 37 tokens a step
    for _ in range(7):
        assert rows(driver.step()) == {"low0": 1, "low1": 1, "low2": 1}
    assert matched == ["urgent"]
    assert rows(driver.step()) == {"urgent": 38}
    run_and_compare(driver)
    assert driver.core.stats().num_preemptions == 0


def test_without_chunked_prefill_nobody_makes_way_for_who_would_not_get_its_tokens() -> None:
    driver = make_driver(
        enable_chunked_prefill=False, max_num_batched_tokens=40, num_gpu_blocks_override=30, max_num_seqs=3
    )
    for number in range(2):
        driver.add(f"stays{number}", prompt(3, number), priority=0, max_tokens=8)
    driver.step()
    driver.add("low", prompt(9, 2), priority=5, max_tokens=20)
    driver.step()
    driver.add("urgent", prompt(39, 3), priority=1, max_tokens=1)  # all but one of the tokens of a step
    for _ in range(6):  # while low could go, the others take two
        assert rows(driver.step()) == {"stays0": 1, "stays1": 1, "low": 1}
    plan = driver.step()
    assert plan is not None
    assert (rows(plan), driver.num_preemptions) == ({"low": 1, "urgent": 39}, 0)
    run_and_compare(driver)


def test_one_makes_way_beside_a_long_prompt_whose_chunks_leave_tokens() -> None:
    driver = make_driver(
        max_num_batched_tokens=8, long_prefill_token_threshold=4, num_gpu_blocks_override=30, max_num_seqs=2
    )
    driver.add("low", prompt(4, 1), priority=5, max_tokens=20)
    driver.step()
    driver.add("stays", prompt(30, 2), priority=0, max_tokens=6)
    driver.step()
    driver.add("urgent", prompt(4, 3), priority=1, max_tokens=2)
    plan = driver.step()
    assert plan is not None
    assert (rows(plan), plan.preempted_request_ids) == ({"stays": 4, "urgent": 4}, ("low",))
    run_and_compare(driver)


def test_nobody_makes_way_while_those_who_go_on_take_all_tokens_of_a_step() -> None:
    driver = make_driver(max_num_batched_tokens=8, num_gpu_blocks_override=30, max_num_seqs=2)
    driver.add("low", prompt(4, 1), priority=5, max_tokens=20)
    driver.step()
    driver.add("stays", prompt(30, 2), priority=0, max_tokens=6)
    driver.step()
    driver.add("urgent", prompt(4, 3), priority=1, max_tokens=2)
    num_preemptions = []
    while "urgent" not in rows(driver.step()):
        num_preemptions.append(driver.num_preemptions)
    assert num_preemptions == [0, 0]
    assert driver.num_preemptions == 1
    run_and_compare(driver)


@pytest.mark.parametrize("max_num_seqs", [2, 3])
def test_who_needs_less_than_when_it_was_refused_takes_a_place_as_soon_as_that_is_enough(max_num_seqs: int) -> None:
    driver = make_driver(max_num_seqs=max_num_seqs, max_num_batched_tokens=16, long_prefill_token_threshold=4)
    shared = prompt(28)
    driver.add("stays", shared[:21], priority=0, max_tokens=19)
    driver.step()
    driver.add("urgent", [*shared[:25], 99], priority=0, max_tokens=2)  # seven blocks, fewer with each that is cached
    driver.add("low", prompt(3, 9), priority=5, max_tokens=20)
    assert rows(driver.step()) == {"stays": 4, "low": 3}
    assert rows(driver.step()) == {"stays": 4, "low": 1}
    plan = driver.step()
    assert plan is not None
    assert (rows(plan), plan.preempted_request_ids) == ({"stays": 4, "urgent": 4}, ("low",))
    run_and_compare(driver)


def test_who_made_way_does_not_come_back_in_the_same_step() -> None:
    driver = make_driver("fair", num_gpu_blocks_override=12)
    driver.add("a1", prompt(3, 1), client_key="a", max_tokens=30)
    driver.add("small", prompt(3, 2), client_key="a", max_tokens=8)
    driver.add("b1", prompt(3, 3), client_key="b", max_tokens=8)
    driver.add("large", prompt(21, 4), client_key="b", max_tokens=8)
    driver.step()
    driver.add("newcomer", prompt(22, 5), client_key="c", max_tokens=3)
    driver.step()
    plan = driver.step()  # small makes way first, for it started last; it came before large, which must go too
    assert plan is not None
    assert (rows(plan), plan.preempted_request_ids) == ({"a1": 1, "b1": 1, "newcomer": 22}, ("small", "large"))
    assert "small" in rows(driver.step())
    run_and_compare(driver)


def placed(arrival_number: int, position: int = 0, client: str = "") -> Request:
    (request,) = make_requests(client)
    request.arrival_number, request.place = arrival_number, (position, arrival_number)
    return request


def make_requests(*clients: str) -> list[Request]:
    driver = make_driver("fair", max_num_seqs=8)
    for number, client in enumerate(clients):
        driver.add(f"r{number}", prompt(4, number), client_key=client)
    return list(driver.live_requests)


def test_who_comes_again_has_its_place_as_the_policy_has_it() -> None:
    fair, early, late = Fair(), placed(1, position=0), placed(2, position=70)
    assert Priority().place_again(early, late) == early.place
    assert fair.place_again(early) == (0, 1)
    fair.place(late)
    fair.started(late)
    assert fair.place_again(early) == (0, 1)  # before all who come now
    now, _ = fair.place(placed(3, client="other"))
    assert now > 70
    assert fair.place_again(early, made_way_for=placed(3, position=990)) == (991, 1)  # behind whom it made way for
    assert fair.place_again(early, made_way_for=placed(3, position=5)) == (now + 1, 1)  # and those who come now


def test_nothing_is_remembered_of_who_has_ended() -> None:
    driver = make_driver(num_gpu_blocks_override=12, max_num_seqs=2)
    driver.add("stays", prompt(20, 1), priority=0, max_tokens=5)
    driver.add("low", prompt(6, 2), priority=5, max_tokens=5)
    driver.step()
    driver.add("refused", prompt(38, 3), priority=1, max_tokens=2)  # more than low would leave
    driver.step()
    driver.step()
    admission, kv_cache = driver.core._scheduler.admission, driver.core._kv_cache
    refused, matched = admission._refused, kv_cache._matched
    assert refused is not None
    assert matched is not None
    assert refused[0].request_id == matched[0][0].request_id == "refused"
    driver.abort("refused")
    assert (admission._refused, kv_cache._matched) == (None, None)
    driver.add("urgent", prompt(6, 4), priority=1, max_tokens=2)
    driver.step()
    made_way_for = admission._made_way_for
    assert made_way_for is not None
    assert made_way_for.request_id == "urgent"
    driver.abort("urgent")
    assert (admission._made_way_for, kv_cache._matched) == (None, None)
    run_and_compare(driver)
