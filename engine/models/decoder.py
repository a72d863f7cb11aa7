"""One decoder for the families that differ from llama by traits: embedding, layers, final norm, head.

A step's rows, of whatever requests, go through the layers as tiles of `ROW_TILE` rows (see `linear`); only attention
sees all rows at once, and experts gather rows of all tiles into tiles of their own (see `mlp`)::

    token_ids [T] → tiles [16, dim] ─┬─ norm → qkv → rotary ─┐
                                     │                  attend [T, heads, head_dim]   (backend, writes K/V pages)
                                     └── + ← output ─────────┘
                                       + ← MLP ← norm

So the value of a row depends on its request alone, bit for bit. Weights arrive through `destinations`: views into the
fused weights under the names that Hugging Face checkpoints use.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from engine.attention.base import AttentionBackend
from engine.models.decoder_config import DecoderConfig
from engine.models.linear import Linear, joined, pad_rows, tiles_of
from engine.models.mlp import DenseMlp, Experts
from engine.models.rotary import RotaryEmbedding, rotate

NORM_NAMES = {
    "before": ("input_layernorm", None, "post_attention_layernorm", None),
    "after": (None, "post_attention_layernorm", None, "post_feedforward_layernorm"),
    "around": (
        "input_layernorm",
        "post_attention_layernorm",
        "pre_feedforward_layernorm",
        "post_feedforward_layernorm",
    ),
}
"""A layer's norms before and after attention, before and after the MLP, for each `DecoderTraits.norm_places`."""
Rotation = tuple[torch.Tensor, torch.Tensor]


