from __future__ import annotations

import tracemalloc
from typing import Any

import pytest

from engine.kv_cache.manager import ALL_LAYERS, KVCacheManager
from engine.kv_cache.spec import NULL_BLOCK
from engine.outputs import BlockId, KVCacheGroup, RequestId, ScheduledRequest
from engine.protocol import EngineCoreRequest
from engine.request import Request
from engine.sampling_params import SamplingParams


def make_request(name: str, tokens: list[int], **params: object) -> Request:
    sampling_params = SamplingParams(max_tokens=500, **params)
    request = EngineCoreRequest(RequestId(name), name, tokens, sampling_params, arrival_time=0.0)
    return Request(request, 1, 1000)


def make_manager(num_blocks: int = 11, block_size: int = 16, **settings: Any) -> KVCacheManager:
    return KVCacheManager(num_blocks, block_size, **{"enable_prefix_caching": True, "hash_salt": b"", **settings})


def window(size: int) -> KVCacheGroup:
    return KVCacheGroup(layers=(0,), sliding_window=size)


def admit(manager: KVCacheManager, request: Request, num_tokens: int) -> bool:
    match = manager.match(request)
    if not manager.has_room(request, match):
        return False
    manager.admit(request, match)
    return manager.grow(request, num_tokens) is not None


def compute(manager: KVCacheManager, request: Request, step: int = 1) -> int | None:
    """Admit `request` and compute all its tokens in `step`; returns how many were cached, None if refused."""
    match = manager.match(request)
    if not admit(manager, request, request.num_tokens):
        return None
    request.num_computed_tokens = request.num_tokens
    manager.publish(request, step)
    manager.settle(step)
    return match.num_tokens


def table(manager: KVCacheManager, request: Request) -> list[int]:
    return manager._tables[request.request_id].views[0].tolist()


def test_decoding_takes_a_block_when_the_last_is_full_and_publishes_it_then() -> None:
    manager, request = make_manager(), make_request("r", list(range(55)))
    assert compute(manager, request) == 0
    assert table(manager, request) == [1, 2, 3, 4]
    for num_tokens, num_blocks, published in ((59, 4, 3), (78, 5, 4)):
        while request.num_tokens < num_tokens:
            request.append(7)
        assert manager.grow(request, num_tokens)
        request.num_computed_tokens = num_tokens
        manager.publish(request, 2)
        assert len(table(manager, request)) == num_blocks
        assert [manager.prefix_cache.holds(block) for block in table(manager, request)] == [
            index < published for index in range(num_blocks)
        ]
    manager.check_invariants([request])


