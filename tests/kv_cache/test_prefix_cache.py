from __future__ import annotations

from engine.kv_cache.prefix_cache import PrefixCache
from engine.outputs import BlockId, RequestId
from engine.protocol import EngineCoreRequest
from engine.request import Request
from engine.sampling_params import SamplingParams


def make_request(tokens: list[int], cache_salt: str | None = None) -> Request:
    params = SamplingParams(max_tokens=8)
    request = EngineCoreRequest(RequestId("r"), "r", tokens, params, arrival_time=0.0, cache_salt=cache_salt)
    return Request(request, 1, 1000)


def make_cache(salt: bytes = b"") -> PrefixCache:
    return PrefixCache(num_blocks=10, block_size=2, salt=salt)


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
    assert cache.retract() == {3, 4}
    cache.check_invariants()
    assert cache.match(cache.hashes(make_request([1, 2, 3, 4]))) == [1, 2]
    assert cache.match(cache.hashes(make_request([5, 6]))) == []
    assert cache.retract() == set()


def test_a_retraction_names_a_block_that_was_forgotten_meanwhile_for_it_may_have_been_hit() -> None:
    cache = make_cache()
    published(cache, make_request([1, 2]), [3])
    cache.forget([BlockId(3)])
    assert cache.retract() == {3}


def test_clearing_forgets_everything_and_leaves_nothing_to_retract() -> None:
    cache = make_cache()
    hashes = published(cache, make_request([1, 2, 3, 4]), [1, 2])
    cache.clear()
    cache.check_invariants()
    assert cache.match(hashes) == []
    assert not cache.holds(BlockId(1))
    assert cache.retract() == set()
