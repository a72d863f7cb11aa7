"""Memory of the operations: aligned pieces that share what the system gives at once."""

from __future__ import annotations

from itertools import pairwise

import torch

from engine.kernels.memory import ALIGNMENT_BYTES, Arena, pointer


def test_pieces_are_zero_aligned_and_side_by_side() -> None:
    arena = Arena()
    pieces = [arena.zeros(count, torch.float32) for count in (1, 16, 17, 5)]
    starts = [piece.data_ptr() for piece in pieces]
    assert [start - starts[0] for start in starts] == [0, 64, 128, 256]
    assert starts[0] % ALIGNMENT_BYTES == 0
    assert [len(piece) for piece in pieces] == [1, 16, 17, 5]
    assert not any(piece.any() for piece in pieces)


def test_pieces_of_any_size_do_not_overlap() -> None:
    arena = Arena()
    sizes = [20 << 20, 20 << 20, 100 << 20, 3, 31 << 20, 7]
    pieces = [arena.zeros(size, torch.uint8) for size in sizes]
    ranges = sorted((piece.data_ptr(), piece.data_ptr() + len(piece)) for piece in pieces)
    assert all(end <= start for (_, end), (start, _) in pairwise(ranges))
    for index, piece in enumerate(pieces):
        piece[:1] = piece[-1:] = index + 1
    assert [int(piece[-1]) for piece in pieces] == [1, 2, 3, 4, 5, 6]


def test_a_copy_keeps_shape_type_and_numbers() -> None:
    values = torch.arange(12, dtype=torch.bfloat16).view(3, 4).t()
    copy = Arena().copy(values)
    assert (copy.is_contiguous(), copy.dtype) == (True, torch.bfloat16)
    assert torch.equal(copy, values)
    assert (pointer(copy), pointer(None)) == (copy.data_ptr(), None)