class Decoder:
    """A causal language model; call `destinations`, fill, `pack`, `use_attention`, then `forward` and `logits`."""

    def __init__(self, config: DecoderConfig, max_model_len: int, dtype: torch.dtype) -> None:
        """Allocate uninitialised weights of `dtype` and the rotary tables of `max_model_len` positions.

        Raises:
            UnsupportedModel: A rotary embedding cannot be had for so many positions.
        """
        self.config = config
        self._embedding = torch.empty(config.vocab_size, config.hidden_size, dtype=dtype)
        self._embedding_scale = embedding_scale(config, dtype)
        self._layers = [Layer(config, index, dtype) for index in range(config.num_layers)]
        self._norm = Norm(config.hidden_size, config, dtype)
        self._head = Linear(self._embedding if config.ties_embeddings else torch.empty_like(self._embedding))
        self._rotaries = {rope: RotaryEmbedding(rope, max_model_len, dtype) for rope in set(config.ropes) if rope}
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
        self._norm.pack()
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
        tiles: Sequence[torch.Tensor] = tiles_of(self._embed(pad_rows(token_ids)))
        rotations = self._rotations(pad_rows(positions), len(tiles))
        sizes = [config.num_heads, config.num_kv_heads, config.num_kv_heads]
        scale, softcap = config.attention_scale, config.attention_softcap
        for index, layer in enumerate(self._layers):
            rotation = rotations[config.ropes[index]]
            heads = [layer.project(*tile) for tile in zip(tiles, rotation, strict=True)]
            q, k, v = torch.split(joined(heads)[:num_rows], sizes, dim=1)
            attended = self._attention.attend(index, q, k, v, scale, config.windows[index], softcap, None, batch)
            tiles = layer.combine(tiles, tiles_of(pad_rows(attended.flatten(1))), num_rows)
        return joined([self._norm(tile) for tile in tiles])[:num_rows]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the scores of all tokens, float32 `[n, vocab_size]`, of rows that `forward` gave, n at least 1."""
        tiles = [self._head(tile) for tile in tiles_of(pad_rows(hidden))]
        logits = joined(tiles)[: len(hidden)].float() / self.config.logits_divisor
        cap = self.config.logits_softcap
        if cap is None:
            return logits
        return torch.stack([torch.tanh(row / cap) * cap for row in logits])  # alone, for the reason of `mlp.gated`

    def _embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        embedded = F.embedding(token_ids, self._embedding)
        return embedded if self._embedding_scale == 1 else embedded * self._embedding_scale

    def _rotations(self, positions: torch.Tensor, num_tiles: int) -> dict[Any, Sequence[Rotation | None]]:
        """Return for each way to rotate what each tile is rotated by; nothing for the key None."""
        rotations: dict[Any, Sequence[Rotation | None]] = {None: [None] * num_tiles}
        for rope, rotary in self._rotaries.items():
            cos, sin = rotary.at(positions)
            rotations[rope] = list(zip(tiles_of(cos), tiles_of(sin), strict=True))
        return rotations


def embedding_scale(config: DecoderConfig, dtype: torch.dtype) -> float:
    """Return what embedded tokens are multiplied by."""
    if not config.traits.scales_embedding:
        return config.embedding_multiplier
    return config.embedding_multiplier * torch.tensor(config.hidden_size**0.5, dtype=dtype, device="cpu").item()


class Layer:
    """Attention and MLP, each with its norms and added to what came in."""

    def __init__(self, config: DecoderConfig, index: int, dtype: torch.dtype) -> None:
        self._config, traits = config, config.traits
        hidden, experts = config.hidden_size, config.experts[index]
        queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self._sizes = [queries, keys, keys]
        self.qkv = Linear.empty(hidden, sum(self._sizes), bias=config.has_qkv_bias, dtype=dtype)
        self.output = Linear.empty(queries, hidden, bias=config.has_output_bias, dtype=dtype)
        self.mlp: DenseMlp | Experts
        if experts is not None and traits.experts is not None:
            self.mlp = Experts(experts, traits.experts, hidden, config.activation, dtype)
        else:
            self.mlp = DenseMlp(
                hidden,
                config.intermediate_size,
                config.activation,
                bias=config.has_mlp_bias,
                fused=traits.fuses_tensors,
                dtype=dtype,
            )
        self.norms = {name: Norm(hidden, config, dtype) for name in NORM_NAMES[traits.norm_places] if name}
        self.head_norms: dict[str, Norm] = {}
        if traits.qk_norm != "none":
            widths = (queries, keys) if traits.qk_norm == "width" else (config.head_dim, config.head_dim)
            self.head_norms = {
                name: Norm(width, config, dtype) for name, width in zip(("q_norm", "k_norm"), widths, strict=True)
            }

    def destinations(self) -> dict[str, torch.Tensor]:
        """Name every tensor below the layer and the view it is to be copied into; valid until `pack`."""
        tensors = {f"{name}.weight": norm.weight for name, norm in self.norms.items()}
        tensors |= {f"self_attn.{name}.weight": norm.weight for name, norm in self.head_norms.items()}
        if self._config.traits.fuses_tensors:
            tensors |= self.qkv.parts(["self_attn.qkv_proj"])
        else:
            tensors |= self.qkv.parts([f"self_attn.{letter}_proj" for letter in "qkv"], self._sizes)
        return tensors | self.output.parts(["self_attn.o_proj"]) | self.mlp.destinations()

    def pack(self) -> None:
        """Bring the filled weights into the order the products want; call once."""
        for part in (self.qkv, self.output, self.mlp, *self.norms.values(), *self.head_norms.values()):
            part.pack()

    def project(self, hidden: torch.Tensor, rotation: Rotation | None) -> torch.Tensor:
        """Return a tile's queries, keys (both rotated) and values, `[ROW_TILE, heads + 2 · K/V heads, head_dim]`."""
        config = self._config
        qkv = self.qkv(self._normalized(0, hidden))
        if self.head_norms:
            queries, keys, values = torch.split(qkv, self._sizes, dim=-1)
            qkv = torch.cat((self.head_norms["q_norm"](queries), self.head_norms["k_norm"](keys), values), dim=-1)
        heads = qkv.view(len(hidden), -1, config.head_dim)
        if rotation is None:
            return heads
        rotated, values = torch.split(heads, [config.num_heads + config.num_kv_heads, config.num_kv_heads], dim=1)
        return torch.cat((rotate(rotated, *rotation), values), dim=1)

    def combine(
        self, tiles: Sequence[torch.Tensor], attended: Sequence[torch.Tensor], num_rows: int
    ) -> list[torch.Tensor]:
        """Add attention's output and the MLP's to tiles `[ROW_TILE, hidden_size]`; `num_rows` rows of them count."""
        tiles = self._added(tiles, 1, [self.output(tile) for tile in attended])
        return self._added(tiles, 3, self.mlp([self._normalized(2, tile) for tile in tiles], num_rows))

    def _added(self, tiles: Sequence[torch.Tensor], place: int, outputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        outputs = [self._normalized(place, output) for output in outputs]
        if self._config.residual_multiplier != 1:
            outputs = [output * self._config.residual_multiplier for output in outputs]
        return [tile + output for tile, output in zip(tiles, outputs, strict=True)]

    def _normalized(self, place: int, tile: torch.Tensor) -> torch.Tensor:
        name = NORM_NAMES[self._config.traits.norm_places][place]
        return self.norms[name](tile) if name else tile


class Norm:
    """Divide groups of numbers by their root mean square (computed in float32), times a weight.

    A row may hold several groups of the weight's size, as queries hold heads.
    """

    def __init__(self, size: int, config: DecoderConfig, dtype: torch.dtype) -> None:
        self.weight = torch.empty(size, dtype=dtype)
        self._kind = config.traits.norm
        self._eps = config.norm_eps

    def pack(self) -> None:
        """Make of the filled weight what to multiply by; call once."""
        if self._kind == "unit_offset":
            self.weight = 1 + self.weight.float()

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """Return `rows`, each group of the weight's size divided and multiplied, in their own type."""
        wide = rows.float().view(*rows.shape[:-1], -1, len(self.weight))
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self._eps)
        if self._kind == "narrow":
            return (self.weight * wide.to(rows.dtype)).view_as(rows)
        return (self.weight * wide).to(rows.dtype).view_as(rows)
