"""How much of a beginning is cached, over groups that need different parts of it.

To go on from position p, a group that sees everything needs all blocks before p; one with a window needs only those
that the window still reaches::

    full      ■ ■ ■ ■ ■ ■ │ p        scanned from the left up to the first gap
    window    · · · · ■ ■ │ p        scanned from the right for the last run that is long enough

Each group can only shorten what the others allow, so asking them in turn until nothing changes ends at the longest
beginning that suits all. Rule and order are those of vLLM v1's hybrid KV cache coordinator.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from engine.kv_cache.prefix_cache import PrefixCache
from engine.kv_cache.spec import NULL_BLOCK, num_blocks_for, num_skipped_blocks
from engine.outputs import BlockId, KVCacheGroup


class Match(NamedTuple):
    """The beginning of a request that is in the cache; holds no reference.

    Attributes:
        blocks: For each group its blocks in table order, null blocks where a window does not reach.
        num_tokens: The tokens they hold.
    """

    blocks: tuple[list[BlockId], ...]
    num_tokens: int


def longest_match(
    cache: PrefixCache, groups: Sequence[KVCacheGroup], hashes: Sequence[bytes], block_size: int
) -> Match:
    """Find the longest cached beginning of `hashes`, the hashes of a request's full blocks; changes nothing."""
    full: dict[int, list[BlockId]] = {}
    length = len(hashes)
    for index, group in enumerate(groups):
        if group.sliding_window is None:
            full[index] = cache.match(hashes[:length], index)
            length = len(full[index])
    windows = {
        index: num_blocks_for(group.sliding_window - 1, block_size)
        for index, group in enumerate(groups)
        if group.sliding_window is not None
    }
    found = {index: [cache.find(block_hash, index) for block_hash in hashes[:length]] for index in windows}
    previous = None
    while windows and length != previous:
        previous = length
        for index, num_needed in windows.items():
            length = longest_run([block is not None for block in found[index][:length]], num_needed)
    num_tokens = length * block_size
    blocks = [
        full[index][:length]
        if index in full
        else _null_before(num_skipped_blocks(group, num_tokens, block_size), found[index][:length])
        for index, group in enumerate(groups)
    ]
    return Match(tuple(blocks), num_tokens)


def longest_run(is_cached: Sequence[bool], num_needed: int) -> int:
    """Return the greatest length whose last `num_needed` blocks are cached, or all where the length is less.

    The scan goes from right to left and ends at the first run that is long enough.
    """
    if num_needed == 0:
        return len(is_cached)
    run = 0
    for index in range(len(is_cached) - 1, -1, -1):
        run = run + 1 if is_cached[index] else 0
        if run >= num_needed:
            return index + run
    return run


def _null_before(num_skipped: int, blocks: Sequence[BlockId | None]) -> list[BlockId]:
    reached = [block for block in blocks[num_skipped:] if block is not None]
    num_null = min(num_skipped, len(blocks))
    assert num_null + len(reached) == len(blocks), "a block that the window reaches is not cached"
    return [BlockId(NULL_BLOCK)] * num_null + reached
