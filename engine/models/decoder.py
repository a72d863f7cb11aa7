"""One decoder for the families that differ from llama by traits: embedding, layers, final norm, head.

A step's rows, of whatever requests, go through the layers as tiles of `ROW_TILE` rows (see `linear`); only attention
sees all rows at once::

    token_ids [T] → tiles [16, dim] ─┬─ norm → qkv → rotary ─┐
                                     │                  attend [T, heads, head_dim]   (backend, writes K/V pages)
                                     └── + ← output ─────────┘
                                       + ← down ← silu(gate) · up ← norm

So the value of a row depends on its request alone, bit for bit. Weights arrive through `destinations`: views into the
fused weights under the names that Hugging Face checkpoints use.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from engine.attention.base import AttentionBackend
from engine.models.decoder_config import DecoderConfig
from engine.models.linear import Linear, pad_rows, tiles_of
from engine.models.rotary import RotaryEmbedding, rotate

PARALLEL_GRAIN = 32768
"""Elements from which on torch splits an elementwise operation over threads, in the middle of rows."""


class Decoder:
    """A causal language model; call `destinations`, fill, `pack`, `use_attention`, then `forward` and `logits`."""

    def __init__(self, config: DecoderConfig, max_model_len: int, dtype: torch.dtype) -> None:
        """Allocate uninitialised weights of `dtype` and the rotary table of `max_model_len` positions."""
        self.config = config
        self._embedding = torch.empty(config.vocab_size, config.hidden_size, dtype=dtype)
        self._layers = [_Layer(config, dtype) for _ in range(config.num_layers)]
        self._norm = _RmsNorm(config.hidden_size, config.norm_eps, dtype)
        self._head = Linear(self._embedding if config.ties_embeddings else torch.empty_like(self._embedding))
        self._rotary = RotaryEmbedding(config.rope, config.head_dim, max_model_len, dtype)
        self._attention: AttentionBackend | None = None

    def destinations(self) -> dict[str, torch.Tensor]:
        """Name every tensor of the checkpoint and the view it is to be copied into; valid until `pack`."""
        tensors = {"model.embed_tokens.weight": self._embedding, "model.norm.weight": self._norm.weight}
        if not self.config.ties_embeddings:
            tensors["lm_head.weight"] = self._head.weight
        for index, layer in enumerate(self._layers):
            tensors |= {f"model.layers.{index}.{name}": tensor for name, tensor in layer.destinations().items()}
        return tensors

    def pack(self) -> None:
        """Bring the filled weights into the order the products want; call once."""
        for layer in self._layers:
            layer.pack()
        self._head.pack()

    def use_attention(self, backend: AttentionBackend) -> None:
        """Attend through `backend` from now on; the decoder does not own it."""
        self._attention = backend

    def forward(self, token_ids: torch.Tensor, positions: torch.Tensor, batch: Any) -> torch.Tensor:
        """Run the layers over a step's rows; the K/V of all rows is written.

        Args:
            token_ids: `[num_rows]`, int64.
            positions: Of the rows in their requests, `[num_rows]`, int64.
            batch: What the attention backend's `prepare` gave for this step.

        Returns:
            Normalised hidden states, `[num_rows, hidden_size]`.
        """
        assert self._attention is not None
        config, num_rows = self.config, len(token_ids)
        cos, sin = (tiles_of(part) for part in self._rotary.at(pad_rows(positions)))
        tiles = list(tiles_of(F.embedding(pad_rows(token_ids), self._embedding)))
        sizes = [config.num_heads, config.num_kv_heads, config.num_kv_heads]
        scale = config.head_dim**-0.5
        for index, layer in enumerate(self._layers):
            heads = [layer.project(*tile) for tile in zip(tiles, cos, sin, strict=True)]
            q, k, v = torch.split(_joined(heads)[:num_rows], sizes, dim=1)
            attended = self._attention.attend(index, q, k, v, scale, config.windows[index], None, None, batch)
            attended = pad_rows(attended.flatten(1))
            tiles = [layer.combine(*tile) for tile in zip(tiles, tiles_of(attended), strict=True)]
        return _joined([self._norm(tile) for tile in tiles])[:num_rows]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the scores of all tokens, float32 `[n, vocab_size]`, of rows that `forward` gave, n at least 1."""
        tiles = [self._head(tile) for tile in tiles_of(pad_rows(hidden))]
        return _joined(tiles)[: len(hidden)].float()


