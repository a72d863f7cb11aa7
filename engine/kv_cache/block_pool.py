"""Reference-counted block ids. The free queue *is* the eviction order.

::

    taken from here                                                    appended here
    │                                                                              │
    ▼                                                                              ▼
    [ blocks without a hash │ cached blocks, least recently used … most recently used ]

A block is in the queue exactly when nobody references it. A cached block in the queue keeps its content until it is
taken, and a hit takes it out of the queue again. Order and reasons are those of vLLM v1's `FreeKVCacheBlockQueue`.
What a hash is, the pool does not know: it is told which blocks are cached.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence

from engine.kv_cache.spec import NULL_BLOCK
from engine.outputs import BlockId

IsCached = Callable[[BlockId], bool]


class BlockPool:
    """Hands out block ids and takes them back; block 0 is never handed out."""

    def __init__(self, num_blocks: int) -> None:
        """Own blocks 1 to `num_blocks - 1`, all free, in order of their ids."""
        self._num_references = [0] * num_blocks
        self._free: OrderedDict[BlockId, None] = OrderedDict.fromkeys(BlockId(i) for i in range(1, num_blocks))

    @property
    def num_blocks(self) -> int:
        """Blocks that can be handed out."""
        return len(self._num_references) - 1

    @property
    def num_free_blocks(self) -> int:
        """Blocks that nobody references, cached or not."""
        return len(self._free)

    @property
    def num_used_blocks(self) -> int:
        """Blocks that somebody references."""
        return self.num_blocks - len(self._free)

    def num_references(self, block: BlockId) -> int:
        """Return how many references `block` has."""
        return self._num_references[block]

    def take(self, num_blocks: int) -> list[BlockId]:
        """Remove `num_blocks` blocks from the front of the free queue and give each one reference.

        The caller must forget the hashes of blocks that were cached.

        Raises:
            ValueError: Fewer are free; the caller asks `num_free_blocks` first.
        """
        if num_blocks > len(self._free):
            raise ValueError(f"cannot take {num_blocks} blocks: {len(self._free)} of {self.num_blocks} are free")
        taken = [self._free.popitem(last=False)[0] for _ in range(num_blocks)]
        for block in taken:
            self._num_references[block] = 1
        return taken

    def share(self, blocks: Iterable[BlockId]) -> None:
        """Add one reference to each of `blocks`; a free one leaves the free queue with its content."""
        for block in blocks:
            if self._num_references[block] == 0:
                del self._free[block]
            self._num_references[block] += 1

    def release(self, blocks: Sequence[BlockId], is_cached: IsCached) -> None:
        """Drop one reference to each of `blocks`, given in table order.

        Those left without a reference are queued from the last to the first, so that a prompt's beginning outlives
        its end: cached ones behind all others, the rest in front, to be reused first.
        """
        scratch = []
        for block in reversed(blocks):
            self._num_references[block] -= 1
            if self._num_references[block] > 0:
                continue
            if is_cached(block):
                self._free[block] = None
            else:
                scratch.append(block)
        for block in reversed(scratch):
            self._free[block] = None
            self._free.move_to_end(block, last=False)

    def check_invariants(self, referenced: Iterable[BlockId], is_cached: IsCached) -> None:
        """Derive everything again from `referenced`, every reference there should be, and compare.

        Raises:
            AssertionError: Counts, queue or order are not what they must be.
        """
        expected = Counter(referenced)
        actual = {BlockId(i): count for i, count in enumerate(self._num_references) if count}
        assert actual == dict(expected), f"references {actual} are not those of tables and plans {dict(expected)}"
        assert NULL_BLOCK not in self._free, "the null block is in the free queue"
        assert NULL_BLOCK not in actual, "the null block is referenced"
        unreferenced = {i for i in range(1, len(self._num_references)) if not self._num_references[i]}
        assert unreferenced == set(self._free), f"free queue {set(self._free)} is not {unreferenced}"
        cached = [is_cached(block) for block in self._free]
        assert cached == sorted(cached), f"a cached block is queued before one that is not: {list(self._free)}"
