"""Attention without pages, for a guard's probes: each sequence's keys and values lie in one piece.

Shares nothing with the backends, so that what the guard finds is the model's doing, and rounds where transformers' own
eager attention rounds, so that little of what it finds is rounding.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import torch

from engine.models.transformers_backend import AttentionCall


class WholeAttention:
    """Attention over the keys and values of whole sequences, which it keeps."""

    def __init__(self, window: int | None) -> None:
        """Narrow every layer's window to `window`, where that is not None."""
        self._window = window
        self._kept: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}

    def bind(self, sequences: Sequence[tuple[int, int]]) -> Callable[[AttentionCall], torch.Tensor]:
        """Return what answers the layers of a forward over rows of `sequences`: (id, number of rows)."""
        layers = itertools.count()

        def attend(call: AttentionCall) -> torch.Tensor:
            layer, lengths = next(layers), [length for _, length in sequences]
            parts = zip(sequences, *(torch.split(part, lengths) for part in (call.q, call.k, call.v)), strict=True)
            return torch.cat([self._attend(layer, sequence, call, q, k, v) for (sequence, _), q, k, v in parts])

        return attend

    def _attend(
        self, layer: int, sequence: int, call: AttentionCall, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor:
        if (layer, sequence) in self._kept:
            before_k, before_v = self._kept[layer, sequence]
            k, v = torch.cat((before_k, k)), torch.cat((before_v, v))
        self._kept[layer, sequence] = k, v
        group = q.shape[1] // k.shape[1]
        keys, values = (part.repeat_interleave(group, dim=1).transpose(0, 1) for part in (k, v))
        scores = q.transpose(0, 1) @ keys.transpose(1, 2) * call.scale
        if call.softcap is not None:
            scores = torch.tanh(scores / call.softcap) * call.softcap
        rows = torch.arange(len(k) - len(q), len(k))[:, None]
        hidden = torch.arange(len(k)) > rows
        if call.window is not None:
            hidden |= torch.arange(len(k)) <= rows - min(call.window, self._window or call.window)
        scores = scores.masked_fill(hidden, -torch.inf)
        if call.sinks is not None:
            scores = torch.cat((scores, call.sinks.to(q.dtype).view(-1, 1, 1).expand(-1, len(q), 1)), dim=-1)
        weights = torch.softmax(scores, dim=-1, dtype=torch.float32)[..., : len(k)]
        return (weights.to(values.dtype) @ values).transpose(0, 1).to(q.dtype)
