"""Which block holds the K/V of which beginning: chained hashes of full blocks.

A block's hash covers its own tokens, its keys and, through its parent's hash, all that stands before it::

    hash(block i) = sha256(hash(block i - 1) · its tokens, packed int32 · its keys)      hash(block -1) = sha256(salt)

Parent and tokens have a fixed size and every key bears its kind, so that two different beginnings never hash the same
bytes. Equal blocks computed twice are both kept; the first is hit, the others step in when it is evicted.

A publication bears the step whose plan computes the block. Until that step is committed it can be retracted, and the
block cannot be evicted, for the plan holds a reference to it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

from engine.outputs import BlockId
from engine.request import Request


class PrefixCache:
    """Hash → block id and back; owns no block and no reference."""

    def __init__(self, num_blocks: int, block_size: int, salt: bytes) -> None:
        """Start empty, for block ids below `num_blocks` of `block_size` tokens. Only equal salts give equal hashes."""
        self._block_size = block_size
        self._root = hashlib.sha256(salt).digest()
        self._hash_of: list[bytes | None] = [None] * num_blocks
        self._block_of: dict[bytes, BlockId] = {}
        self._twins: dict[bytes, list[BlockId]] = {}
        self._published: dict[int, list[BlockId]] = {}

    def hashes(self, request: Request) -> list[bytes]:
        """Return the hash of each full block of the request's tokens; each is computed once in its life."""
        hashes, size = request.block_hashes, self._block_size
        tokens = request.tokens.view()
        for index in range(len(hashes), len(tokens) // size):
            digest = hashlib.sha256(hashes[-1] if hashes else self._root)
            digest.update(tokens[index * size : (index + 1) * size].tobytes())
            digest.update(_keys(request, index))
            hashes.append(digest.digest())
        return hashes

    def match(self, hashes: Iterable[bytes]) -> list[BlockId]:
        """Return the blocks of the longest known beginning of `hashes`; nothing is referenced or changed."""
        blocks = []
        for block_hash in hashes:
            block = self._block_of.get(block_hash)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def holds(self, block: BlockId) -> bool:
        """Whether `block` can be hit, or could once its first twin is gone."""
        return self._hash_of[block] is not None

    def publish(self, block: BlockId, block_hash: bytes, step: int) -> None:
        """Let `block`, which the plan of `step` completes, be hit under `block_hash` from now on."""
        self._hash_of[block] = block_hash
        if self._block_of.setdefault(block_hash, block) != block:
            self._twins.setdefault(block_hash, []).append(block)
        self._published.setdefault(step, []).append(block)

    def commit(self, step: int) -> None:
        """The blocks published by `step` are computed: they stay until evicted."""
        self._published.pop(step, None)

    def retract(self) -> set[BlockId]:
        """Forget all that uncommitted steps published and return those blocks, also the ones forgotten since.

        They may have been hit before they were forgotten.
        """
        retracted = {block for blocks in self._published.values() for block in blocks}
        self._published.clear()
        self.forget(retracted)
        return retracted

    def forget(self, blocks: Iterable[BlockId]) -> None:
        """Let `blocks` not be hit any more; unknown ones are ignored."""
        for block in blocks:
            block_hash = self._hash_of[block]
            if block_hash is None:
                continue
            self._hash_of[block] = None
            twins = self._twins.get(block_hash, [])
            if self._block_of[block_hash] != block:
                twins.remove(block)
            elif twins:
                self._block_of[block_hash] = twins.pop(0)
            else:
                del self._block_of[block_hash]
            if block_hash in self._twins and not twins:
                del self._twins[block_hash]

    def clear(self) -> None:
        """Forget everything."""
        self._hash_of = [None] * len(self._hash_of)
        self._block_of.clear()
        self._twins.clear()
        self._published.clear()

    def check_invariants(self) -> None:
        """Check that both directions agree, so that entries never outnumber blocks.

        Raises:
            AssertionError: They do not.
        """
        entries = list(self._block_of.items())
        for block_hash, twins in self._twins.items():
            assert twins, "an empty list of twins is kept"
            assert block_hash in self._block_of, f"twins {twins} of a hash that no block is hit under"
            entries += [(block_hash, block) for block in twins]
        hashed = [(block_hash, BlockId(i)) for i, block_hash in enumerate(self._hash_of) if block_hash is not None]
        assert sorted(entries) == sorted(hashed), "the map of hashes and the hashes of blocks disagree"


def _keys(request: Request, index: int) -> bytes:
    """Return what separates block `index` beside its tokens; adapter and media will be further kinds."""
    if index == 0 and request.cache_salt is not None:
        return b"cache_salt\0" + request.cache_salt.encode(errors="surrogatepass")
    return b""
