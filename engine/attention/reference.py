"""Readable attention over gathered pages, on any device torch has: the oracle for the fast backends.

Every matrix product here has one fixed shape, whatever the batch. Query rows are cut into tiles of about 16 rows
(positions x heads of one K/V head), keys into tiles of 128 at absolute positions, the partial results of key tiles
are added in order::

            keys 0..127   128..255   256..383        one bmm a K/V head and key tile,
    tile 0  [ 16 x 128 ]  [ masked ] [ masked ]      batched over query tiles
    tile 1  [ 16 x 128 ]  [ 16x128 ] [ masked ]

So a row's result cannot depend on who shares the batch or on chunking: a library picks its order of summation by the
shape, and the shape never changes; masked keys add exact zeros. Products and softmax run in float32. Sinks stand in a
key tile of their own before the others, which takes part in the softmax and has no values.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from engine.attention.base import AttentionBatch, RequestRows
from engine.kv_cache.spec import NULL_BLOCK, KVCacheSpec, num_page_tensors
from engine.outputs import KVCacheGroup

KEY_TILE = 128
"""Keys a tile; the sums over keys are cut at its multiples."""
QUERY_TILE = 16
"""Rows a query tile aims at: position x head of the same K/V head."""
MAX_GROUP_SIZE = 2**21
"""Numbers that the largest temporary tensor of a group may hold; larger work is cut into more groups."""
CAP_PART = 128 * KEY_TILE
"""Numbers that are capped at once: too few for torch to share among threads, which would round the ends otherwise."""


@dataclass(slots=True)
class _Group:
    """Query tiles that are computed together, over one padded number of keys.

    Attributes:
        rows: Row of the step at each place of the tiles, `[num_tiles, positions a tile]`; a place beyond its request's
            rows repeats the tile's first row.
        positions: Position of that row, of the same shape.
        slots: For each group of layers where the keys lie, `[num_tiles or 1, num_keys]`; 1 when all tiles are of one
            request.
        places: Places that hold a row of their own, as flat indexes, `[num_rows]`.
        targets: The rows at those places, `[num_rows]`.
    """

    rows: torch.Tensor
    positions: torch.Tensor
    slots: Sequence[torch.Tensor]
    places: torch.Tensor
    targets: torch.Tensor
    _masks: dict[int | None, torch.Tensor] = field(default_factory=dict)

    def mask(self, window: int | None, num_heads: int) -> torch.Tensor:
        """Return which keys a row does not see, `[num_tiles, positions x num_heads, num_keys]`."""
        if window not in self._masks:
            keys = torch.arange(self.slots[0].shape[1], device=self.positions.device)
            rows = self.positions[..., None]
            hidden = keys > rows
            if window is not None:
                hidden |= keys <= rows - window
            self._masks[window] = hidden.repeat_interleave(num_heads, dim=1)
        return self._masks[window]


@dataclass(frozen=True, slots=True)
class _PreparedBatch:
    """The groups of a step and where its K/V goes."""

    slot_mappings: Sequence[torch.Tensor]
    groups: Sequence[_Group]


class ReferenceAttention:
    """Gathers each request's pages and attends in tiles of a fixed shape. Owns the pages."""

    def __init__(
        self,
        spec: KVCacheSpec,
        layer_groups: Sequence[KVCacheGroup],
        num_heads: int,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> None:
        """Allocate zeroed pages for `num_blocks` blocks, in as many tensors as the largest of `layer_groups` needs."""
        self._block_size = block_size
        self._num_kv_heads = spec.num_kv_heads
        self._group_heads = num_heads // spec.num_kv_heads
        self._tile_positions = max(1, QUERY_TILE // self._group_heads)
        self._device = torch.device(device)
        pages = (num_blocks, block_size, spec.num_kv_heads, spec.head_dim)
        self.key_pages = [_zeros(pages, dtype, device) for _ in range(num_page_tensors(layer_groups))]
        self.value_pages = [_zeros(pages, dtype, device) for _ in range(num_page_tensors(layer_groups))]
        self._places = {
            layer: (group, pages) for group, kind in enumerate(layer_groups) for pages, layer in enumerate(kind.layers)
        }
        self._rooms: dict[str, torch.Tensor] = {}
        self._score_size = num_heads * self._tile_positions
        self._key_size = spec.num_kv_heads * spec.head_dim

    @property
    def size_bytes(self) -> int:
        """See `AttentionPages.size_bytes`."""
        return sum(pages.nbytes for pages in (*self.key_pages, *self.value_pages))

    def clear_null_block(self) -> None:
        """See `AttentionPages.clear_null_block`."""
        for pages in (*self.key_pages, *self.value_pages):
            pages[NULL_BLOCK] = 0

    def release_pages(self) -> None:
        """See `AttentionPages.release_pages`."""
        self.key_pages.clear()
        self.value_pages.clear()
        self._rooms.clear()

    def prepare(self, batch: AttentionBatch) -> _PreparedBatch:
        """Cut the step into groups of tiles with about the same number of keys."""
        groups: list[_Group] = []
        alone: defaultdict[int, list[RequestRows]] = defaultdict(list)
        for request in batch.requests:
            if request.num_rows <= self._tile_positions:
                num_key_tiles = -(-(request.start + request.num_rows) // KEY_TILE)
                alone[num_key_tiles.bit_length()].append(request)
            else:
                groups += self._groups_of_one(request)
        for requests in alone.values():
            most_keys = max(request.start + request.num_rows for request in requests)
            step = self._tiles_a_group(most_keys, max(self._score_size, self._key_size))
            groups += [self._group_of_many(requests[i : i + step]) for i in range(0, len(requests), step)]
        return _PreparedBatch(batch.slot_mappings(self._block_size), groups)

    def attend(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        scale: float,
        window: int | None,
        softcap: float | None,
        sinks: torch.Tensor | None,
        batch: _PreparedBatch,
    ) -> torch.Tensor:
        """See `AttentionBackend.attend`."""
        layer_group, pages = self._places[layer]
        keys, values = self.key_pages[pages].flatten(0, 1), self.value_pages[pages].flatten(0, 1)
        k, v = _poison_in_keys(k, v)
        keys.index_copy_(0, batch.slot_mappings[layer_group], k)
        values.index_copy_(0, batch.slot_mappings[layer_group], v)
        attended = torch.empty_like(q)
        for group in batch.groups:
            slots = group.slots[layer_group]
            gathered = self._gather("keys", keys, slots), self._gather("values", values, slots)
            mask = group.mask(window, self._group_heads)
            result = self._attend_group(q[group.rows].float() * scale, *gathered, mask, softcap, sinks)
            attended.index_copy_(0, group.targets, result.index_select(0, group.places).to(q.dtype))
        return attended

    def _attend_group(
        self,
        q: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor,
        softcap: float | None,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """Attend with `q [num_tiles, positions, num_heads, head_dim]`; returns `[places, num_heads, head_dim]`.

        Args:
            q: Scaled queries.
            key: `[num_tiles or 1, num_keys, num_kv_heads, head_dim]`.
            value: Like `key`.
            mask: See `_Group.mask`.
            softcap: See `AttentionBackend.attend`.
            sinks: See `AttentionBackend.attend`.
        """
        num_tiles, num_positions, num_heads, head_dim = q.shape
        split = (num_tiles, num_positions, self._num_kv_heads, self._group_heads, head_dim)
        tile_rows = num_positions * self._group_heads
        q = q.view(split).permute(2, 0, 1, 3, 4).reshape(self._num_kv_heads, num_tiles, tile_rows, head_dim)
        num_keys = key.shape[1]
        key_tiles = [slice(first, first + KEY_TILE) for first in range(0, num_keys, KEY_TILE)]

        scores = self._room("scores", (self._num_kv_heads, num_tiles, tile_rows, num_keys))
        for head in range(self._num_kv_heads):
            for tile in key_tiles:
                transposed = key[:, tile, head].transpose(1, 2).expand(num_tiles, head_dim, KEY_TILE)
                scores[head, :, :, tile] = torch.bmm(q[head], transposed)
        if softcap is not None:
            for part in torch.split(scores.view(-1), CAP_PART):
                part.div_(softcap).tanh_().mul_(softcap)
        scores.masked_fill_(mask, -torch.inf)  # not added: a score that is no number and not seen must go
        weights = self._softmax(scores, sinks, num_positions)
        result = torch.zeros_like(q)
        for head in range(self._num_kv_heads):
            for tile in key_tiles:
                shared = value[:, tile, head].expand(num_tiles, KEY_TILE, head_dim)
                result[head].baddbmm_(weights[head, :, :, tile], shared)
        result = result.view(self._num_kv_heads, num_tiles, num_positions, self._group_heads, head_dim)
        return result.permute(1, 2, 0, 3, 4).reshape(num_tiles * num_positions, num_heads, head_dim)

    def _softmax(self, scores: torch.Tensor, sinks: torch.Tensor | None, num_positions: int) -> torch.Tensor:
        """Return the softmax over the keys, of the shape of `scores [num_kv_heads, num_tiles, tile_rows, num_keys]`."""
        if sinks is None:
            return torch.softmax(scores, dim=-1)
        tile = scores.new_full((*scores.shape[:-1], KEY_TILE), -torch.inf)
        by_position = tile[..., 0].view(self._num_kv_heads, -1, num_positions, self._group_heads)
        by_position.copy_(sinks.view(self._num_kv_heads, 1, 1, self._group_heads))
        return torch.softmax(torch.cat((tile, scores), dim=-1), dim=-1)[..., KEY_TILE:]

    def _gather(self, name: str, pages: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        """Return what lies at `slots [n, num_keys]`, float32 `[n, num_keys, num_kv_heads, head_dim]`.

        Whole rows are copied; indexing by `slots` itself would copy number by number, eight times slower.
        """
        shape = (slots.numel(), pages[0].numel())
        rows = self._room(f"stored {name}", shape, pages.dtype)
        torch.index_select(pages.flatten(1), 0, slots.flatten(), out=rows)
        if pages.dtype != torch.float32:
            rows = self._room(name, shape).copy_(rows)
        return rows.view(*slots.shape, *pages.shape[1:])

    def _room(self, name: str, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Return an uninitialised tensor in memory kept for `name`: fresh memory would cost as much as the work."""
        size = math.prod(shape)
        if name not in self._rooms or self._rooms[name].numel() < size:
            self._rooms[name] = torch.empty(size, dtype=dtype, device=self._device)
        return self._rooms[name][:size].view(shape)

    def _tiles_a_group(self, num_keys: int, size_a_key: int) -> int:
        return max(1, MAX_GROUP_SIZE // (size_a_key * -(-num_keys // KEY_TILE) * KEY_TILE))

    def _groups_of_one(self, request: RequestRows) -> Iterator[_Group]:
        """Cut one request's rows into groups of tiles that share its keys, each up to the group's last position."""
        step = self._tile_positions * self._tiles_a_group(request.start + request.num_rows, self._score_size)
        for first in range(0, request.num_rows, step):
            num_rows = min(step, request.num_rows - first)
            part = RequestRows(request.first_row + first, num_rows, request.start + first, request.block_tables)
            offsets = np.arange(-(-num_rows // self._tile_positions) * self._tile_positions)
            yield self._group(offsets.reshape(-1, self._tile_positions), num_rows, [part])

    def _group_of_many(self, requests: Sequence[RequestRows]) -> _Group:
        """One tile a request."""
        offsets = np.broadcast_to(np.arange(self._tile_positions), (len(requests), self._tile_positions))
        return self._group(offsets, np.array([[request.num_rows] for request in requests]), requests)

    def _group(self, offsets: np.ndarray, num_rows: int | np.ndarray, requests: Sequence[RequestRows]) -> _Group:
        """Place rows at `offsets [num_tiles, positions]` from their request's first; one request, or one a tile."""
        first_rows = np.array([[request.first_row] for request in requests])
        starts = np.array([[request.start] for request in requests])
        is_own = offsets < num_rows
        offsets = np.where(is_own, offsets, offsets[:, :1])
        num_keys = -(-max(request.start + request.num_rows for request in requests) // KEY_TILE) * KEY_TILE
        rows = first_rows + offsets
        places = np.flatnonzero(is_own)
        return _Group(
            rows=self._to_device(rows),
            positions=self._to_device(starts + offsets),
            slots=[
                self._to_device(np.stack([self._slots(request, index, num_keys) for request in requests]))
                for index in range(len(requests[0].block_tables))
            ],
            places=self._to_device(places),
            targets=self._to_device(rows.reshape(-1)[places]),
        )

    def _slots(self, request: RequestRows, layer_group: int, num_keys: int) -> np.ndarray:
        """Slots of positions 0 to `num_keys`; those the request has not reached point into the null block."""
        slots = np.full(num_keys, NULL_BLOCK * self._block_size, dtype=np.int64)
        positions = np.arange(request.start + request.num_rows)
        blocks = request.block_tables[layer_group][positions // self._block_size].astype(np.int64)
        slots[: len(positions)] = blocks * self._block_size + positions % self._block_size
        return slots

    def _to_device(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array, dtype=np.int64)).to(self._device)


def _poison_in_keys(k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return keys and values of which a value with numbers that are none is zero, and its key none.

    So it reaches through its score all who see it, and not, times a weight of zero, those who do not.
    """
    poisoned = ~v.isfinite().all(dim=-1, keepdim=True)
    if not poisoned.any():
        return k, v
    return k.masked_fill(poisoned, torch.nan), v.masked_fill(poisoned, 0.0)


def _zeros(shape: Sequence[int], dtype: torch.dtype, device: torch.device | str) -> torch.Tensor:
    """Return zeros; on a CPU the memory is taken when it is first written, where `torch.zeros` would write it all."""
    if torch.device(device).type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.from_numpy(np.zeros(math.prod(shape) * dtype.itemsize, dtype=np.uint8)).view(dtype).view(shape)
