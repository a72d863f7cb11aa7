"""What changed in the set of prompt beginnings that can be hit, for who mirrors it, such as a cache-aware router.

Names and meanings are those of vLLM's KV events. A hash is stored when it can be hit for the first time and removed
when no block holds it any more: copies of a block make no events.
"""

from __future__ import annotations

import msgspec


class BlockStored(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """A run of blocks of one beginning can be hit from now on. Set by the prefix cache.

    Attributes:
        block_hashes: One a block, in table order.
        parent_block_hash: Hash of the block before the first; None at the beginning.
        token_ids: The tokens of the whole run.
        block_size: Tokens a block.
        group: Index of the KV cache group.
        adapter: Key of the adapter they were computed with.
    """

    block_hashes: list[bytes]
    parent_block_hash: bytes | None
    token_ids: list[int]
    block_size: int
    group: int = 0
    adapter: str | None = None


class BlockRemoved(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """These hashes cannot be hit any more. Set by the prefix cache."""

    block_hashes: list[bytes]
    group: int = 0


class AllBlocksCleared(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Nothing can be hit any more. Set by the prefix cache."""


KVCacheEvent = BlockStored | BlockRemoved | AllBlocksCleared
