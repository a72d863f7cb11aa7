"""The gated MLP of a decoder layer: one for all rows, or experts among which each row is sent to a few.

Experts keep the rule that everything runs on tiles of one shape: the rows sent to an expert, whichever tile they come
from, are gathered into tiles of `ROW_TILE` rows, and each row adds up what its experts give in the order of their
indexes, in float32. So a row's result does not depend on where its neighbours are sent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F

from engine.models.decoder_config import ExpertsConfig
from engine.models.decoder_traits import ExpertNames
from engine.models.linear import Linear, joined, pad_rows, tiles_of

PARALLEL_GRAIN = 32768
"""Elements from which on torch splits an elementwise operation over threads, in the middle of rows."""
ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "gelu_tanh": lambda rows: F.gelu(rows, approximate="tanh"),
}


class DenseMlp:
    """down(activation(gate) · up)."""

    def __init__(
        self, hidden_size: int, inner_size: int, activation: str, *, bias: bool, fused: bool, dtype: torch.dtype
    ) -> None:
        """Allocate uninitialised weights; `fused`: whether the checkpoint has gate and up as one tensor."""
        self._inner_size = inner_size
        self._activation = ACTIVATIONS[activation]
        self._names = ("gate_up_proj",) if fused else ("gate_proj", "up_proj")
        self.gate_up = Linear.empty(hidden_size, 2 * inner_size, bias=bias, dtype=dtype)
        self.down = Linear.empty(inner_size, hidden_size, bias=bias, dtype=dtype)

    def destinations(self) -> dict[str, torch.Tensor]:
        """Name every tensor below the layer and the view it is to be copied into."""
        return self.gate_up.parts(f"mlp.{name}" for name in self._names) | self.down.parts(["mlp.down_proj"])

    def pack(self) -> None:
        """Bring the filled weights into the order the products want; call once."""
        self.gate_up.pack()
        self.down.pack()

    def __call__(self, tiles: Sequence[torch.Tensor], num_rows: int) -> list[torch.Tensor]:
        """Map tiles `[ROW_TILE, hidden_size]` to tiles of the same shape."""
        return [self.down(gated(self.gate_up(tile), self._activation)) for tile in tiles]


class Experts:
    """A router that weighs experts for each row, and the experts."""

    def __init__(
        self, config: ExpertsConfig, names: ExpertNames, hidden_size: int, activation: str, dtype: torch.dtype
    ) -> None:
        """Allocate uninitialised weights; `names` are those of the checkpoint's tensors."""
        self._config = config
        self._names = names
        self._activation = ACTIVATIONS[activation]
        inner = config.intermediate_size
        self._router = Linear.empty(hidden_size, config.num_experts, bias=False, dtype=dtype)
        self._gate_up = [
            Linear.empty(hidden_size, 2 * inner, bias=False, dtype=dtype) for _ in range(config.num_experts)
        ]
        self._down = [Linear.empty(inner, hidden_size, bias=False, dtype=dtype) for _ in range(config.num_experts)]

    def destinations(self) -> dict[str, torch.Tensor]:
        """Name every tensor below the layer and the view it is to be copied into."""
        names = self._names
        tensors = self._router.parts([names.router])
        for index, (gate_up, down) in enumerate(zip(self._gate_up, self._down, strict=True)):
            tensors |= gate_up.parts([names.gate.format(index), names.up.format(index)])
            tensors |= down.parts([names.down.format(index)])
        return tensors

    def pack(self) -> None:
        """Bring the filled weights into the order the products want; call once."""
        for linear in (self._router, *self._gate_up, *self._down):
            linear.pack()

    def __call__(self, tiles: Sequence[torch.Tensor], num_rows: int) -> Sequence[torch.Tensor]:
        """Map tiles `[ROW_TILE, hidden_size]` to tiles of the same shape; only the first `num_rows` rows count."""
        rows = joined(tiles)[:num_rows]
        shares, chosen = self._route(tiles, num_rows)
        total = torch.zeros(rows.shape, dtype=torch.float32)
        for index in sorted(set(chosen.flatten().tolist())):
            senders, places = torch.where(chosen == index)
            given = [self._expert(index, tile) for tile in tiles_of(pad_rows(rows[senders]))]
            weighted = joined(given)[: len(senders)].float() * shares[senders, places, None]
            total.index_add_(0, senders, weighted)
        return tiles_of(pad_rows(total.to(rows.dtype)))

    def _route(self, tiles: Sequence[torch.Tensor], num_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return each row's shares of its experts and their indexes, both `[num_rows, num_chosen]`."""
        probabilities = [torch.softmax(self._router(tile).float(), dim=-1) for tile in tiles]
        shares, chosen = torch.topk(joined(probabilities)[:num_rows], self._config.num_chosen, dim=-1)
        if self._config.normalizes:
            shares = shares / shares.sum(dim=-1, keepdim=True)
        return shares, chosen

    def _expert(self, index: int, tile: torch.Tensor) -> torch.Tensor:
        return self._down[index](gated(self._gate_up[index](tile), self._activation))


def gated(gate_up: torch.Tensor, activation: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Return activation(gate) · up of `[n, 2 · inner]`.

    A thread's share that ends inside a row gives its last elements to a scalar function, which rounds otherwise than
    the vector one: so a few rows at a time, too few to be shared.
    """
    gate, up = gate_up.chunk(2, dim=-1)
    num_rows = max(1, (PARALLEL_GRAIN - 1) // gate.shape[-1])
    return joined([activation(part) for part in torch.split(gate, num_rows)]) * up
