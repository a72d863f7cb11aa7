"""What the model runner needs of a model, whoever wrote it: its shape, a forward over a step's rows, logits."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

import torch

from engine.attention.base import AttentionPages
from engine.attention.reference import ReferenceAttention


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

    @property
    def operation_seconds(self) -> Mapping[str, float]:
        """Of the last forward the time by kind of operation; empty where it is not known."""

    def use_attention(self, pages: Any) -> None:
        """Attend to `pages` from now on, of the kind that was chosen with the model, which does not own them."""

    def forward(self, token_ids: torch.Tensor, positions: torch.Tensor, batch: Any) -> torch.Tensor:
        """Run the layers over rows of any requests, `[num_rows]` each; returns `[num_rows, hidden_size]`.

        `batch` is what the backend's `prepare` gave for this step; the K/V of all rows is written. What is returned
        holds until the next call.
        """

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the scores of all tokens, float32 `[n, vocab_size]`, of rows that `forward` gave, n at least 1.

        They may be changed, and hold until the next call.
        """


class BuiltModel(NamedTuple):
    """A model with its weights, for contexts of up to `max_model_len` tokens; weights are of `dtype`.

    `make_pages(spec, groups, num_heads, num_blocks, block_size, kv_dtype)` allocates the pages that it attends to.
    `greatest`, if the model has its own way, finds the greatest of its logits as `sampling.processors.greatest` does;
    what `Model.logits` gave is to be given to it at once, before it is changed.
    """

    model: Model
    max_model_len: int
    dtype: torch.dtype
    kv_dtype: torch.dtype
    make_pages: Callable[..., AttentionPages] = ReferenceAttention
    greatest: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]] | None = None
