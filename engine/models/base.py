"""What the model runner needs of a model, whoever wrote it: its shape, a forward over a step's rows, logits."""

from __future__ import annotations

from typing import Any, Protocol

import torch


class ModelShape(Protocol):
    """The numbers that size K/V pages and check requests; `windows` are positions a layer sees, None for all."""

    @property
    def num_layers(self) -> int:
        """Layers with a KV cache."""

    @property
    def num_heads(self) -> int:
        """Query heads a layer."""

    @property
    def num_kv_heads(self) -> int:
        """K/V heads a layer."""

    @property
    def head_dim(self) -> int:
        """Numbers a head, in the pages."""

    @property
    def vocab_size(self) -> int:
        """Token ids are below it."""

    @property
    def max_positions(self) -> int:
        """Longest prompt plus output."""

    @property
    def windows(self) -> tuple[int | None, ...]:
        """For each layer the positions a row sees, its own included."""


class Model(Protocol):
    """A causal language model with its weights."""

    @property
    def config(self) -> ModelShape:
        """Its shape."""

    def use_attention(self, pages: Any) -> None:
        """Attend to `pages` from now on, of the kind that was chosen with the model, which does not own them."""

    def forward(self, token_ids: torch.Tensor, positions: torch.Tensor, batch: Any) -> torch.Tensor:
        """Run the layers over rows of any requests, `[num_rows]` each; returns `[num_rows, hidden_size]`.

        `batch` is what the backend's `prepare` gave for this step; the K/V of all rows is written.
        """

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the scores of all tokens, float32 `[n, vocab_size]`, of rows that `forward` gave, n at least 1."""
