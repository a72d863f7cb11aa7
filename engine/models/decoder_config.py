"""What a decoder is built from: the numbers of a config.json, and the traits that tell one family from another."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from engine.errors import CheckpointError, UnsupportedModel
from engine.models.rotary import RopeConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderTraits:
    """What a family does that its config.json does not say; a row of `registry.DECODERS`.

    Attributes:
        biases: Whose biases the family has: none ever; "config": what attention_bias and mlp_bias say; "qkv": always
            those of the query, key and value projections, and no others.
        qk_norm: Whether queries and keys are normalised, head by head, before rotary.
        windows: Which layers see only the last `sliding_window` positions: none; all; "upper": those from
            `max_window_layers` on, where `use_sliding_window` is true.
    """

    biases: Literal["none", "config", "qkv"] = "config"
    qk_norm: bool = False
    windows: Literal["none", "all", "upper"] = "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig:
    """One decoder's shape. Sizes are numbers of values, `windows` positions a layer (None: all)."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    max_positions: int
    rope: RopeConfig
    ties_embeddings: bool
    has_qkv_bias: bool
    has_output_bias: bool
    has_mlp_bias: bool
    has_qk_norm: bool
    windows: tuple[int | None, ...]

    @classmethod
    def of(cls, raw: dict[str, Any], traits: DecoderTraits) -> DecoderConfig:
        """Read the content of a config.json.

        Raises:
            UnsupportedModel: It asks for something that is not built, with the value.
            CheckpointError: A number is missing or makes no sense.
        """
        _refuse_variants(raw)
        hidden_size, num_heads = _count(raw, "hidden_size"), _count(raw, "num_attention_heads")
        num_kv_heads = _count(raw, "num_key_value_heads", num_heads)
        num_layers = _count(raw, "num_hidden_layers")
        head_dim = _count(raw, "head_dim", hidden_size // num_heads)
        if num_heads % num_kv_heads or head_dim % 2:
            raise CheckpointError(
                f"config.json: {num_heads} heads of {head_dim} over {num_kv_heads} K/V heads make no attention: "
                f"the first must be a multiple of the last, the head even"
            )
        attention_bias = traits.biases == "config" and _flag(raw, "attention_bias")
        return cls(
            vocab_size=_count(raw, "vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=_count(raw, "intermediate_size"),
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
            max_positions=_count(raw, "max_position_embeddings"),
            rope=RopeConfig.of(raw),
            ties_embeddings=_flag(raw, "tie_word_embeddings"),
            has_qkv_bias=attention_bias or traits.biases == "qkv",
            has_output_bias=attention_bias,
            has_mlp_bias=traits.biases == "config" and _flag(raw, "mlp_bias"),
            has_qk_norm=traits.qk_norm,
            windows=_windows(raw, traits, num_layers),
        )


def _refuse_variants(raw: dict[str, Any]) -> None:
    quantization = raw.get("quantization_config")
    if quantization:
        raise UnsupportedModel(f"quantized checkpoints are not supported: quantization_config {quantization}")
    activation = raw.get("hidden_act", "silu")
    if activation != "silu":
        raise UnsupportedModel(f"hidden_act {activation!r} is not supported; only silu is")


def _windows(raw: dict[str, Any], traits: DecoderTraits, num_layers: int) -> tuple[int | None, ...]:
    if traits.windows == "none" or (traits.windows == "upper" and not _flag(raw, "use_sliding_window")):
        return (None,) * num_layers
    size = raw.get("sliding_window", 4096)  # what transformers assumes for the first mistral, which does not say
    if size is None:
        return (None,) * num_layers
    if not isinstance(size, int) or size < 1:
        raise CheckpointError(f"config.json: sliding_window must be a whole number above 0 or null, got {size!r}")
    first = 0 if traits.windows == "all" else raw.get("max_window_layers", 28)
    names = {"full_attention": None, "sliding_attention": size}
    kinds = raw.get("layer_types") or [
        "full_attention" if i < first else "sliding_attention" for i in range(num_layers)
    ]
    if set(kinds) - names.keys():
        raise UnsupportedModel(f"layer_types {sorted(set(kinds) - names.keys())} are not supported")
    if len(kinds) != num_layers:
        raise CheckpointError(f"config.json: {len(kinds)} layer_types for {num_layers} layers")
    return tuple(names[kind] for kind in kinds)


def _count(raw: dict[str, Any], key: str, default: int | None = None) -> int:
    value = raw.get(key)
    if value is None:
        value = default
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise CheckpointError(f"config.json: {key} must be a whole number above 0, got {value!r}")
    return value


def _flag(raw: dict[str, Any], key: str) -> bool:
    value = raw.get(key, False)
    if not isinstance(value, bool):
        raise CheckpointError(f"config.json: {key} must be true or false, got {value!r}")
    return value
