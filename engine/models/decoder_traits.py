"""What tells one family of decoders from another beyond the numbers of its config.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

NEUTRAL: dict[str, Any] = {
    "attention_multiplier": None,
    "query_pre_attn_scalar": None,
    "embedding_multiplier": 1.0,
    "residual_multiplier": 1.0,
    "logits_scaling": 1.0,
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
    "partial_rotary_factor": 1.0,
    "no_rope_layers": None,
    "no_rope_layer_interval": None,
    "use_bidirectional_attention": False,
    "is_causal": True,
    "per_layer_config": None,
}
"""Settings that change what is computed → the value that changes nothing. A family obeys those among its defaults."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertNames:
    """What a family calls the tensors of its experts, below a layer; `{}` stands for the expert's index."""

    router: str
    gate: str
    up: str
    down: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderTraits:
    """What a family does that its config.json does not say; a row of `families.DECODERS`.

    Attributes:
        model_type: The one model_type of a config.json whose defaults are those below.
        defaults: What the family assumes for settings that a config.json leaves out; those of `NEUTRAL` that are not
            among them are refused unless they change nothing.
        fixed: Settings that other families read, as they are in this one, whatever a config.json says.
        biases: Whose biases the family has: none ever; "config": what attention_bias and mlp_bias say; "attention":
            what attention_bias says; "qkv": always those of the query, key and value projections, and no others.
        norm: What a norm multiplies by: "narrow", the weight, after rounding to the type of the rows; "wide", the
            weight, in float32; "unit_offset", one more than the weight, in float32.
        norm_places: Where in a layer the norms stand: "before", "after" or "around" attention and MLP.
        qk_norm: How queries and keys are normalised before rotary: not at all, each "head", or the whole "width".
        windows: Which layers see only the last `sliding_window` positions: none; all; or, where the config has no
            `layer_types`, "each": all; "upper": those from `max_window_layers` on; "alternating": all but each
            `sliding_window_pattern`-th; "unrotated": those without rotary.
        switches_windows: Whether there are windows only where `use_sliding_window` is true.
        activations: The names that the config may give for the MLP's activation, and what each means here.
        activation_key: Where the config has that name.
        scales_embedding: Whether embeddings are multiplied by the root of the hidden size, in the type of the weights.
        rotates_windows_apart: Whether the layers with windows have a rotary embedding of their own.
        scalings: The kinds of rotary scaling that the family knows, and which of those here each is; if empty, all.
        fuses_tensors: Whether the checkpoint has query, key and value, and gate and up, as one tensor each.
        experts: The names of the experts' tensors; None for a family without experts.
    """

    model_type: str
    defaults: Mapping[str, Any] = field(default_factory=dict)
    fixed: Mapping[str, Any] = field(default_factory=dict)
    biases: Literal["none", "config", "attention", "qkv"] = "config"
    norm: Literal["narrow", "wide", "unit_offset"] = "narrow"
    norm_places: Literal["before", "after", "around"] = "before"
    qk_norm: Literal["none", "head", "width"] = "none"
    windows: Literal["none", "all", "each", "upper", "alternating", "unrotated"] = "none"
    switches_windows: bool = False
    activations: Mapping[str, str] = field(
        default_factory=lambda: {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"},
    )
    activation_key: str = "hidden_act"
    scales_embedding: bool = False
    rotates_windows_apart: bool = False
    scalings: Mapping[str, str] = field(default_factory=dict)
    fuses_tensors: bool = False
    experts: ExpertNames | None = None
