from __future__ import annotations

import pytest

from engine.kv_cache.block_pool import BlockPool


def never(block: int) -> bool:
    return False


def always(block: int) -> bool:
    return True


def test_blocks_are_handed_out_in_order_of_their_ids_and_never_the_null_block() -> None:
    pool = BlockPool(5)
    assert (pool.num_blocks, pool.num_free_blocks, pool.num_used_blocks) == (4, 4, 0)
    assert pool.take(4) == [1, 2, 3, 4]
    assert (pool.num_free_blocks, pool.num_used_blocks) == (0, 4)
    pool.check_invariants([1, 2, 3, 4], never)


def test_taking_more_than_is_free_is_refused_with_the_numbers_and_changes_nothing() -> None:
    pool = BlockPool(4)
    pool.take(1)
    with pytest.raises(ValueError, match="cannot take 3 blocks: 2 of 3 are free"):
        pool.take(3)
    pool.check_invariants([1], never)


def test_blocks_without_a_hash_are_reused_first_and_a_prompts_beginning_outlives_its_end() -> None:
    pool = BlockPool(8)
    first, second = pool.take(3), pool.take(3)
    pool.release(first, always)
    pool.release(second, lambda block: block != 6)
    assert pool.take(7) == [6, 7, 3, 2, 1, 5, 4]


def test_a_hit_takes_a_free_block_out_of_the_queue_with_its_place_in_use() -> None:
    pool = BlockPool(4)
    pool.release(pool.take(3), always)
    pool.share([3])
    pool.check_invariants([3], always)
    assert pool.take(2) == [2, 1]
    pool.share([3])
    assert pool.num_references(3) == 2
    pool.release([3], always)
    assert pool.num_free_blocks == 0
    pool.release([3], always)
    assert pool.num_free_blocks == 1


def test_a_released_scratch_block_is_the_next_one_taken() -> None:
    pool = BlockPool(6)
    blocks = pool.take(2)
    pool.release(blocks, never)
    assert pool.take(1) == [2]


@pytest.mark.parametrize(
    ("referenced", "complaint"),
    [([1], "references"), ([1, 2, 2], "references"), ([1, 2, 3], "references")],
)
def test_the_invariants_notice_a_reference_too_many_or_too_few(referenced: list[int], complaint: str) -> None:
    pool = BlockPool(5)
    pool.take(2)
    with pytest.raises(AssertionError, match=complaint):
        pool.check_invariants(referenced, never)


def test_the_invariants_notice_a_cached_block_before_one_that_is_not() -> None:
    with pytest.raises(AssertionError, match="a cached block is queued before"):
        BlockPool(5).check_invariants([], lambda block: block == 1)
