from __future__ import annotations

from typing import Any

import pytest

from engine.kv_cache import prefix_cache
from engine.kv_cache.events import AllBlocksCleared, BlockRemoved, BlockStored
from engine.kv_cache.prefix_cache import PrefixCache
from engine.outputs import BlockId, RequestId
from engine.protocol import EngineCoreRequest
from engine.request import MediaSpan, Request
from engine.sampling_params import SamplingParams


def make_request(tokens: list[int], cache_salt: str | None = None) -> Request:
    params = SamplingParams(max_tokens=8)
    request = EngineCoreRequest(RequestId("r"), "r", tokens, params, arrival_time=0.0, cache_salt=cache_salt)
    return Request(request, 1, 1000)


def make_cache(salt: bytes = b"", **settings: Any) -> PrefixCache:
    return PrefixCache(num_blocks=10, block_size=2, salt=salt, **settings)


def never_free(block: int) -> bool:
    return False


def chain(tokens: list[int], **keys: Any) -> list[bytes]:
    """Return the hashes of a request with these tokens and keys."""
    request = make_request(tokens, keys.pop("cache_salt", None))
    for name, value in keys.items():
        setattr(request, name, value)
    return make_cache().hashes(request)


def published(cache: PrefixCache, request: Request, blocks: list[int], step: int = 1) -> list[bytes]:
    hashes = cache.hashes(request)
    cache.publish(request, 0, [BlockId(block) for block in blocks], step)
    cache.check_invariants()
    return hashes


def test_only_full_blocks_are_hashed_and_each_once_as_tokens_come() -> None:
    cache, request = make_cache(), make_request([1, 2, 3])
    first = list(cache.hashes(request))
    assert len(first) == 1
    request.append(4)
    assert cache.hashes(request)[0] is first[0]
    assert cache.hashes(request) == cache.hashes(make_request([1, 2, 3, 4]))


def test_a_block_is_hit_only_behind_the_same_beginning() -> None:
    cache = make_cache()
    published(cache, make_request([1, 2, 3, 4]), [5, 6])
    assert cache.match(cache.hashes(make_request([1, 2, 3, 4, 9, 9]))) == [5, 6]
    assert cache.match(cache.hashes(make_request([1, 2, 9, 9]))) == [5]
    assert cache.match(cache.hashes(make_request([3, 4, 3, 4]))) == []


def test_salts_separate_whole_chains_and_equal_salts_share_them() -> None:
    cache = make_cache()
    published(cache, make_request([1, 2, 3, 4], "salt1"), [5, 6])
    assert cache.match(cache.hashes(make_request([1, 2, 3, 4], "salt1"))) == [5, 6]
    assert cache.match(cache.hashes(make_request([1, 2, 3, 4], "salt2"))) == []
    assert cache.match(cache.hashes(make_request([1, 2, 3, 4]))) == []
    assert cache.match(cache.hashes(make_request([1, 2, 3, 4], ""))) == []
    assert make_cache(b"a").hashes(make_request([1, 2])) != make_cache(b"b").hashes(make_request([1, 2]))


def test_any_text_can_be_a_salt() -> None:
    cache = make_cache()
    hashes = {cache.hashes(make_request([1, 2], salt))[0] for salt in ("\ud800", "\udfff", "\0", "é", "")}
    assert len(hashes) == 5


def test_equal_blocks_are_both_kept_and_evicting_one_leaves_the_other_to_be_hit() -> None:
    for order in ([5, 6, 7], [6, 5, 7], [7, 6, 5]):
        cache = make_cache()
        for block in (5, 6, 7):
            hashes = published(cache, make_request([1, 2]), [block])
        for left, block in ((2, order[0]), (1, order[1])):
            cache.forget([BlockId(block)])
            cache.check_invariants()
            assert not cache.holds(BlockId(block))
            assert len(cache.match(hashes)) == 1, left
        assert cache.match(hashes) == [order[2]]
        cache.forget([BlockId(order[2])])
        cache.check_invariants()
        assert cache.match(hashes) == []


def test_a_retraction_forgets_what_uncommitted_steps_published_and_nothing_else() -> None:
    cache = make_cache()
    published(cache, make_request([1, 2, 3, 4]), [1, 2], step=1)
    published(cache, make_request([5, 6]), [3], step=2)
    published(cache, make_request([7, 8]), [4], step=3)
    cache.commit(1)
    assert cache.retract(never_free) == {3, 4}
    cache.check_invariants()
    assert cache.match(cache.hashes(make_request([1, 2, 3, 4]))) == [1, 2]
    assert cache.match(cache.hashes(make_request([5, 6]))) == []
    assert cache.retract(never_free) == set()


def test_a_retraction_names_a_block_that_was_forgotten_meanwhile_for_it_may_have_been_hit() -> None:
    cache = make_cache()
    published(cache, make_request([1, 2]), [3])
    cache.forget([BlockId(3)])
    assert cache.retract(never_free) == {3}


