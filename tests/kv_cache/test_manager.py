from __future__ import annotations

import pytest

from engine.kv_cache.manager import KVCacheManager
from engine.outputs import RequestId
from engine.protocol import EngineCoreRequest
from engine.request import Request
from engine.sampling_params import SamplingParams


def make_request(name: str, tokens: list[int]) -> Request:
    request = EngineCoreRequest(RequestId(name), name, tokens, SamplingParams(max_tokens=500), arrival_time=0.0)
    return Request(request, 1, 1000)


def make_manager(num_blocks: int = 11, block_size: int = 16, enable_prefix_caching: bool = True) -> KVCacheManager:
    return KVCacheManager(num_blocks, block_size, enable_prefix_caching=enable_prefix_caching, hash_salt=b"")


def admit(manager: KVCacheManager, request: Request, num_tokens: int) -> bool:
    match = manager.match(request)
    if not manager.has_room(request, match):
        return False
    manager.admit(request, match)
    return manager.grow(request, num_tokens)


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
    return manager.block_tables(request)[0].tolist()


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
