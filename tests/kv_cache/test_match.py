"""Hits over groups that need different parts of a beginning."""

from __future__ import annotations

import pytest

from engine.kv_cache.manager import KVCacheManager
from engine.kv_cache.match import longest_match, longest_run
from engine.kv_cache.prefix_cache import PrefixCache
from engine.outputs import BlockId, KVCacheGroup, RequestId
from engine.protocol import EngineCoreRequest
from engine.request import Request
from engine.sampling_params import SamplingParams

FULL = KVCacheGroup(layers=(0,))


def window(size: int) -> KVCacheGroup:
    return KVCacheGroup(layers=(0,), sliding_window=size)


def make_request(name: str, tokens: list[int]) -> Request:
    request = EngineCoreRequest(RequestId(name), name, tokens, SamplingParams(max_tokens=500), arrival_time=0.0)
    return Request(request, 1, 1000)


def make_manager(*groups: KVCacheGroup, num_blocks: int = 101, block_size: int = 16) -> KVCacheManager:
    return KVCacheManager(num_blocks, block_size, enable_prefix_caching=True, hash_salt=b"", groups=groups)


def compute(manager: KVCacheManager, request: Request) -> None:
    """Admit `request` and compute all its tokens in a step of its own."""
    manager.admit(request, manager.match(request))
    assert manager.grow(request, request.num_tokens)
    request.num_computed_tokens = request.num_tokens
    manager.publish(request, 1)
    manager.settle(1)


def tables(manager: KVCacheManager, request: Request) -> list[list[int]]:
    return [table.tolist() for table in manager._tables[request.request_id].views]


def cached_where(pattern: str, group: KVCacheGroup) -> int:
    """Return how many blocks are hit where exactly those marked T in `pattern` are cached."""
    cache = PrefixCache(100, 2, b"")
    request = make_request("r", list(range(2 * len(pattern))))
    cache.publish(request, 0, [BlockId(10 + index) for index in range(len(pattern))], 1)
    cache.forget(BlockId(10 + index) for index, mark in enumerate(pattern) if mark == "F")
    match = longest_match(cache, [group], cache.hashes(request), 2)
    assert match.num_tokens == 2 * len(match.blocks[0])
    return len(match.blocks[0])


@pytest.mark.parametrize(
    ("pattern", "num_hit"), [("TTFTFFTTFTTT", 12), ("TTFTFFTTFFF", 8), ("FFFFFFFFFF", 0), ("TF", 1), ("", 0)]
)
def test_a_window_is_scanned_from_the_right_for_the_last_run_that_fills_it(pattern: str, num_hit: int) -> None:
    assert longest_run([mark == "T" for mark in pattern], 2) == num_hit  # a window of 4 in blocks of 2
    assert cached_where(pattern, window(4)) == num_hit


def test_who_sees_everything_is_scanned_from_the_left_up_to_the_first_gap() -> None:
    assert [cached_where(pattern, FULL) for pattern in ("TTFTT", "FTTTT", "TTTTT", "")] == [2, 0, 5, 0]


def test_a_window_of_one_token_needs_no_block_of_the_past() -> None:
    assert longest_run([False] * 5, 0) == 5
    assert cached_where("FFFFF", window(1)) == 5


def test_a_hit_has_null_blocks_where_a_window_does_not_reach() -> None:
    manager = make_manager(FULL, window(32), window(32))
    first = make_request("first", list(range(55)))
    compute(manager, first)
    assert tables(manager, first) == [[1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12]]
    again = make_request("again", [*range(48), *[7] * 5])
    match = manager.match(again)
    assert match.blocks == ([1, 2, 3], [0, 6, 7], [0, 10, 11])
    assert match.num_tokens == 48
    manager.admit(again, match)
    assert manager.grow(again, 53)
    assert tables(manager, again) == [[1, 2, 3, 13], [0, 6, 7, 14], [0, 10, 11, 15]]
    manager.check_invariants([first, again])
    for request in (first, again):
        manager.release(request, None)
    manager.check_invariants([])
    assert manager.match(again).num_tokens == 48


@pytest.mark.parametrize(
    ("evicted", "num_hit"),
    [
        ([5, 9], 3),  # of both windows the block that they do not reach
        ([1], 0),  # the first block of those that see everything
        ([3, 7, 11], 2),  # the last block of all
        ([3], 2),
        ([7], 2),
        ([11], 2),
        ([3, 5, 9], 0),  # two blocks are left to one group and the last two to the others: no length suits all
    ],
)
def test_a_hybrid_hit_is_the_longest_beginning_that_suits_every_group(evicted: list[int], num_hit: int) -> None:
    manager = make_manager(FULL, window(32), window(32))
    first = make_request("first", list(range(55)))
    compute(manager, first)
    manager.release(first, None)
    manager.prefix_cache.forget(map(BlockId, evicted))
    match = manager.match(make_request("again", list(range(55))))
    assert match.num_tokens == 16 * num_hit
    assert {len(blocks) for blocks in match.blocks} == {num_hit}


@pytest.mark.parametrize("windows", [(3, None), (3, 5), (1, 2, None), (8, 3, 1), (None, 2, 7), (4,), (None,)])
def test_a_hit_over_any_mix_of_groups_is_the_longest_of_which_each_has_what_it_reads(
    windows: tuple[int | None, ...],
) -> None:
    groups = [FULL if size is None else window(size) for size in windows]
    num_blocks, block_size = 4 if len(windows) <= 2 else 3, 2
    for marks in range(2 ** (num_blocks * len(groups))):
        cache = PrefixCache(100, block_size, b"")
        request = make_request("r", list(range(num_blocks * block_size)))
        cached = {}
        for index in range(len(groups)):
            blocks = [BlockId(1 + num_blocks * index + place) for place in range(num_blocks)]
            cache.publish(request, 0, blocks, 1, index)
            cached[index] = [bool(marks >> (block - 1) & 1) for block in blocks]
            cache.forget(block for block, kept in zip(blocks, cached[index], strict=True) if not kept)
        found = longest_match(cache, groups, cache.hashes(request), block_size).num_tokens // block_size
        suits = [
            all(
                all(cached[index][max(0, length * block_size - size + 1) // block_size if size else 0 : length])
                for index, size in enumerate(windows)
            )
            for length in range(num_blocks + 1)
        ]
        assert found == max(length for length in range(num_blocks + 1) if suits[length]), (marks, cached)