class _Layer:
    """Attention and MLP, each behind a norm and added to what came in."""

    def __init__(self, config: DecoderConfig, dtype: torch.dtype) -> None:
        self._config = config
        hidden, inner = config.hidden_size, config.intermediate_size
        self._sizes = (config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim)
        num_outputs = self._sizes[0] + 2 * self._sizes[1]
        self._input_norm = _RmsNorm(hidden, config.norm_eps, dtype)
        self._qkv = Linear.empty(hidden, num_outputs, bias=config.has_qkv_bias, dtype=dtype)
        self._output = Linear.empty(self._sizes[0], hidden, bias=config.has_output_bias, dtype=dtype)
        self._mlp_norm = _RmsNorm(hidden, config.norm_eps, dtype)
        self._gate_up = Linear.empty(hidden, 2 * inner, bias=config.has_mlp_bias, dtype=dtype)
        self._down = Linear.empty(inner, hidden, bias=config.has_mlp_bias, dtype=dtype)
        self._query_norm: _RmsNorm | None = None
        self._key_norm: _RmsNorm | None = None
        if config.has_qk_norm:
            self._query_norm = _RmsNorm(config.head_dim, config.norm_eps, dtype)
            self._key_norm = _RmsNorm(config.head_dim, config.norm_eps, dtype)

    def destinations(self) -> dict[str, torch.Tensor]:
        tensors = {
            "input_layernorm.weight": self._input_norm.weight,
            "post_attention_layernorm.weight": self._mlp_norm.weight,
        }
        if self._query_norm is not None and self._key_norm is not None:
            tensors["self_attn.q_norm.weight"] = self._query_norm.weight
            tensors["self_attn.k_norm.weight"] = self._key_norm.weight
        queries, keys = self._sizes
        inner = self._config.intermediate_size
        fused = (
            (self._qkv, (("self_attn.q_proj", queries), ("self_attn.k_proj", keys), ("self_attn.v_proj", keys))),
            (self._output, (("self_attn.o_proj", self._config.hidden_size),)),
            (self._gate_up, (("mlp.gate_proj", inner), ("mlp.up_proj", inner))),
            (self._down, (("mlp.down_proj", self._config.hidden_size),)),
        )
        for linear, parts in fused:
            names, sizes = zip(*parts, strict=True)
            for kind, tensor in (("weight", linear.weight), ("bias", linear.bias)):
                if tensor is not None:
                    views = torch.split(tensor, list(sizes))
                    tensors |= {f"{name}.{kind}": view for name, view in zip(names, views, strict=True)}
        return tensors

    def pack(self) -> None:
        for linear in (self._qkv, self._output, self._gate_up, self._down):
            linear.pack()

    def project(self, hidden: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Return a tile's queries, keys (both rotated) and values, `[ROW_TILE, heads + 2 · K/V heads, head_dim]`."""
        config = self._config
        heads = self._qkv(self._input_norm(hidden)).view(len(hidden), -1, config.head_dim)
        rotated, values = torch.split(heads, [config.num_heads + config.num_kv_heads, config.num_kv_heads], dim=1)
        if self._query_norm is not None and self._key_norm is not None:
            queries, keys = torch.split(rotated, [config.num_heads, config.num_kv_heads], dim=1)
            rotated = torch.cat((self._query_norm(queries), self._key_norm(keys)), dim=1)
        return torch.cat((rotate(rotated, cos, sin), values), dim=1)

    def combine(self, hidden: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """Add attention's output and the MLP's to a tile, `[ROW_TILE, hidden_size]`."""
        hidden = hidden + self._output(attended)
        return hidden + self._down(_silu_times(self._gate_up(self._mlp_norm(hidden))))


class _RmsNorm:
    """Divide each row by its root mean square (computed in float32), times a weight."""

    def __init__(self, size: int, eps: float, dtype: torch.dtype) -> None:
        self.weight = torch.empty(size, dtype=dtype)
        self._eps = eps

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        wide = rows.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self._eps)
        return self.weight * wide.to(rows.dtype)


def _silu_times(gate_up: torch.Tensor) -> torch.Tensor:
    """Return silu(gate) · up of `[n, 2 · inner]`.

    A thread's share that ends inside a row gives its last elements to a scalar exponential, which rounds otherwise
    than the vector one: so a few rows at a time, too few to be shared.
    """
    gate, up = gate_up.chunk(2, dim=-1)
    num_rows = max(1, (PARALLEL_GRAIN - 1) // gate.shape[-1])
    return _joined([F.silu(part) for part in torch.split(gate, num_rows)]) * up


def _joined(tiles: list[torch.Tensor]) -> torch.Tensor:
    return tiles[0] if len(tiles) == 1 else torch.cat(tiles)
