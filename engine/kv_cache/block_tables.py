"""The block tables of one running request: which block holds which of its tokens, one table a group.

A table only grows at its end, so that a view of it that a plan was given stays valid; what a window has passed is
replaced in a new array, of which only later plans get views.
"""

from __future__ import annotations

from collections.abc import Sequence

from engine.append_only_array import AppendOnlyArray
from engine.kv_cache.spec import NULL_BLOCK
from engine.outputs import BlockId, TokenArray

_NULL = BlockId(NULL_BLOCK)


class BlockTable:
    """One group's blocks.

    Attributes:
        blocks: In order of positions; null blocks first, where a window has passed.
        array: The same, for plans.
        num_skipped: How many null blocks there are.
    """

    __slots__ = ("array", "blocks", "num_skipped")

    def __init__(self, blocks: Sequence[BlockId]) -> None:
        """Begin with `blocks`."""
        self.blocks = list(blocks)
        self.array = AppendOnlyArray(blocks)
        self.num_skipped = blocks.count(_NULL)

    @property
    def blocks_in_use(self) -> list[BlockId]:
        """The blocks that no window has passed."""
        return self.blocks[self.num_skipped :]

    def extend(self, blocks: Sequence[BlockId]) -> None:
        """Add `blocks` at the end."""
        self.blocks += blocks
        for block in blocks:
            self.array.append(block)

    def skip(self, num_skipped: int) -> list[BlockId]:
        """Put null blocks in the place of the first `num_skipped`, in a new array; return what was there."""
        skipped = self.blocks[self.num_skipped : num_skipped]
        self.blocks[self.num_skipped : num_skipped] = [_NULL] * len(skipped)
        self.array = AppendOnlyArray(self.blocks)
        self.num_skipped = num_skipped
        return skipped


class BlockTables:
    """All tables of one request, of one length; the manager alone changes them.

    Attributes:
        of_group: The table of each group.
        views: What plans are given, one read-only view a group, `[num_blocks]`.
        num_slots: Tokens they have room for.
        num_published: How many blocks of each went to the prefix cache or came from it.
        publication_due: From how many computed and known tokens on there is more to publish.
        num_tokens: Tokens at admission, room for which is promised.
        num_promised: Blocks still to be taken of those promised.
    """

    __slots__ = (
        "_block_size",
        "num_promised",
        "num_published",
        "num_slots",
        "num_tokens",
        "of_group",
        "publication_due",
        "views",
    )

    def __init__(self, cached: Sequence[Sequence[BlockId]], block_size: int, num_tokens: int) -> None:
        """Begin with the blocks that are `cached`, for a request that has `num_tokens` tokens when it is admitted."""
        self._block_size = block_size
        self.of_group = tuple([BlockTable(blocks) for blocks in cached])
        self.num_tokens = num_tokens
        self.num_promised = 0
        self.count_published(len(cached[0]))
        self.refresh()

    def refresh(self) -> None:
        """Bring `num_slots` and `views` up to date: a table has changed."""
        self.num_slots = len(self.of_group[0].blocks) * self._block_size
        self.views: tuple[TokenArray, ...] = tuple([table.array.view() for table in self.of_group])

    def count_published(self, num_blocks: int) -> None:
        """The first `num_blocks` blocks have been published, as far as a window has not passed them."""
        self.num_published = num_blocks
        self.publication_due = (num_blocks + 1) * self._block_size

    @property
    def blocks_in_use(self) -> list[BlockId]:
        """All blocks that they have a reference to; one that is in two tables comes twice."""
        return [block for table in self.of_group for block in table.blocks_in_use]

    def check_invariants(self) -> list[BlockId]:
        """Check lengths, views and null blocks against each other; return the blocks in use.

        Raises:
            AssertionError: They do not agree.
        """
        in_use: list[BlockId] = []
        for table, view in zip(self.of_group, self.views, strict=True):
            blocks = table.blocks
            assert len(blocks) * self._block_size == self.num_slots, f"tables differ in length: {blocks}"
            assert blocks == view.tolist(), f"table {blocks} and view {view} differ"
            assert blocks.count(_NULL) == table.num_skipped, f"a null block among those in use: {blocks}"
            in_use += blocks[table.num_skipped :]
        return in_use
