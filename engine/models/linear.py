"""The linear layer in 16 and 32 bit, prepacked where the library can, always run on tiles of the same shape.

A matrix library picks its kernel, and with it the order of its sums, by the number of rows: measured on two kinds of
CPU, `F.linear` gives other bits for 1, for 2 to 15 or for up to 256 rows, by type, shape and thread count. Instead
of a rule for each machine, a model here runs all that is done row by row on tiles of exactly `ROW_TILE` rows, padded
where rows are missing. One shape means one kernel: a row's result depends neither on how many rows there are nor,
as the tests check at the model's shapes, on its place in the tile.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.nn.functional as F

ROW_TILE = 16
"""Rows of every product. Up to 16 cost about what one does; more would cost a lone stream, fewer a long prompt."""


class Linear:
    """A weight `[out_features, in_features]` and an optional bias `[out_features]`, filled in place, then packed."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        """Multiply by `weight`, which may be shared until `pack`."""
        self.weight = weight
        self.bias = bias
        self._is_packed = False

    @classmethod
    def empty(cls, in_features: int, out_features: int, *, bias: bool, dtype: torch.dtype) -> Linear:
        """Allocate uninitialised parameters of `dtype`."""
        weight = torch.empty(out_features, in_features, dtype=dtype)
        return cls(weight, torch.empty(out_features, dtype=dtype) if bias else None)

    def parts(self, names: Iterable[str], sizes: Sequence[int] | None = None) -> dict[str, torch.Tensor]:
        """Name the outputs' parts as a checkpoint has them: name.weight and name.bias → views to fill, until `pack`.

        Args:
            names: One a part.
            sizes: Outputs of each part; None: all are of one size.
        """
        names = list(names)
        sizes = sizes or [len(self.weight) // len(names)] * len(names)
        tensors: dict[str, torch.Tensor] = {}
        for kind, tensor in (("weight", self.weight), ("bias", self.bias)):
            if tensor is not None:
                views = torch.split(tensor, list(sizes))
                tensors |= {f"{name}.{kind}": view for name, view in zip(names, views, strict=True)}
        return tensors

    def pack(self) -> None:
        """Replace the weight by the library's own order for `ROW_TILE` rows, once it is filled.

        Saves reordering the weight at every call, a third to a half of the time. Without the library's support for
        the type the weight stays as it is.
        """
        if _can_pack(self.weight.dtype):
            self.weight = torch.ops.mkldnn._reorder_linear_weight(self.weight, ROW_TILE)
            self._is_packed = True

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """Multiply one tile, `[ROW_TILE, in_features]` → `[ROW_TILE, out_features]`."""
        if self._is_packed:
            product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(rows, self.weight, self.bias, "none", [], "")
            return product
        return F.linear(rows, self.weight, self.bias)


def _can_pack(dtype: torch.dtype) -> bool:
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    if dtype == torch.float16:
        return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
    return dtype == torch.float32


def pad_rows(rows: torch.Tensor) -> torch.Tensor:
    """Append zero rows up to a multiple of `ROW_TILE`; `[n, ...]` → `[⌈n / ROW_TILE⌉ · ROW_TILE, ...]`."""
    missing = -rows.shape[0] % ROW_TILE
    return F.pad(rows, (0, 0) * (rows.dim() - 1) + (0, missing)) if missing else rows


def tiles_of(rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Split padded rows into views of `ROW_TILE` rows."""
    return torch.split(rows, ROW_TILE)


def joined(tiles: Sequence[torch.Tensor]) -> torch.Tensor:
    """Put tiles together again; a single one is not copied."""
    return tiles[0] if len(tiles) == 1 else torch.cat(list(tiles))