def test_a_fully_cached_prompt_computes_its_last_block_again_into_a_block_of_its_own() -> None:
    manager = make_manager(block_size=4)
    first = make_request("first", [1] * 8)
    compute(manager, first)
    for num_tokens, cached in ((7, 4), (8, 4), (9, 8)):
        request = make_request("again", [1] * num_tokens)
        assert compute(manager, request) == cached
        assert table(manager, request)[: cached // 4] == table(manager, first)[: cached // 4]
        assert table(manager, request)[-1] not in table(manager, first)
        manager.check_invariants([first, request])
        manager.release(request, None)


def test_a_reused_block_is_no_longer_hit_for_what_it_held() -> None:
    manager = make_manager(num_blocks=3, block_size=4)
    request = make_request("a", [1] * 8)
    compute(manager, request)
    manager.release(request, None)
    other = make_request("b", [2] * 5)
    assert compute(manager, other) == 0
    manager.release(other, None)
    assert manager.match(make_request("a", [1] * 8)).blocks == ([],)
    assert manager.match(make_request("b", [2] * 5)).num_tokens == 4
    manager.check_invariants([])


def test_hits_are_pinned_before_new_blocks_are_taken() -> None:
    manager = make_manager(num_blocks=4, block_size=4)
    request = make_request("a", [1] * 12)
    compute(manager, request)
    manager.release(request, None)  # all three blocks are cached and free; the hit stands second in the queue
    again = make_request("a", [1] * 8 + [3] * 4)
    assert manager.match(again).num_tokens == 8
    assert compute(manager, again) == 8
    assert len(set(table(manager, again))) == 3
    manager.check_invariants([again])


def test_without_prefix_caching_nothing_is_found_and_the_pool_still_bounds() -> None:
    manager = make_manager(num_blocks=5, block_size=4, enable_prefix_caching=False)
    request = make_request("a", list(range(10)))
    assert compute(manager, request) == 0
    assert len(table(manager, request)) == 3
    manager.release(request, None)
    request = make_request("b", list(range(16)))
    assert compute(manager, request) == 0
    assert len(table(manager, request)) == 4
    assert compute(manager, make_request("c", [1] * 4)) is None
    manager.check_invariants([request])


def test_a_refused_admission_leaves_every_reference_as_it_was() -> None:
    manager = make_manager(num_blocks=6, block_size=4)
    held, freed = make_request("held", [1] * 8), make_request("freed", [1] * 8 + [2] * 4)
    compute(manager, held)
    compute(manager, freed)
    manager.release(freed, None)
    long = make_request("long", [1] * 8 + [2] * 4 + [3] * 12)
    match = manager.match(long)
    before = [manager.pool.num_references(block) for block in match.blocks[0]]
    assert before == [1, 1, 0]
    assert not manager.has_room(long, match)  # needs three new and the rescued one, three are free
    assert [manager.pool.num_references(block) for block in match.blocks[0]] == before
    manager.check_invariants([held])


def test_a_request_starts_only_if_all_its_tokens_would_fit_though_it_takes_only_its_chunk() -> None:
    manager = make_manager(num_blocks=4, block_size=4)
    request = make_request("a", [1] * 13)
    assert not admit(manager, request, 4)
    request = make_request("b", [1] * 12)
    assert admit(manager, request, 4)
    assert len(table(manager, request)) == 1
    assert manager.grow(request, 12)
    assert not manager.grow(request, 13)
    assert len(table(manager, request)) == 3


def test_a_block_of_unknown_tokens_is_published_once_they_are_known() -> None:
    manager, request = make_manager(block_size=4), make_request("a", [1, 2, 3])
    admit(manager, request, 3)
    manager.grow(request, 5)
    request.num_computed_tokens = 5  # two late tokens
    manager.publish(request, 2)
    assert not manager.prefix_cache.holds(1)
    request.append(4)
    manager.publish(request, 3)
    assert manager.prefix_cache.holds(1)


def test_what_a_plan_in_flight_names_is_given_back_when_that_plan_is_settled() -> None:
    manager, request = make_manager(num_blocks=5, block_size=4), make_request("a", [1] * 16)
    compute(manager, request)
    manager.release(request, held_until=3)
    assert manager.has_held_blocks
    for step, num_free in ((2, 0), (3, 4)):
        manager.settle(step)
        assert manager.pool.num_free_blocks == num_free
        manager.check_invariants([])
    assert not manager.has_held_blocks


def test_releasing_what_holds_nothing_does_nothing() -> None:
    manager = make_manager()
    manager.release(make_request("a", [1]), None)
    manager.check_invariants([])


def test_the_invariants_notice_a_table_that_outlives_its_request() -> None:
    manager, request = make_manager(), make_request("a", [1])
    compute(manager, request)
    with pytest.raises(AssertionError, match="tables"):
        manager.check_invariants([])


def test_a_request_that_reads_nothing_cached_lets_others_read_what_it_computes() -> None:
    manager = make_manager(num_blocks=100)
    first = make_request("first", [1] * 55, skip_reading_prefix_cache=True)
    assert compute(manager, first) == 0
    assert manager.match(make_request("other", [1] * 55)).num_tokens == 48
    again = make_request("again", [1] * 55, skip_reading_prefix_cache=True)
    assert compute(manager, again) == 0
    assert set(table(manager, again)).isdisjoint(table(manager, first))
    manager.check_invariants([first, again])


@pytest.mark.parametrize("length", [15, 16, 17, 31, 32, 33])
@pytest.mark.parametrize("skips", [False, True])
def test_a_prompt_sent_twice_always_leaves_a_token_to_compute(length: int, skips: bool) -> None:
    manager = make_manager()
    compute(manager, make_request("first", [1] * length))
    again = make_request("again", [1] * length, skip_reading_prefix_cache=skips)
    num_cached = compute(manager, again)
    assert num_cached == (0 if skips else (length - 1) // 16 * 16)
    assert num_cached < length


def test_a_beginning_sent_again_is_found_before_new_blocks_are_taken_though_the_pool_is_nearly_all_cached() -> None:
    manager = make_manager(num_blocks=6, block_size=4)
    first = [1] * 8
    for name, tokens in (("a", [*first, *[2] * 4]), ("b", [*first, *[3] * 8])):
        request = make_request(name, tokens)
        assert compute(manager, request) == (8 if name == "b" else 0)
        manager.release(request, None)
        manager.check_invariants([])
    assert sum(map(manager.prefix_cache.holds, range(6))) == 5
    again = make_request("a", [*first, *[2] * 4, 9])
    assert compute(manager, again) == 12
    assert len(set(table(manager, again))) == 4
    manager.check_invariants([again])


def test_a_window_is_admitted_by_what_it_can_hold_at_most_and_full_attention_by_the_whole_prompt() -> None:
    prompt = [1] * (32 * 16)
    groups = (*ALL_LAYERS, window(64))
    for num_blocks, fits in ((64 + 13 + 1, True), (32 + 13 + 1, True), (32 + 13, False)):
        manager = make_manager(num_blocks, groups=groups, max_in_flight=128)
        request = make_request("a", prompt)
        assert manager.has_room(request, manager.match(request)) is fits
    manager = make_manager(32 + 13 + 1, groups=groups, max_in_flight=128)
    request = make_request("a", prompt)
    manager.admit(request, manager.match(request))
    for end in range(128, 513, 128):
        assert manager.grow(request, end)
        request.num_computed_tokens = request.num_processed_tokens = end
        manager.publish(request, end)
        manager.settle(end)
        manager.check_invariants([request])
    assert manager.num_blocks(request) <= 32 + 13
    assert not make_manager(num_blocks=6).has_room(make_request("a", prompt), make_manager().match(request))


def test_all_that_is_not_hit_in_use_counts_as_needed() -> None:
    manager = make_manager(num_blocks=31)
    request = make_request("first", list(range(160)))
    compute(manager, request)
    again = make_request("again", [*range(160), *[9] * 160])
    for is_used, num_needed in ((True, 10), (False, 20)):  # a free block that is hit leaves the free queue too
        if not is_used:
            manager.release(request, None)
        assert not manager.has_room(again, manager.match(again), num_reserved=30)
        assert again.shortage is not None
        assert (again.shortage.num_blocks, again.shortage.num_new) == (num_needed, 160)


def test_a_hit_block_that_is_free_is_never_handed_out_as_a_new_one_too() -> None:
    manager = make_manager(num_blocks=3)
    first = make_request("first", list(range(17)))
    compute(manager, first)
    manager.release(first, None)
    again = make_request("again", list(range(17)))
    assert compute(manager, again) == 16
    assert sorted(table(manager, again)) == [1, 2]
    manager.check_invariants([again])


def test_what_a_window_leaves_behind_is_given_back_and_its_tail_stays_behind_all_scratch() -> None:
    manager = make_manager(num_blocks=13, block_size=2, groups=(window(4),), max_in_flight=4)
    request = make_request("a", list(range(11)))
    manager.admit(request, manager.match(request))
    num_skipped = []
    for step, end in enumerate((2, 4, 6, 8, 10, 11), start=1):
        assert manager.grow(request, end)
        num_skipped.append(table(manager, request).count(NULL_BLOCK))
        request.num_computed_tokens = request.num_processed_tokens = end
        manager.publish(request, step)
        manager.settle(step)
        manager.check_invariants([request])
    assert num_skipped == [0, 0, 0, 1, 2, 3]
    manager.release(request, None)
    cached = [manager.prefix_cache.holds(block) for block in manager.pool.free_blocks()]
    assert cached == sorted(cached)
    assert sum(cached) == 5
    manager.check_invariants([])


def test_a_block_that_a_short_window_left_behind_before_its_tokens_were_known_is_not_published() -> None:
    manager = make_manager(block_size=1, groups=(window(2),), max_in_flight=4)
    request = make_request("a", [1])
    manager.admit(request, manager.match(request))
    for step in range(1, 5):  # four plans in flight, three of them with a late token
        assert manager.grow(request, step)
        request.num_computed_tokens = step
        manager.publish(request, step)
    for step in range(1, 5):
        request.append(step)
        request.num_processed_tokens = step
        manager.settle(step)
    assert manager.grow(request, 5)
    request.num_computed_tokens = 5
    manager.publish(request, 5)
    assert table(manager, request)[:3] == [NULL_BLOCK] * 3
    assert not manager.prefix_cache.holds(NULL_BLOCK)
    manager.check_invariants([request])


def test_a_table_that_may_not_grow_still_shows_what_its_window_left_behind() -> None:
    manager = make_manager(num_blocks=7, block_size=1, groups=(window(2),), max_in_flight=4)
    request, other = make_request("a", [1] * 4), make_request("b", [2] * 2)
    compute(manager, request)
    compute(manager, other)
    request.num_processed_tokens = 4
    request.append(5)
    before = table(manager, request)
    assert not manager.grow(request, 12)
    assert table(manager, request) == [NULL_BLOCK] * 3 + before[3:]
    manager.check_invariants([request, other])
    assert manager.grow(request, 5)
    manager.check_invariants([request, other])


def test_a_block_given_back_before_the_step_that_published_it_ended_stays_cached_if_that_step_fails() -> None:
    manager = make_manager(block_size=1, groups=(window(2),), max_in_flight=3)
    request = make_request("a", [1])
    manager.admit(request, manager.match(request))
    for step in range(1, 6):  # three plans in flight: the token of step 2 is known, and published, by step 4
        if step > 3:
            for ended in (1, 2) if step == 4 else (3,):
                request.append(ended)
                request.num_processed_tokens = ended
                manager.settle(ended)
        assert manager.grow(request, step)
        request.num_computed_tokens = step
        manager.publish(request, step)
    assert table(manager, request)[:2] == [NULL_BLOCK] * 2
    assert [manager.prefix_cache.holds(block) for block in (1, 2, 3)] == [True] * 3
    assert manager.retract() == {3, 4}
    assert [manager.prefix_cache.holds(block) for block in (1, 2, 3)] == [True, True, False]
    manager.check_invariants([request])


def test_a_hybrid_request_that_lacks_room_is_looked_up_again_only_when_the_group_that_ended_its_hit_has_more() -> None:
    manager = make_manager(num_blocks=40, block_size=4, groups=(*ALL_LAYERS, window(4)), max_in_flight=64)
    first = make_request("first", [1] * 16)
    compute(manager, first)
    manager.release(first, None)
    manager.prefix_cache.forget(BlockId(block) for block in range(5, 9))  # all that the window had
    waiting = make_request("waiting", [1] * 30)
    assert manager.match(waiting).num_tokens == 0
    assert not manager.has_room(waiting, manager.match(waiting), num_reserved=30)
    assert waiting.shortage is not None
    assert waiting.shortage.next_block == (waiting.block_hashes[0], 1)
    assert manager.is_short(waiting, 30, None)
    compute(manager, make_request("other", [1] * 5))
    assert not manager.is_short(waiting, 30, None)


def test_shared_leading_blocks_are_counted_anew_whenever_somebody_comes_or_goes() -> None:
    manager = make_manager(num_blocks=30, block_size=4)
    first, second, third = (make_request(name, [1] * 13 + [ord(name)]) for name in "abc")
    compute(manager, first)
    assert manager.num_common_prefix_blocks([first]) == (0,)
    compute(manager, second)
    assert manager.num_common_prefix_blocks([first, second]) == (3,)
    compute(manager, third)
    assert manager.num_common_prefix_blocks([first, second, third]) == (3,)
    manager.release(third, held_until=9)
    assert manager.num_common_prefix_blocks([first, second]) == (0,)  # a plan in flight holds them too
    manager.settle(9)
    assert manager.num_common_prefix_blocks([first, second]) == (3,)
    manager.release(second, None)
    assert manager.num_common_prefix_blocks([first]) == (0,)


@pytest.mark.parametrize(("groups", "num_passed"), [(ALL_LAYERS, 0), ([window(6)], 1)])
def test_a_row_computes_from_what_its_window_sees_and_fills_the_rest(groups: Any, num_passed: int) -> None:
    manager, request = make_manager(block_size=4, groups=groups, max_in_flight=19), make_request("a", [1] * 19)
    compute(manager, request)
    blocks = table(manager, request)
    row = ScheduledRequest(
        request_id=request.request_id,
        tokens=request.tokens.view(),
        start=9,
        num_tokens=7,
        block_tables=manager._tables[request.request_id].views,
        samples=False,
        sampling_params=request.sampling_params,
    )
    assert manager.trace(row) == ({*blocks[num_passed:3]}, {*blocks[2:4]})


def test_what_is_forgotten_cannot_be_hit() -> None:
    manager, request = make_manager(block_size=4), make_request("a", [1] * 16)
    compute(manager, request)
    manager.forget({*table(manager, request)[2:]})
    assert [manager.prefix_cache.holds(block) for block in table(manager, request)] == [True, True, False, False]
    assert manager.match(make_request("b", [1] * 17)).num_tokens == 8


def test_steps_are_awaited_until_they_are_settled() -> None:
    manager, request = make_manager(block_size=4), make_request("a", [1] * 16)
    assert admit(manager, request, 16)
    request.num_computed_tokens = 16
    manager.publish(request, 3)
    manager.release(request, held_until=4)
    assert manager.awaited_steps == {3, 4}
    manager.settle(3)
    assert manager.awaited_steps == {4}
    manager.settle(4)
    assert manager.awaited_steps == set()


def weighing_bytes(num_blocks: int) -> int:
    """Return the most memory that it takes to weigh four victims of the highest ids in vain."""
    manager = make_manager(num_blocks, enable_prefix_caching=False)
    manager.pool.take(num_blocks - 1 - 4 * 8)
    victims = [make_request(f"v{number}", [number] * 128) for number in range(4)]
    assert all(admit(manager, victim, 128) for victim in victims)
    waiting = make_request("waiting", [9] * 900)
    match = manager.match(waiting)
    assert manager.num_victims(waiting, match, victims, [0] * 5) is None  # and whatever is made once is made
    tracemalloc.start()
    try:
        assert manager.num_victims(waiting, match, victims, [0] * 5) is None
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_weighing_victims_touches_as_much_whatever_the_pool() -> None:
    few, many = weighing_bytes(64), weighing_bytes(200_000)
    assert many < few + 1000, f"{many} bytes, and {few} in a small pool"
    assert many < 20_000


def test_a_match_is_found_anew_once_blocks_are_published_evicted_or_forgotten() -> None:
    manager, again = make_manager(num_blocks=6), make_request("again", list(range(40)))
    assert manager.match(again).num_tokens == 0
    first = make_request("first", list(range(40)))
    assert compute(manager, first) == 0
    assert manager.match(again).num_tokens == 32
    manager.check_invariants([first])
    manager.reset_prefix_cache()
    assert manager.match(again).num_tokens == 0
    manager.check_invariants([first])


def test_a_kept_match_that_is_not_what_would_be_found_is_told() -> None:
    manager, first, again = make_manager(), *(make_request(name, list(range(40))) for name in ("first", "again"))
    assert compute(manager, first) == 0
    stale = manager.match(again)
    assert manager._matched is not None
    manager._matched = manager._matched[0], stale._replace(num_tokens=16)
    with pytest.raises(AssertionError, match="the match that is kept is stale"):
        manager.check_invariants([first])


def test_blocks_that_come_back_count_as_a_change_whoever_gives_them_back() -> None:
    manager, request = make_manager(num_blocks=41, block_size=4, groups=[window(6)]), make_request("r", [*range(40)])
    assert admit(manager, request, 40)
    before = manager.num_changes
    request.num_computed_tokens = request.num_processed_tokens = 40
    assert manager.grow(request, 41)  # the window has passed all but the last
    assert manager.num_changes > before
    manager.release(request, held_until=1)
    before = manager.num_changes
    manager.settle(1)
    assert manager.num_changes > before


def test_what_victims_alone_hold_of_a_match_is_counted_once_against_what_they_give() -> None:
    manager = make_manager(num_blocks=9, block_size=4)  # eight blocks
    victim = make_request("victim", list(range(17)))
    assert compute(manager, victim) == 0  # five blocks, four of which can be shared
    waiting = make_request("waiting", [*range(16), *range(50, 66)])
    match = manager.match(waiting)
    assert match.num_tokens == 16
    assert not manager.has_room(waiting, match)
    assert manager.num_victims(waiting, match, [victim], [0, 0]) == 1  # it needs eight, and all are free then
    assert manager.num_victims(waiting, match, [victim], [1, 1]) is None