def test_clearing_forgets_everything_and_leaves_nothing_to_retract() -> None:
    cache = make_cache()
    hashes = published(cache, make_request([1, 2, 3, 4]), [1, 2])
    cache.clear()
    cache.check_invariants()
    assert cache.match(hashes) == []
    assert not cache.holds(BlockId(1))
    assert cache.retract(never_free) == set()


def test_whatever_separates_beginnings_is_tagged_with_its_kind() -> None:
    chains = [
        chain([1, 2, 3, 4]),
        chain([1, 2, 3, 4], cache_salt="X"),
        chain([1, 2, 3, 4], adapter_key="X"),
        chain([1, 2, 3, 4], media=(MediaSpan("X", 0, 4),)),
        chain([1, 2, 3, 4], cache_salt="X", adapter_key="X"),
        chain([1, 2, 3, 4], cache_salt="adapter\x001\0X"),
        chain([1, 2, 3, 4], media=(MediaSpan("X", -1, 4),)),
    ]
    assert len({block_hash for hashes in chains for block_hash in hashes}) == 2 * len(chains)


def test_prompts_that_differ_inside_one_block_share_none_of_it() -> None:
    cache = make_cache()
    published(cache, make_request([1, 2, 3, 4, 5, 6]), [1, 2, 3])
    assert cache.match(cache.hashes(make_request([1, 2, 3, 9, 5, 6]))) == [1]


def test_media_count_in_each_block_that_they_touch_and_from_where_they_begin() -> None:
    plain, other = chain([7] * 8), chain([7] * 8, media=(MediaSpan("cat", 3, 2),))
    assert [here == there for here, there in zip(plain, other, strict=True)] == [True, False, False, False]
    shifted = chain([7] * 8, media=(MediaSpan("cat", 2, 2),))
    assert other[1] != shifted[1]
    assert chain([7] * 8, media=(MediaSpan("cat", 3, 2),)) == other


@pytest.mark.parametrize("num_blocks", [2, 3, 9])
def test_a_run_is_one_event_each_block_that_goes_is_another_and_a_reset_clears(num_blocks: int) -> None:
    cache = make_cache(records_events=True)
    blocks = list(range(1, num_blocks + 1))
    first = make_request(list(range(2 * num_blocks)))
    hashes = published(cache, first, blocks)
    assert cache.take_events() == [BlockStored(hashes, None, list(range(2 * num_blocks)), 2)]
    cache.forget(map(BlockId, blocks))
    second = make_request([9, *range(2 * num_blocks - 1)])
    others = published(cache, second, blocks)
    assert cache.take_events() == [
        *(BlockRemoved([block_hash]) for block_hash in hashes),
        BlockStored(others, None, second.tokens.view().tolist(), 2),
    ]
    cache.clear()
    assert cache.take_events() == [AllBlocksCleared()]
    assert cache.take_events() == []


def test_an_event_names_its_parent_group_and_adapter() -> None:
    cache, request = make_cache(records_events=True), make_request([1, 2, 3, 4])
    request.adapter_key = "poet"
    for group in (0, 1):
        cache.publish(request, 1, [BlockId(5 + group)], 1, group)
    hashes = request.block_hashes
    assert cache.take_events() == [BlockStored(hashes[1:], hashes[0], [3, 4], 2, group, "poet") for group in (0, 1)]
    cache.forget([BlockId(6)])
    assert cache.take_events() == [BlockRemoved(hashes[1:], 1)]


def test_copies_of_a_block_make_no_events() -> None:
    cache = make_cache(records_events=True)
    for block in (5, 6):
        published(cache, make_request([1, 2]), [block])
    assert len(cache.take_events()) == 1
    cache.forget([BlockId(5)])
    assert cache.take_events() == []
    cache.forget([BlockId(6)])
    assert len(cache.take_events()) == 1


def test_events_are_kept_only_where_somebody_will_take_them() -> None:
    cache = make_cache()
    published(cache, make_request([1, 2]), [5])
    assert cache.take_events() == []
    assert cache._events is None


def test_what_stands_for_a_beginning_is_a_hash_of_256_bits() -> None:
    """Tokens are not compared on a hit: a shorter hash would let one beginning be taken for another."""
    assert prefix_cache.HASH_SIZE_BYTES == 32
    assert all(len(block_hash) == 32 for block_hash in chain([1, 2, 3, 4]))


def test_entries_never_outnumber_blocks_however_much_comes_and_goes() -> None:
    cache = make_cache()
    for number in range(200):
        block = BlockId(1 + number % 9)
        cache.forget([block])
        published(cache, make_request([number % 7, 1]), [block], step=number)
        cache.commit(number)
        assert len(cache._block_of) <= 7
        assert len(cache._block_of) + sum(map(len, cache._twins.values())) <= 9
    assert not cache._published
