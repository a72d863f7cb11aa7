"""The KV cache as the scheduler sees it: match, has_room, admit, grow, publish, retract, release.

Who holds what::

    waiting, ended     nothing
    running            one reference to each block of its tables
    a plan in flight   the blocks of its rows: a request that leaves meanwhile passes its references on to the newest
                       plan with a row of it, and they are dropped when that plan is settled

Who is admitted is promised the blocks for all its tokens, though it takes them chunk by chunk: nobody else is admitted
on them. Only who runs already may grow into them.

So a block that a plan names is never handed out again before the plan's end, and a block that an uncommitted step
computes always has a reference. A request has one table a group; in a group with a window the blocks behind it are
given back as soon as no uncommitted step can read them, and the table has null blocks in their place.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import takewhile

import numpy as np

from engine.kv_cache.block_pool import BlockPool
from engine.kv_cache.block_tables import BlockTable, BlockTables
from engine.kv_cache.match import Match, longest_match
from engine.kv_cache.prefix_cache import PrefixCache
from engine.kv_cache.spec import NULL_BLOCK, max_blocks_for, num_blocks_for, num_skipped_blocks
from engine.outputs import BlockId, KVCacheGroup, RequestId, ScheduledRequest
from engine.request import Request, Shortage

ALL_LAYERS = (KVCacheGroup(layers=(0,)),)


class KVCacheManager:
    """All that the scheduler may ask of the cache. Every refusal leaves everything as it was."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        enable_prefix_caching: bool,
        hash_salt: bytes,
        groups: Sequence[KVCacheGroup] = ALL_LAYERS,
        max_in_flight: int = 1,
        records_events: bool = False,
    ) -> None:
        """Manage blocks 1 to `num_blocks - 1`, of `block_size` tokens each.

        At most `max_in_flight` tokens of a request are uncommitted at a time. `num_changes` grows whenever somebody is
        admitted or blocks are given back: in between, all that victims could free grows by nothing.
        """
        self.block_size = block_size
        self.pool = BlockPool(num_blocks)
        self.prefix_cache = PrefixCache(num_blocks, block_size, hash_salt, records_events=records_events)
        self._enable_prefix_caching = enable_prefix_caching
        self._groups = tuple(groups)
        self._windowed = [(i, group) for i, group in enumerate(groups) if group.sliding_window is not None]
        self._max_in_flight = max_in_flight
        self._num_promised = 0
        self._num_common: tuple[int, ...] | None = None
        self._matched: tuple[tuple[Request, int, int], Match] | None = None
        self.num_changes = 0
        self._tables: dict[RequestId, BlockTables] = {}
        self._held: dict[int, dict[RequestId, BlockTables]] = {}

    @property
    def has_held_blocks(self) -> bool:
        """Whether plans in flight hold blocks that their requests gave back."""
        return bool(self._held)

    @property
    def awaited_steps(self) -> set[int]:
        """Steps in flight that have published something, or hold blocks that their requests gave back."""
        return {*self.prefix_cache.uncommitted_steps, *self._held}

    @property
    def num_available_blocks(self) -> int:
        """Free blocks that are promised to nobody; negative while those who run have grown into what is promised."""
        return self.pool.num_free_blocks - self._num_promised

    def max_blocks(self, num_tokens: int) -> int:
        """Return the most blocks that a request of `num_tokens` tokens ever holds."""
        return max_blocks_for(self._groups, num_tokens, self.block_size, self._max_in_flight)

    def num_blocks(self, request: Request) -> int:
        """Return how many blocks a running request holds or is promised, shared ones included."""
        tables = self._tables[request.request_id]
        return len(tables.blocks_in_use) + tables.num_promised

    # A request comes

    def match(self, request: Request) -> Match:
        """Find the longest cached beginning of the request's tokens; changes nothing.

        At least one token is left to compute, for its logits are needed: a fully cached request computes its last
        block again, into a block of its own.
        """
        asked = request, request.num_tokens, self.prefix_cache.num_changes
        if self._matched is None or self._matched[0] != asked:
            self._matched = asked, self.new_match(request)
        return self._matched[1]

    def new_match(self, request: Request) -> Match:
        """Find what `match` finds, whatever is kept, and keep nothing."""
        if not self._enable_prefix_caching or not request.reads_prefix_cache:
            return Match(tuple([] for _ in self._groups), 0)
        max_blocks = (request.num_tokens - 1) // self.block_size
        hashes = self.prefix_cache.hashes(request)[:max_blocks]
        return longest_match(self.prefix_cache, self._groups, hashes, self.block_size)

    def forget_match(self, request: Request) -> None:
        """Let go of `request`, which has ended, where its match is kept."""
        if self._matched is not None and self._matched[0][0] is request:
            self._matched = None

    def is_short(self, request: Request, num_reserved: int, max_new: int | None) -> bool:
        """Whether `has_room`, which refused before, would refuse again; O(1), for it is asked in every step.

        `num_reserved` is negative where as many blocks more might become free.
        """
        shortage = request.shortage
        if shortage is None:
            return False
        lacks_tokens = max_new is not None and shortage.num_new > max_new
        if not lacks_tokens and not self.lacks_blocks(request, num_reserved):
            return False
        if shortage.free_hit is not None and self.pool.num_references(shortage.free_hit) > 0:
            return False
        return shortage.next_block is None or self.prefix_cache.find(*shortage.next_block) is None

    def lacks_blocks(self, request: Request, num_reserved: int) -> bool:
        """Whether `has_room` refused before and there are still too few blocks for what `match` had found; O(1)."""
        shortage = request.shortage
        return shortage is not None and shortage.num_blocks + num_reserved > self.num_available_blocks

    def has_room(self, request: Request, match: Match, num_reserved: int = 0, max_new: int | None = None) -> bool:
        """Whether `request` can start behind `match`: all its tokens must fit in what is free.

        It is asked before `admit`, which takes nothing yet: who starts should be able to reach its first token. A
        refusal is remembered in `request.shortage`.

        Args:
            request: Without tables.
            match: What `match` found for it.
            num_reserved: Blocks to leave free.
            max_new: Tokens that can be computed in this step, where they must be computed at once.
        """
        hits = self._shareable(match)
        is_used = [self.pool.num_references(block) > 0 for block in hits]
        num_needed = self.max_blocks(request.num_tokens) - sum(is_used)
        num_new = request.num_tokens - match.num_tokens
        has_room = num_needed + num_reserved <= self.num_available_blocks and (max_new is None or num_new <= max_new)
        free_hit = None if all(is_used) else hits[is_used.index(False)]
        next_block = None if has_room else self._next_block(request, match)
        request.shortage = None if has_room else Shortage(num_needed, num_new, next_block, free_hit)
        return has_room

    def num_due(self, request: Request, num_more: int) -> int:
        """Return how many blocks beyond those it was promised a running request takes with `num_more` more tokens."""
        tables = self._tables[request.request_id]
        num_tokens = min(request.num_tokens + request.num_placeholders + num_more, request.max_num_tokens - 1)
        if num_tokens <= tables.num_slots:
            return 0
        num_new = num_blocks_for(num_tokens - tables.num_slots, self.block_size) * len(self._groups)
        return max(0, num_new - tables.num_promised)

    def num_victims(
        self, request: Request, match: Match, victims: Sequence[Request], num_reserved: Sequence[int]
    ) -> int | None:
        """Return how many of `victims`, in order, must leave before `request` has room behind `match`.

        None where all of them are not enough. A block is free once the last who uses it has left; what the victims
        were promised is free too, and what `request` would have shared with them alone it must take itself.

        Args:
            request: Who waits.
            match: What `match` found for it.
            victims: Who may have to leave.
            num_reserved: Blocks to leave free once none, one, two, … all of them have left; never more than before.
        """
        hits = {*self._shareable(match)}
        num_needed = self.max_blocks(request.num_tokens)
        num_needed -= sum(self.pool.num_references(block) > 0 for block in hits)
        num_free, left = self.num_available_blocks, Counter[BlockId]()
        if num_needed + num_reserved[-1] > num_free + self._num_gained(victims, hits):
            return None
        for count, victim in enumerate(victims):
            if num_needed + num_reserved[count] <= num_free:
                return count
            tables = self._tables[victim.request_id]
            num_free += tables.num_promised
            for block in tables.blocks_in_use:
                left[block] += 1
                if left[block] == self.pool.num_references(block):
                    num_free += 1
                    num_needed += block in hits
        return len(victims) if num_needed + num_reserved[-1] <= num_free else None

    def _num_gained(self, victims: Sequence[Request], hits: set[BlockId]) -> int:
        """Return how many more blocks one has that would share `hits`, once all of `victims` have left.

        It is asked in vain again and again while one waits, so it looks at no block by itself, nor at anybody else's.
        """
        tables = [self._tables[victim.request_id] for victim in victims]
        if not tables:
            return 0
        blocks = np.concatenate([view for of_one in tables for view in of_one.views])
        used, num_uses = np.unique(blocks[blocks != NULL_BLOCK], return_counts=True)
        freed = used[num_uses == self.pool.references()[used]]
        num_lost = len(hits.intersection(freed.tolist())) if hits else 0
        return sum(of_one.num_promised for of_one in tables) + len(freed) - num_lost

    def _shareable(self, match: Match) -> list[BlockId]:
        """Return the matched blocks that cost nothing while others use them: not those that a window will give back."""
        pairs = zip(self._groups, match.blocks, strict=True)
        return [block for group, blocks in pairs if group.sliding_window is None for block in blocks]

    def admit(self, request: Request, match: Match) -> None:
        """Give `request` tables that begin with the matched blocks, shared; `grow` extends them."""
        tables = self._tables[request.request_id] = BlockTables(match.blocks, self.block_size, request.num_tokens)
        self._num_common = None
        self.num_changes += 1
        for blocks in match.blocks:
            self.pool.share(blocks)
        self._promise(tables)

    def _next_block(self, request: Request, match: Match) -> tuple[bytes, int] | None:
        index = match.num_tokens // self.block_size
        max_blocks = (request.num_tokens - 1) // self.block_size
        if index >= min(max_blocks, len(request.block_hashes)):
            return None
        block_hash = request.block_hashes[index]
        groups = range(len(self._groups))
        return next(
            ((block_hash, group) for group in groups if self.prefix_cache.find(block_hash, group) is None), None
        )

    # A request goes on

    def grow(self, request: Request, num_tokens: int) -> BlockTables | None:
        """Extend the request's tables to hold `num_tokens` tokens and return them; None where too few blocks are free.

        Called for each row of each step, and so there is no other way to the tables of a row.
        """
        tables = self._tables[request.request_id]
        if num_tokens <= tables.num_slots:
            return tables
        for index, group in self._windowed:
            self._skip(tables.of_group[index], num_skipped_blocks(group, request.num_processed_tokens, self.block_size))
        num_new = num_blocks_for(num_tokens - tables.num_slots, self.block_size)
        has_room = num_new * len(self._groups) <= self.pool.num_free_blocks
        for table in tables.of_group if has_room else ():
            blocks = self.pool.take(num_new)
            self.prefix_cache.forget(blocks)
            table.extend(blocks)
        tables.refresh()
        self._promise(tables)
        return tables if has_room else None

    def _promise(self, tables: BlockTables) -> None:
        """Count what is still to be taken for the tokens at admission: the tables are new, or have changed.

        What a window shares with others is no part of it: it is not free once the window has passed.
        """
        num_left = 0
        if tables.num_slots < tables.num_tokens:
            num_left = self.max_blocks(tables.num_tokens) - len(tables.blocks_in_use)
            for index, _ in self._windowed:
                num_left += sum(self.pool.num_references(block) > 1 for block in tables.of_group[index].blocks_in_use)
            num_left = max(0, num_left)
        self._num_promised += num_left - tables.num_promised
        tables.num_promised = num_left

    def _skip(self, table: BlockTable, num_skipped: int) -> None:
        """Give back what a window has left behind; plans in flight name those blocks but do not read them."""
        if num_skipped > table.num_skipped:
            self.num_changes += 1
            self.pool.release(table.skip(num_skipped), self.prefix_cache.holds)

    def publish(self, request: Request, step: int) -> None:
        """Let others hit the blocks that are full once `step` has run and whose tokens are all known."""
        tables = self._tables[request.request_id]
        num_full = min(request.num_computed_tokens, request.num_tokens) // self.block_size
        if num_full <= tables.num_published:
            return
        for group, table in enumerate(tables.of_group if self._enable_prefix_caching else ()):
            first = max(tables.num_published, table.num_skipped)  # late tokens can be behind a short window when known
            self.prefix_cache.publish(request, first, table.blocks[first:num_full], step, group)
        tables.count_published(num_full)

    def num_common_prefix_blocks(self, running: Sequence[Request]) -> tuple[int, ...]:
        """Return for each group how many leading blocks all of `running` share, 0 where that is not known for sure.

        It is not in groups with a window, nor while plans in flight hold blocks of who has left. Counted anew only
        when somebody has come or gone.
        """
        if self._num_common is None:
            self._num_common = tuple([self._count_common(index, running) for index in range(len(self._groups))])
        return self._num_common

    def _count_common(self, index: int, running: Sequence[Request]) -> int:
        if len(running) < 2 or self._held or self._groups[index].sliding_window is not None:
            return 0
        blocks = self._tables[running[0].request_id].of_group[index].blocks
        shared = takewhile(lambda block: self.pool.num_references(block) == len(running), blocks)
        return sum(1 for _ in shared)

    # A step is undone

    def retract(self) -> set[BlockId]:
        """Forget what uncommitted steps published, and return it; the caller rewinds who relies on it."""
        return self.prefix_cache.retract(lambda block: self.pool.num_references(block) == 0)

    def rewind(self, request: Request) -> None:
        """Publish again, from the request's `num_computed_tokens` on, what `retract` took back."""
        tables = self._tables[request.request_id]
        tables.count_published(min(tables.num_published, request.num_computed_tokens // self.block_size))

    def relies_on(self, request: Request, blocks: set[BlockId]) -> bool:
        """Whether one of `blocks` holds tokens that `request` takes as computed."""
        num_full = request.num_computed_tokens // self.block_size
        tables = self._tables[request.request_id]
        return any(not blocks.isdisjoint(table.blocks[:num_full]) for table in tables.of_group)

    # A row has failed alone

    def trace(self, row: ScheduledRequest) -> tuple[set[BlockId], set[BlockId]]:
        """Return the blocks that a row in flight computes from, and those that it fills.

        They are those of the tables it was planned with, whatever has become of its request and of the id since.
        """
        read: set[BlockId] = set()
        filled: set[BlockId] = set()
        end = num_blocks_for(row.start + row.num_tokens, self.block_size)
        for group, table in zip(self._groups, row.block_tables, strict=True):
            blocks = table[:end].tolist()
            first = num_skipped_blocks(group, row.start, self.block_size)
            read.update(blocks[first : num_blocks_for(row.start, self.block_size)])
            filled.update(blocks[row.start // self.block_size :])
        return read, filled

    def forget(self, blocks: set[BlockId]) -> None:
        """Let nobody hit `blocks`, whose content is not to be trusted."""
        self.prefix_cache.forget(blocks)

    # A request leaves

    def release(self, request: Request, held_until: int | None) -> None:
        """Take the request's tables; its references end now, or once the step `held_until` is settled.

        A request without tables holds nothing, and nothing happens.
        """
        tables = self._tables.pop(request.request_id, None)
        if tables is None:
            return
        self._num_promised -= tables.num_promised
        self._num_common = None
        self.num_changes += 1
        if held_until is None:
            self._release(tables)
        else:
            self._held.setdefault(held_until, {})[request.request_id] = tables

    def settle(self, step: int) -> None:
        """The plan of `step` has ended: its publications stand, and what it held is given back."""
        self.prefix_cache.commit(step)
        held = self._held.pop(step, None)
        if held is not None:
            self._num_common = None
            self.num_changes += 1
            for tables in held.values():
                self._release(tables)

    def _release(self, tables: BlockTables) -> None:
        for table in tables.of_group:
            self.pool.release(table.blocks, self.prefix_cache.holds)

    def reset_prefix_cache(self) -> None:
        """Forget all cached beginnings; tables and plans in flight keep their blocks."""
        self.prefix_cache.clear()

    def check_invariants(self, running: list[Request]) -> None:
        """Check pool, cache and tables against each other and against who runs.

        Raises:
            AssertionError: Something leaked, or is owned twice.
        """
        assert len(self._tables) == len(running), "tables are not those of who runs"
        num_promised = 0
        references: list[BlockId] = []
        for request in running:
            tables = self._tables.get(request.request_id)
            assert tables is not None, f"{request} runs without tables"
            assert tables.num_slots >= request.num_computed_tokens, f"{request}: tables are too short"
            num_promised += tables.num_promised
            references += tables.check_invariants()
        assert self._num_promised == num_promised, f"{self._num_promised} blocks are promised, not {num_promised}"
        for requests in self._held.values():
            for tables in requests.values():
                references += tables.blocks_in_use
        if self._matched is not None:
            (request, num_tokens, num_changes), match = self._matched
            is_valid = (num_tokens, num_changes) == (request.num_tokens, self.prefix_cache.num_changes)
            assert not is_valid or match == self.new_match(request), f"{request}: the match that is kept is stale"
        self.prefix_cache.check_invariants()
        self.pool.check_invariants(references, self.prefix_cache.holds)
