"""Memory that the operations in C read and write, in huge pages where that pays and the system has them."""

from __future__ import annotations

import contextlib
import mmap

import numpy as np
import torch

ALIGNMENT_BYTES = 64
_CHUNK_BYTES = 256 << 20
"""A multiple of every usual size of huge pages."""


class Arena:
    """Gives out memory piece by piece from chunks in huge pages, which make reading all weights a third faster.

    A system gives huge pages to what is as large as they are, and weights of a layer are often smaller. A chunk lives
    as long as a piece of it does, and what is never written of it takes nothing.
    """

    def __init__(self) -> None:
        """Take nothing yet."""
        self._chunk = torch.empty(0, dtype=torch.uint8)
        self._used_bytes = 0

    def zeros(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        """Return `count` zeros that begin at a multiple of `ALIGNMENT_BYTES`."""
        size_bytes = count * dtype.itemsize
        if self._used_bytes + size_bytes > len(self._chunk):
            self._chunk, self._used_bytes = zeros(max(size_bytes, _CHUNK_BYTES), torch.uint8), 0
        piece = self._chunk[self._used_bytes :][:size_bytes]
        self._used_bytes += -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        return piece.view(dtype)

    def copy(self, values: torch.Tensor) -> torch.Tensor:
        """Return a contiguous copy that begins at a multiple of `ALIGNMENT_BYTES`."""
        return self.zeros(values.numel(), values.dtype).view(values.shape).copy_(values)


def zeros(count: int, dtype: torch.dtype, *, is_huge: bool = True) -> torch.Tensor:
    """Return `count` zeros that begin where a page does; memory is taken when it is first written.

    What may stay empty for the most part, here and there, is better not huge.
    """
    room = mmap.mmap(-1, max(1, count * dtype.itemsize), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if is_huge and hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without them
            room.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(room, dtype=dtype, count=count)


def pointer(values: torch.Tensor | np.ndarray | None) -> int | None:
    """Return the address of the first number, for a struct; whoever builds the program keeps `values` alive."""
    if values is None:
        return None
    return values.data_ptr() if isinstance(values, torch.Tensor) else values.ctypes.data
