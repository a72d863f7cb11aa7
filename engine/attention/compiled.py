"""Attention over pages by operations in C: the pages and a step's layout; the decoder's program has the rest."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from engine.attention.base import AttentionBatch
from engine.kernels.operations import Form, Step, pointer, zeros
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
        """Allocate zeroed pages for `num_blocks` blocks, in as many tensors as the largest of `layer_groups` needs."""
        self.block_size = block_size
        self._block_bytes = spec.num_kv_heads * block_size * Form.of_pages(dtype).token_bytes(spec.head_dim)
        num_tensors = num_page_tensors(layer_groups)
        self.pages = [zeros(num_blocks * self._block_bytes, torch.uint8) for _ in range(num_tensors)]
        self.places = {
            layer: (group, index) for group, kind in enumerate(layer_groups) for index, layer in enumerate(kind.layers)
        }

    @property
    def size_bytes(self) -> int:
        """See `AttentionPages.size_bytes`."""
        return sum(pages.nbytes for pages in self.pages)

    def release_pages(self) -> None:
        """See `AttentionPages.release_pages`."""
        self.pages.clear()

    def clear_null_block(self) -> None:
        """See `AttentionPages.clear_null_block`."""
        for pages in self.pages:
            pages.view(-1, self._block_bytes)[NULL_BLOCK] = 0

    def prepare(self, batch: AttentionBatch) -> tuple[Step, list[np.ndarray]]:
        """Lay out whose rows they are and where their blocks lie."""
        requests = batch.requests
        counts = np.array([request.num_rows for request in requests])
        owners = np.repeat(np.arange(len(requests), dtype=np.int32), counts)
        num_groups = len(requests[0].block_tables)
        max_blocks = max(len(table) for request in requests for table in request.block_tables)
        tables = np.zeros((num_groups, len(requests), max_blocks), dtype=np.int32)
        for index, request in enumerate(requests):
            for group, table in enumerate(request.block_tables):
                tables[group, index, : len(table)] = table
        step = Step(
            num_rows=len(owners),
            num_requests=len(requests),
            max_blocks=max_blocks,
            num_groups=num_groups,
            requests=pointer(owners),
            block_tables=pointer(tables),
        )
        return step, [owners, tables]
