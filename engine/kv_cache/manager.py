"""The KV cache as the scheduler sees it: match, admit, grow, publish, retract, release.

Who holds what::

    waiting, ended     nothing
    running            one reference to each block of its table
    a plan in flight   the blocks of its rows: a request that leaves meanwhile passes its references on to the newest
                       plan with a row of it, and they are dropped when that plan is settled

So a block that a plan names is never handed out again before the plan's end, and a block that an uncommitted step
published always has a reference. Tables are tuples of groups; today there is one group, whose layers all see the
whole context.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from engine.kv_cache.block_pool import BlockPool
from engine.kv_cache.prefix_cache import PrefixCache
from engine.kv_cache.spec import num_blocks_for
from engine.outputs import BlockId, RequestId, TokenArray
from engine.request import AppendOnlyArray, Request


class Match(NamedTuple):
    """The beginning of a request that is in the cache; holds no reference.

    Attributes:
        blocks: Its blocks, in table order.
        num_tokens: The tokens they hold.
    """

    blocks: list[BlockId]
    num_tokens: int


class _Table:
    """The blocks of one running request; `num_published` of them went to the prefix cache or came from it."""

    __slots__ = ("array", "blocks", "num_published")

    def __init__(self, blocks: list[BlockId]) -> None:
        self.blocks = list(blocks)
        self.array = AppendOnlyArray(blocks)
        self.num_published = len(blocks)

    def extend(self, blocks: list[BlockId]) -> None:
        self.blocks += blocks
        for block in blocks:
            self.array.append(block)


class KVCacheManager:
    """All that the scheduler may ask of the cache. Every refusal leaves everything as it was."""

    def __init__(self, num_blocks: int, block_size: int, *, enable_prefix_caching: bool, hash_salt: bytes) -> None:
        """Manage blocks 1 to `num_blocks - 1`, of `block_size` tokens each."""
        self.block_size = block_size
        self.pool = BlockPool(num_blocks)
        self.prefix_cache = PrefixCache(num_blocks, block_size, hash_salt)
        self._enable_prefix_caching = enable_prefix_caching
        self._tables: dict[RequestId, _Table] = {}
        self._held: dict[int, dict[RequestId, list[BlockId]]] = {}

    @property
    def has_held_blocks(self) -> bool:
        """Whether plans in flight hold blocks that their requests gave back."""
        return bool(self._held)

    def match(self, request: Request) -> Match:
        """Find the longest cached beginning of the request's tokens; changes nothing.

        At least one token is left to compute, for its logits are needed: a fully cached request computes its last
        block again, into a block of its own.
        """
        if not self._enable_prefix_caching:
            return Match([], 0)
        max_blocks = (request.num_tokens - 1) // self.block_size
        blocks = self.prefix_cache.match(self.prefix_cache.hashes(request)[:max_blocks])
        return Match(blocks, len(blocks) * self.block_size)

    def admit(self, request: Request, match: Match, num_tokens: int) -> bool:
        """Give `request` a table: the matched blocks, shared, and new ones for its first `num_tokens` tokens.

        Refused unless all its tokens would fit in what is free now, though only the first are taken: who starts
        should be able to reach its first token.
        """
        num_rescued = sum(self.pool.num_references(block) == 0 for block in match.blocks)
        num_free = self.pool.num_free_blocks - num_rescued
        if num_blocks_for(request.num_tokens, self.block_size) - len(match.blocks) > num_free:
            return False
        self.pool.share(match.blocks)  # before any new block is taken, lest a matched one be handed out
        self._tables[request.request_id] = _Table(match.blocks)
        return self.grow(request, num_tokens)

    def grow(self, request: Request, num_tokens: int) -> bool:
        """Extend the request's table to hold `num_tokens` tokens, or refuse where too few blocks are free."""
        table = self._tables[request.request_id]
        num_new = num_blocks_for(num_tokens, self.block_size) - len(table.blocks)
        if num_new > self.pool.num_free_blocks:
            return False
        if num_new > 0:
            blocks = self.pool.take(num_new)
            self.prefix_cache.forget(blocks)
            table.extend(blocks)
        return True

    def publish(self, request: Request, step: int) -> None:
        """Let others hit the blocks that are full once `step` has run and whose tokens are all known."""
        if not self._enable_prefix_caching:
            return
        table = self._tables[request.request_id]
        num_full = min(request.num_computed_tokens, request.num_tokens) // self.block_size
        if num_full <= table.num_published:
            return
        hashes = self.prefix_cache.hashes(request)
        for index in range(table.num_published, num_full):
            self.prefix_cache.publish(table.blocks[index], hashes[index], step)
        table.num_published = num_full

    def block_tables(self, request: Request) -> tuple[TokenArray, ...]:
        """Return the request's table, one read-only view a group, `[num_blocks]`."""
        return (self._tables[request.request_id].array.view(),)

    def retract(self) -> set[BlockId]:
        """Forget what uncommitted steps published, and return it; the caller rewinds who relies on it."""
        return self.prefix_cache.retract()

    def rewind(self, request: Request) -> None:
        """Publish again, from the request's `num_computed_tokens` on, what `retract` took back."""
        table = self._tables[request.request_id]
        table.num_published = min(table.num_published, request.num_computed_tokens // self.block_size)

    def relies_on(self, request: Request, blocks: set[BlockId]) -> bool:
        """Whether one of `blocks` holds tokens that `request` takes as computed."""
        num_full = request.num_computed_tokens // self.block_size
        return not blocks.isdisjoint(self._tables[request.request_id].blocks[:num_full])

    def forget(self, request: Request) -> None:
        """Let nobody hit the blocks of `request`, which a plan in flight names: they are not to be trusted."""
        held = self._held.get(request.last_step, {}).get(request.request_id, [])
        table = self._tables.get(request.request_id)
        self.prefix_cache.forget(held if table is None else table.blocks)

    def release(self, request: Request, held_until: int | None) -> None:
        """Take the request's table; its references end now, or once the step `held_until` is settled.

        A request without a table holds nothing, and nothing happens.
        """
        table = self._tables.pop(request.request_id, None)
        if table is None:
            return
        if held_until is None:
            self.pool.release(table.blocks, self.prefix_cache.holds)
        else:
            self._held.setdefault(held_until, {})[request.request_id] = table.blocks

    def settle(self, step: int) -> None:
        """The plan of `step` has ended: its publications stand, and what it held is given back."""
        self.prefix_cache.commit(step)
        for blocks in self._held.pop(step, {}).values():
            self.pool.release(blocks, self.prefix_cache.holds)

    def reset_prefix_cache(self) -> None:
        """Forget all cached beginnings; tables and plans in flight keep their blocks."""
        self.prefix_cache.clear()

    def check_invariants(self, running: list[Request]) -> None:
        """Check pool, cache and tables against each other and against who runs.

        Raises:
            AssertionError: Something leaked, or is owned twice.
        """
        assert self._tables.keys() == {request.request_id for request in running}, "tables are not those of who runs"
        self.prefix_cache.check_invariants()
        self.pool.check_invariants(self._references(), self.prefix_cache.holds)
        for request in running:
            table = self._tables[request.request_id]
            assert table.blocks == table.array.view().tolist(), f"{request}: table and its view differ"
            assert len(table.blocks) * self.block_size >= request.num_computed_tokens, f"{request}: table is too short"

    def _references(self) -> Iterator[BlockId]:
        for table in self._tables.values():
            yield from table.blocks
        for held in self._held.values():
            for blocks in held.values():
                yield from blocks
