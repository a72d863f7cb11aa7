"""Attention over pages by operations in C: the pages and a step's layout; the decoder's program has the rest."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from engine.attention.base import AttentionBatch
from engine.kernels.memory import pointer, zeros
from engine.kernels.operations import Form, PagePlaces, Step
from engine.kv_cache.spec import NULL_BLOCK, KVCacheSpec, num_page_tensors
from engine.outputs import KVCacheGroup


class CompiledPages:
    """K/V pages in the order that the operations read; see source/attention.h. Attended to by `CompiledDecoder`."""

    def __init__(
        self,
        spec: KVCacheSpec,
        layer_groups: Sequence[KVCacheGroup],
        num_heads: int,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
    ) -> None:
        """Allocate zeroed pages for `num_blocks` blocks, with as many in each as the largest of `layer_groups` needs.

        Those of a block lie side by side: so what has never been used, blocks of high numbers, takes no memory.
        """
        self._block_size = block_size
        page_bytes = spec.num_kv_heads * block_size * Form.of_pages(dtype).token_bytes(spec.head_dim)
        shape = num_blocks, num_page_tensors(layer_groups), page_bytes
        self._pages = zeros(math.prod(shape), torch.uint8).view(shape)
        self._owners = self._tables = np.empty(0, dtype=np.int32)
        self._step = Step()
        self._where = {
            layer: (group, index) for group, kind in enumerate(layer_groups) for index, layer in enumerate(kind.layers)
        }

    def places(self, layer: int) -> tuple[int, PagePlaces]:
        """Return the group of block tables that are a layer's, and where its pages lie."""
        group, index = self._where[layer]
        return group, PagePlaces(pointer(self._pages[0, index]), self._pages.stride(0), self._block_size)

    @property
    def size_bytes(self) -> int:
        """See `AttentionPages.size_bytes`."""
        return self._pages.nbytes

    def release_pages(self) -> None:
        """See `AttentionPages.release_pages`."""
        self._pages = self._pages[:0].clone()

    def clear_null_block(self) -> None:
        """See `AttentionPages.clear_null_block`."""
        self._pages[NULL_BLOCK] = 0

    def prepare(self, batch: AttentionBatch) -> Step:
        """Lay out whose rows they are and where their blocks lie: good until the next call, which has the same room."""
        requests, step = batch.requests, self._step
        step.num_rows, step.num_requests = requests[-1].first_row + requests[-1].num_rows, len(requests)
        step.num_groups = len(requests[0].block_tables)
        step.max_blocks = max(len(table) for request in requests for table in request.block_tables)
        owners, tables = self._rooms_of(step)
        for index, request in enumerate(requests):
            owners[request.first_row : request.first_row + request.num_rows] = index
            for group, table in enumerate(request.block_tables):
                tables[group, index, : len(table)] = table
                tables[group, index, len(table) :] = NULL_BLOCK
        return step

    def _rooms_of(self, step: Step) -> tuple[np.ndarray, np.ndarray]:
        """Return room for rows' owners and for block tables, the same unless more is needed; what it holds is old."""
        shape = step.num_groups, step.num_requests, step.max_blocks
        size = math.prod(shape)
        if step.num_rows > len(self._owners):
            self._owners = np.empty(2 * step.num_rows, dtype=np.int32)
            step.requests = pointer(self._owners)
        if size > len(self._tables):
            self._tables = np.empty(2 * size, dtype=np.int32)
            step.block_tables = pointer(self._tables)
        return self._owners, self._tables[:size].reshape(shape)
