"""What a decoder is built from: the numbers of a config.json, read as its family reads them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from engine.errors import CheckpointError, UnsupportedModel
from engine.models.checkpoint import refuse_above_limit
from engine.models.decoder_traits import NEUTRAL, DecoderTraits
from engine.models.rope_scaling import number
from engine.models.rotary import RopeConfig

WINDOW, FULL = "sliding_attention", "full_attention"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsConfig:
    """The experts of a layer.

    Attributes:
        num_experts: How many there are.
        num_chosen: How many of them each row goes through.
        intermediate_size: Of each expert.
        normalizes: Whether the weights of the chosen ones are made to sum to 1.
    """

    num_experts: int
    num_chosen: int
    intermediate_size: int
    normalizes: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig:
    """One decoder's shape. Sizes are numbers of values.

    Attributes:
        ropes: How each layer rotates; None: not at all.
        windows: Positions each layer sees; None: all.
        experts: For each layer; None: it has a dense MLP.
        attention_scale: Factor of the scores of attention.
        attention_softcap: Bound of those scores by tanh; None: none.
        embedding_multiplier: Factor of the embeddings.
        residual_multiplier: Factor of what attention and MLP add.
        logits_divisor: Divides the logits.
        logits_softcap: Bound of the logits by tanh; None: none.
    """

    traits: DecoderTraits
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    max_positions: int
    activation: str
    ties_embeddings: bool
    has_qkv_bias: bool
    has_output_bias: bool
    has_mlp_bias: bool
    ropes: tuple[RopeConfig | None, ...]
    windows: tuple[int | None, ...]
    experts: tuple[ExpertsConfig | None, ...]
    attention_scale: float
    attention_softcap: float | None
    embedding_multiplier: float
    residual_multiplier: float
    logits_divisor: float
    logits_softcap: float | None

    @property
    def rotary_dims(self) -> tuple[int, ...]:
        """The dimensions that each way to rotate rotates."""
        return tuple(rope.dim for rope in set(self.ropes) if rope is not None)

    @classmethod
    def of(cls, config: dict[str, Any], traits: DecoderTraits) -> DecoderConfig:
        """Read the content of a config.json.

        Raises:
            UnsupportedModel: It asks for something that is not built, with the value.
            CheckpointError: A number is missing or makes no sense.
        """
        _refuse_variants(config, traits)
        raw = {**NEUTRAL, "rms_norm_eps": 1e-6, **traits.defaults, **config, **traits.fixed}
        hidden_size, num_heads = _count(raw, "hidden_size"), _count(raw, "num_attention_heads")
        num_kv_heads = _count(raw, "num_key_value_heads", num_heads)
        num_layers = _count(raw, "num_hidden_layers")
        head_dim = _count(raw, "head_dim", None if "head_dim" in traits.defaults else hidden_size // num_heads)
        if num_heads % num_kv_heads or head_dim % 2:
            raise CheckpointError(
                f"config.json: {num_heads} heads of {head_dim} over {num_kv_heads} K/V heads make no attention: "
                f"the first must be a multiple of the last, the head even"
            )
        attention_bias = traits.biases in ("config", "attention") and _flag(raw, "attention_bias")
        rotates = _rotating_layers(raw, traits, num_layers)
        windows = _windows(raw, traits, rotates)
        return cls(
            traits=traits,
            vocab_size=_count(raw, "vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=_count(raw, "intermediate_size"),
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            norm_eps=number(raw, "rms_norm_eps"),
            max_positions=_count(raw, "max_position_embeddings"),
            activation=_activation(raw, traits),
            ties_embeddings=_flag(raw, "tie_word_embeddings"),
            has_qkv_bias=attention_bias or traits.biases == "qkv",
            has_output_bias=attention_bias,
            has_mlp_bias=traits.biases == "config" and _flag(raw, "mlp_bias"),
            ropes=_ropes(raw, traits, head_dim, rotates, windows),
            windows=windows,
            experts=_experts(raw, traits, num_layers),
            attention_scale=_attention_scale(raw, traits, head_dim),
            attention_softcap=_cap(raw, "attn_logit_softcapping"),
            embedding_multiplier=number(raw, "embedding_multiplier"),
            residual_multiplier=number(raw, "residual_multiplier"),
            logits_divisor=number(raw, "logits_scaling"),
            logits_softcap=_cap(raw, "final_logit_softcapping"),
        )


def _refuse_variants(config: dict[str, Any], traits: DecoderTraits) -> None:
    if config.get("quantization_config"):
        raise UnsupportedModel(
            f"quantized checkpoints are not supported: quantization_config {config['quantization_config']}"
        )
    num_experts = {name: config[name] for name in ("num_experts", "num_local_experts") if name in config}
    if len(num_experts) > 1 and num_experts["num_experts"] != num_experts["num_local_experts"]:
        raise UnsupportedModel(f"{num_experts} contradict each other: give one of them")
    ropes = [_object(config, name) for name in ("rope_parameters", "rope_scaling")]
    ropes += [_object(rope, kind) for rope in ropes for kind in (FULL, WINDOW)]
    for settings in (config, *ropes):
        for key in NEUTRAL.keys() & settings.keys() - traits.defaults.keys():
            value, neutral = settings[key], NEUTRAL[key]
            if value != neutral and (value is not None or neutral is True):  # null means no
                raise UnsupportedModel(
                    f"{key} {value!r} is not built for this architecture; leave it out or {neutral!r}"
                )


def _activation(raw: dict[str, Any], traits: DecoderTraits) -> str:
    name = raw.get(traits.activation_key, "silu")
    if not isinstance(name, str):
        raise CheckpointError(f"config.json: {traits.activation_key} must be a name, got {name!r}")
    if name not in traits.activations:
        known = ", ".join(traits.activations)
        raise UnsupportedModel(f"{traits.activation_key} {name!r} is not supported; only {known} are")
    return traits.activations[name]


def _attention_scale(raw: dict[str, Any], traits: DecoderTraits, head_dim: int) -> float:
    if "attention_multiplier" in traits.defaults:
        return number(raw, "attention_multiplier")
    scalar = number(raw, "query_pre_attn_scalar") if "query_pre_attn_scalar" in traits.defaults else head_dim
    return float(scalar**-0.5)


def _rotating_layers(raw: dict[str, Any], traits: DecoderTraits, num_layers: int) -> tuple[bool, ...]:
    if "no_rope_layers" not in traits.defaults:
        return (True,) * num_layers
    if raw["no_rope_layers"] is None:
        interval = _count(raw, "no_rope_layer_interval")
        return tuple((i + 1) % interval != 0 for i in range(num_layers))
    flags = _list(raw, "no_rope_layers")  # 1 where there is rotary, whatever the name says
    if len(flags) < num_layers:
        raise CheckpointError(f"config.json: {len(flags)} no_rope_layers for {num_layers} layers")
    return tuple(bool(flag) for flag in flags[:num_layers])


def _ropes(
    raw: dict[str, Any],
    traits: DecoderTraits,
    head_dim: int,
    rotates: tuple[bool, ...],
    windows: tuple[int | None, ...],
) -> tuple[RopeConfig | None, ...]:
    if not traits.rotates_windows_apart:
        rope = RopeConfig.of(raw, head_dim, names=traits.scalings)
        return tuple(rope if is_rotated else None for is_rotated in rotates)
    parameters, scaling = _object(raw, "rope_parameters"), _object(raw, "rope_scaling")
    if parameters.keys() - {FULL, WINDOW} or (scaling and parameters and not parameters.get(FULL)):
        raise UnsupportedModel(f"rope_parameters must be given for {FULL} and {WINDOW}, got {parameters}")
    # As in transformers, a scaling that alone names its kind by the older name, type, is not heard, nor is truncate.
    full = _object(parameters, FULL) | ({} if parameters else {"rope_type": "default"}) | scaling | {"truncate": True}
    local = {"rope_theta": raw["rope_local_base_freq"]} | _object(parameters, WINDOW) | {"truncate": True}
    alone = raw | {"original_max_position_embeddings": None}  # only what stands in their own parameters counts
    ropes = {False: RopeConfig.of(alone, head_dim, full), True: RopeConfig.of(alone, head_dim, local)}
    return tuple(ropes[window is not None] for window in windows)


def _windows(raw: dict[str, Any], traits: DecoderTraits, rotates: tuple[bool, ...]) -> tuple[int | None, ...]:
    size = raw.get("sliding_window")
    if size is not None and (not isinstance(size, int) or isinstance(size, bool) or size < 1):
        raise CheckpointError(f"config.json: sliding_window must be a whole number above 0 or null, got {size!r}")
    if traits.windows == "none" or (traits.switches_windows and not _flag(raw, "use_sliding_window")):
        size = None
    has_windows = size is not None or traits.windows == "alternating"
    kinds = [WINDOW if has_windows and is_windowed else FULL for is_windowed in _window_layers(raw, traits, rotates)]
    asked = kinds if raw.get("layer_types") is None else _list(raw, "layer_types")
    unknown = [kind for kind in asked if kind not in (FULL, WINDOW)]
    if unknown:
        raise UnsupportedModel(f"layer_types {unknown} are not supported; only {FULL} and {WINDOW} are")
    if len(asked) != len(kinds):
        raise CheckpointError(f"config.json: {len(asked)} layer_types for {len(kinds)} layers")
    if (size is None and WINDOW in asked) or (traits.windows == "all" and asked != kinds):
        raise UnsupportedModel(
            f"layer_types {asked} are not built for this architecture with sliding_window {raw.get('sliding_window')}, "
            f"use_sliding_window {raw.get('use_sliding_window')}"
        )
    return tuple(size if kind == WINDOW else None for kind in asked)


def _window_layers(raw: dict[str, Any], traits: DecoderTraits, rotates: tuple[bool, ...]) -> tuple[bool, ...]:
    layers = range(len(rotates))
    if traits.windows == "upper":
        return tuple(i >= _count(raw, "max_window_layers", least=0) for i in layers)
    if traits.windows == "alternating":
        return tuple((i + 1) % _count(raw, "sliding_window_pattern") != 0 for i in layers)
    if traits.windows == "unrotated":
        return tuple(not is_rotated for is_rotated in rotates)
    return (traits.windows in ("all", "each"),) * len(rotates)


def _experts(raw: dict[str, Any], traits: DecoderTraits, num_layers: int) -> tuple[ExpertsConfig | None, ...]:
    if traits.experts is None:
        return (None,) * num_layers
    experts = ExpertsConfig(
        num_experts=_count(raw, "num_local_experts" if "num_local_experts" in raw else "num_experts"),
        num_chosen=_count(raw, "num_experts_per_tok"),
        intermediate_size=_count(raw, "moe_intermediate_size", raw.get("intermediate_size")),
        normalizes=_flag(raw, "norm_topk_prob"),
    )
    if experts.num_chosen > experts.num_experts:
        raise CheckpointError(f"config.json: {experts.num_chosen} num_experts_per_tok of {experts.num_experts} experts")
    dense, step = _list(raw, "mlp_only_layers"), _count(raw, "decoder_sparse_step")
    return tuple(experts if i not in dense and (i + 1) % step == 0 else None for i in range(num_layers))


def _cap(raw: dict[str, Any], key: str) -> float | None:
    return None if raw[key] is None else number(raw, key)


def _count(raw: dict[str, Any], key: str, default: int | None = None, *, least: int = 1) -> int:
    value = raw.get(key)
    if value is None:
        value = default
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise CheckpointError(f"config.json: {key} must be a whole number above {least - 1}, got {value!r}")
    refuse_above_limit(key, value)
    return value


def _list(raw: dict[str, Any], key: str) -> list[Any]:
    value = raw.get(key)
    if value is not None and not isinstance(value, list):
        raise CheckpointError(f"config.json: {key} must be a list, got {value!r}")
    return value or []


def _object(raw: dict[str, Any], key: str) -> dict[str, Any]:
    value = raw.get(key)
    if value is not None and not isinstance(value, dict):
        raise CheckpointError(f"config.json: {key} must be an object, got {value!r}")
    return value or {}


def _flag(raw: dict[str, Any], key: str) -> bool:
    value = raw.get(key, False)
    if not isinstance(value, bool):
        raise CheckpointError(f"config.json: {key} must be true or false, got {value!r}")
    return value
