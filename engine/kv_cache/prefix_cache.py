"""Which block holds the K/V of which beginning: chained hashes of full blocks.

A block's hash covers its own tokens, its keys and, through its parent's hash, all that stands before it::

    hash(block i) = sha256(hash(block i - 1) · its tokens, packed int32 · its keys)      hash(block -1) = sha256(salt)

Parent and tokens have a fixed size, every key bears its kind and its length, so that two different beginnings never
hash the same bytes. Equal blocks computed twice are both kept; the first is hit, the others step in when it is
evicted. Each KV cache group has its own entries: the hash followed by the group's index, but for the first group.

A publication bears the step whose plan computes the block, or a later one where its tokens were late. Until that step
is committed it can be retracted, and the block cannot be evicted before it is computed, for a plan holds a reference.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, KeysView, Sequence
from itertools import groupby

from engine.kv_cache.events import AllBlocksCleared, BlockRemoved, BlockStored, KVCacheEvent
from engine.outputs import BlockId
from engine.request import Request

HASH_SIZE_BYTES = hashlib.sha256().digest_size


class PrefixCache:
    """Hash → block id and back; owns no block and no reference.

    Attributes:
        num_changes: Grows with every publication and whenever a block is forgotten: in between, matches stay the same.
    """

    def __init__(self, num_blocks: int, block_size: int, salt: bytes, *, records_events: bool = False) -> None:
        """Start empty, for block ids below `num_blocks` of `block_size` tokens. Only equal salts give equal hashes."""
        self._block_size = block_size
        self._root = hashlib.sha256(salt).digest()
        self._key_of: list[bytes | None] = [None] * num_blocks
        self._block_of: dict[bytes, BlockId] = {}
        self._twins: dict[bytes, list[BlockId]] = {}
        self._published: dict[int, list[BlockId]] = {}
        self._events: list[KVCacheEvent] | None = [] if records_events else None
        self.num_changes = 0

    def hashes(self, request: Request) -> list[bytes]:
        """Return the hash of each full block of the request's tokens; each is computed once in its life."""
        hashes, size = request.block_hashes, self._block_size
        num_full = len(request.tokens) // size
        if num_full == len(hashes):
            return hashes
        tokens = request.tokens.view()
        parent = hashes[-1] if hashes else self._root
        for index in range(len(hashes), num_full):
            content = parent + tokens[index * size : (index + 1) * size].tobytes()
            for kind, key in _keys(request, index, size):
                content += b"%b\0%d\0%b" % (kind, len(key), key)
            parent = hashlib.sha256(content).digest()
            hashes.append(parent)
        return hashes

    def find(self, block_hash: bytes, group: int = 0) -> BlockId | None:
        """Return the block that can be hit under `block_hash` in `group`; nothing is referenced or changed."""
        return self._block_of.get(block_hash + _suffix(group))

    def match(self, hashes: Iterable[bytes], group: int = 0) -> list[BlockId]:
        """Return the blocks of the longest known beginning of `hashes`; nothing is referenced or changed."""
        blocks, suffix = [], _suffix(group)
        for block_hash in hashes:
            block = self._block_of.get(block_hash + suffix)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def holds(self, block: BlockId) -> bool:
        """Whether `block` can be hit, or could once its first twin is gone."""
        return self._key_of[block] is not None

    def publish(self, request: Request, first: int, blocks: Sequence[BlockId], step: int, group: int = 0) -> None:
        """Let `blocks`, full ones of `request` from its `first` on, be hit from now on; `step` completes them."""
        self.num_changes += 1
        hashes = self.hashes(request)[first : first + len(blocks)]
        new: list[int] = []
        suffix = _suffix(group)
        for index, (block, block_hash) in enumerate(zip(blocks, hashes, strict=True), start=first):
            key = block_hash + suffix
            self._key_of[block] = key
            if self._block_of.setdefault(key, block) != block:
                self._twins.setdefault(key, []).append(block)
            elif self._events is not None:
                new.append(index)
        self._published.setdefault(step, []).extend(blocks)
        if self._events is not None and new:
            runs = groupby(enumerate(new), key=lambda place: place[1] - place[0])
            self._events += [self._stored(request, [index for _, index in run], group) for _, run in runs]

    @property
    def uncommitted_steps(self) -> KeysView[int]:
        """Steps whose publications can still be retracted."""
        return self._published.keys()

    def commit(self, step: int) -> None:
        """The blocks published by `step` are computed: they stay until evicted."""
        self._published.pop(step, None)

    def retract(self, is_free: Callable[[BlockId], bool]) -> set[BlockId]:
        """Forget what uncommitted steps published and return those blocks, also the ones forgotten since.

        They may have been hit before they were forgotten. Free ones were given back because they had been computed.
        """
        retracted = {block for blocks in self._published.values() for block in blocks if not is_free(block)}
        self._published.clear()
        self.forget(retracted)
        return retracted

    def forget(self, blocks: Iterable[BlockId]) -> None:
        """Let `blocks` not be hit any more; unknown ones are ignored."""
        for block in blocks:
            key = self._key_of[block]
            if key is None:
                continue
            self.num_changes += 1
            self._key_of[block] = None
            twins = self._twins.get(key)
            if twins is None:
                del self._block_of[key]
                if self._events is not None:
                    self._events.append(BlockRemoved([key[:HASH_SIZE_BYTES]], _group_of(key)))
                continue
            if self._block_of[key] != block:
                twins.remove(block)
            else:
                self._block_of[key] = twins.pop(0)
            if not twins:
                del self._twins[key]

    def clear(self) -> None:
        """Forget everything."""
        self.num_changes += 1
        self._key_of = [None] * len(self._key_of)
        self._block_of.clear()
        self._twins.clear()
        self._published.clear()
        if self._events is not None:
            self._events.append(AllBlocksCleared())

    def take_events(self) -> list[KVCacheEvent]:
        """Return what changed since the last call, in order; always empty unless events are recorded."""
        if not self._events:
            return []
        events, self._events = self._events, []
        return events

    def check_invariants(self) -> None:
        """Check that both directions agree, so that entries never outnumber blocks.

        Raises:
            AssertionError: They do not.
        """
        num_entries, hit = len(self._block_of), self._block_of.values()
        own = [*map(self._key_of.__getitem__, hit)]
        assert own == [*self._block_of], f"one of {hit} is hit under a hash that is not its own"
        for key, twins in self._twins.items():
            assert twins, "an empty list of twins is kept"
            assert key in self._block_of, f"twins {twins} of a hash that no block is hit under"
            assert all(self._key_of[block] == key for block in twins), f"one of {twins} has another hash"
            assert len({self._block_of[key], *twins}) == 1 + len(twins), f"one of {twins} is entered twice"
            num_entries += len(twins)
        num_keyed = len(self._key_of) - self._key_of.count(None)
        assert num_entries == num_keyed, f"{num_entries} entries for {num_keyed} blocks with a hash"

    def _stored(self, request: Request, indexes: list[int], group: int) -> BlockStored:
        """Return the event of a run of the request's blocks."""
        first, end, size = indexes[0], indexes[-1] + 1, self._block_size
        token_ids = request.tokens.view()[first * size : end * size].tolist()
        parent = request.block_hashes[first - 1] if first else None
        return BlockStored(request.block_hashes[first:end], parent, token_ids, size, group, request.adapter_key)


def _suffix(group: int) -> bytes:
    return group.to_bytes(2, "big") if group else b""


def _group_of(key: bytes) -> int:
    return int.from_bytes(key[HASH_SIZE_BYTES:], "big")


def _keys(request: Request, index: int, block_size: int) -> Iterator[tuple[bytes, bytes]]:
    """Yield the kind and value of each thing that separates block `index` beside its tokens."""
    if index == 0 and request.cache_salt is not None:
        yield b"cache_salt", request.cache_salt.encode(errors="surrogatepass")
    if request.adapter_key is not None:
        yield b"adapter", request.adapter_key.encode(errors="surrogatepass")
    begin, end = index * block_size, (index + 1) * block_size
    for media in request.media:
        if media.offset < end and begin < media.offset + media.length:
            yield b"media", b"%d\0%b" % (media.offset - begin, media.identifier.encode(errors="surrogatepass"))
