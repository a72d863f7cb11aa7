"""Reference-counted block ids. The free queue *is* the eviction order.

::

    taken from here                                                    appended here
    │                                                                              │
    ▼                                                                              ▼
    [ blocks without a hash │ cached blocks, least recently used … most recently used ]

A block is in the queue exactly when nobody references it. A cached block in the queue keeps its content until it is
taken, and a hit takes it out of the queue again. Order and reasons are those of vLLM v1's `FreeKVCacheBlockQueue`.
What a hash is, the pool does not know: it is told which blocks are cached.

The queue is a ring through two arrays, so that it costs eight bytes a block and every move is O(1); the null block,
which is never handed out, is where the ring closes. Where a table has null blocks they are passed over.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

from engine.kv_cache.spec import NULL_BLOCK
from engine.outputs import BlockId

IsCached = Callable[[BlockId], bool]


class BlockPool:
    """Hands out block ids and takes them back; block 0 is never handed out.

    Attributes:
        num_blocks: Blocks that can be handed out.
        num_free_blocks: Blocks that nobody references, cached or not.
    """

    def __init__(self, num_blocks: int) -> None:
        """Own blocks 1 to `num_blocks - 1`, all free, in order of their ids."""
        self.num_blocks = self.num_free_blocks = num_blocks - 1
        self._num_references = array("i", bytes(4 * num_blocks))
        self._next = array("i", [*range(1, num_blocks), NULL_BLOCK])
        self._previous = array("i", [num_blocks - 1, *range(num_blocks - 1)])

    @property
    def num_used_blocks(self) -> int:
        """Blocks that somebody references."""
        return self.num_blocks - self.num_free_blocks

    def num_references(self, block: BlockId) -> int:
        """Return how many references `block` has."""
        return self._num_references[block]

    def references(self) -> npt.NDArray[np.int32]:
        """Return how many references each block has, `[num_blocks + 1]`, without a copy."""
        return np.frombuffer(self._num_references, dtype=np.int32)

    def free_blocks(self) -> Iterator[BlockId]:
        """Yield the free blocks in the order in which they will be taken."""
        block = self._next[NULL_BLOCK]
        while block != NULL_BLOCK:
            yield BlockId(block)
            block = self._next[block]

    def take(self, num_blocks: int) -> list[BlockId]:
        """Remove `num_blocks` blocks from the front of the free queue and give each one reference.

        The caller must forget the hashes of blocks that were cached.

        Raises:
            ValueError: Fewer are free; the caller asks `num_free_blocks` first.
        """
        if num_blocks > self.num_free_blocks:
            raise ValueError(f"cannot take {num_blocks} blocks: {self.num_free_blocks} of {self.num_blocks} are free")
        taken = []
        block = self._next[NULL_BLOCK]
        for _ in range(num_blocks):
            taken.append(BlockId(block))
            self._num_references[block] = 1
            block = self._next[block]
        self._link(NULL_BLOCK, block)
        self.num_free_blocks -= num_blocks
        return taken

    def share(self, blocks: Iterable[BlockId]) -> None:
        """Add one reference to each of `blocks`; a free one leaves the free queue with its content."""
        for block in blocks:
            if block == NULL_BLOCK:
                continue
            if self._num_references[block] == 0:
                self._link(self._previous[block], self._next[block])
                self.num_free_blocks -= 1
            self._num_references[block] += 1

    def release(self, blocks: Sequence[BlockId], is_cached: IsCached) -> None:
        """Drop one reference to each of `blocks`, given in table order.

        Those left without a reference are queued from the last to the first, so that a prompt's beginning outlives
        its end: cached ones behind all others, the rest in front, to be reused first.
        """
        scratch = []
        for block in reversed(blocks):
            if block == NULL_BLOCK:
                continue
            self._num_references[block] -= 1
            if self._num_references[block] > 0:
                continue
            self.num_free_blocks += 1
            if is_cached(block):
                self._link(self._previous[NULL_BLOCK], block)
                self._link(block, NULL_BLOCK)
            else:
                scratch.append(block)
        for block in reversed(scratch):
            self._link(block, self._next[NULL_BLOCK])
            self._link(NULL_BLOCK, block)

    def _link(self, block: int, following: int) -> None:
        self._next[block] = following
        self._previous[following] = block

    def check_invariants(self, referenced: Iterable[BlockId], is_cached: IsCached) -> None:
        """Derive everything again from `referenced`, every reference there should be, and compare.

        Raises:
            AssertionError: Counts, queue or order are not what they must be.
        """
        actual, following = self._num_references.tolist(), self._next.tolist()
        expected = [0] * len(actual)
        for used in referenced:
            expected[used] += 1
        assert actual == expected, f"references {actual} are not those of tables and plans {expected}"
        assert actual[NULL_BLOCK] == 0, "the null block is referenced"
        free, block = [], following[NULL_BLOCK]
        for _ in actual:  # the last time around there is nothing left
            if block == NULL_BLOCK:
                break
            free.append(block)
            block = following[block]
        assert block == NULL_BLOCK, f"the free queue never ends: {free}"
        assert len(free) == self.num_free_blocks, f"{self.num_free_blocks} blocks are counted free, {len(free)} are"
        assert len(free) == actual.count(0) - 1, f"{len(free)} blocks are free, some of the others have no reference"
        assert not any(map(actual.__getitem__, free)), f"one of {free} is in use and in the free queue"
        cached = [*map(is_cached, free)]
        assert cached == sorted(cached), f"a cached block is queued before one that is not: {free}, {cached}"
        before = [*map(self._previous.__getitem__, (*free, NULL_BLOCK))]
        assert before == [NULL_BLOCK, *free], f"the free queue {free} is {before} when read backwards"
