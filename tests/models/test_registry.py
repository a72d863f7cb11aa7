from __future__ import annotations

import copy
from typing import Any

import pytest
import transformers

from engine.errors import CheckpointError, UnsupportedModel
from engine.models.families import DECODERS
from engine.models.registry import decoder_config
from engine.models.rope_scaling import UNSCALED

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
    "max_position_embeddings": 128,
}
YARN: dict[str, Any] = {"rope_type": "yarn", "rope_theta": 10.0, "factor": 4.0}
GEMMA3: dict[str, Any] = {"architectures": ["Gemma3ForCausalLM"]}


def test_what_a_config_leaves_out_is_what_transformers_assumes() -> None:
    config = decoder_config({key: value for key, value in LLAMA.items() if key != "num_key_value_heads"})
    assert (config.num_kv_heads, config.head_dim, config.norm_eps) == (4, 16, 1e-6)
    flags = (config.ties_embeddings, config.has_qkv_bias, config.has_output_bias, config.has_mlp_bias)
    assert not any(flags)
    assert config.windows == (None, None, None)


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        ({"architectures": ["LlamaForCausalLM"], "sliding_window": 8}, (None, None, None)),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 8}, (8, 8, 8)),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": None}, (None, None, None)),
        ({"architectures": ["Qwen2ForCausalLM"], "sliding_window": 8}, (None, None, None)),
        (
            {"architectures": ["Qwen2ForCausalLM"], "sliding_window": 8, "use_sliding_window": True}
            | {"max_window_layers": 2},
            (None, None, 8),
        ),
        (
            {"architectures": ["Qwen3ForCausalLM"], "sliding_window": 8, "use_sliding_window": True}
            | {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
            (8, None, 8),
        ),
        ({"architectures": ["Qwen3MoeForCausalLM"], "sliding_window": 8}, (None, None, None)),
        ({"architectures": ["Qwen3MoeForCausalLM"], "use_sliding_window": True}, (4096, 4096, 4096)),
        ({"architectures": ["MixtralForCausalLM"]}, (None, None, None)),
        ({"architectures": ["Phi3ForCausalLM"], "sliding_window": 8}, (8, 8, 8)),
        ({"architectures": ["Gemma2ForCausalLM"]}, (4096, None, 4096)),
        ({"architectures": ["Gemma3ForCausalLM"], "sliding_window": 8, "sliding_window_pattern": 3}, (8, 8, None)),
        ({"architectures": ["Gemma3ForCausalLM"], "sliding_window": 8}, (8, 8, 8)),
        (
            {"architectures": ["SmolLM3ForCausalLM"], "sliding_window": 8, "use_sliding_window": True}
            | {"no_rope_layers": [1, 0, 1]},
            (None, 8, None),
        ),
        ({"architectures": ["SmolLM3ForCausalLM"], "sliding_window": 8, "no_rope_layers": [1, 0, 1]}, (None,) * 3),
    ],
)
def test_each_family_reads_its_windows(changes: dict[str, Any], windows: tuple[int | None, ...]) -> None:
    assert decoder_config(LLAMA | changes).windows == windows


OLD_CONFIGS: list[dict[str, Any]] = [
    {},
    {"rope_theta": 777.0, "rope_local_base_freq": 55.0, "rope_scaling": {"rope_type": "linear", "factor": 8.0}},
    {
        "rope_parameters": {
            "full_attention": {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64}
        }
    },
    {
        "original_max_position_embeddings": 32,
        "rope_parameters": {"full_attention": {"rope_type": "yarn", "factor": 2.0, "rope_theta": 99.0}},
        "rope_scaling": {"factor": 4.0},
    },
]


@pytest.mark.parametrize("changes", OLD_CONFIGS)
def test_gemma_3_has_one_base_for_its_windows_and_one_for_all_else(changes: dict[str, Any]) -> None:
    raw = LLAMA | GEMMA3 | {"sliding_window_pattern": 2, "head_dim": 16} | changes
    oracle = transformers.Gemma3TextConfig(**copy.deepcopy(raw)).rope_parameters
    windowed, full, _ = decoder_config(raw).ropes
    assert windowed is not None
    assert full is not None
    assert (windowed.theta, windowed.scaling) == (oracle["sliding_attention"]["rope_theta"], UNSCALED)
    assert full.theta == oracle["full_attention"]["rope_theta"]
    assert getattr(full.scaling, "factor", None) == oracle["full_attention"].get("factor")
    original = oracle["full_attention"].get("original_max_position_embeddings")
    assert getattr(full.scaling, "original_max_positions", None) == original


def test_gemma_s_first_name_for_its_activation_is_known() -> None:
    gemma = LLAMA | {"architectures": ["GemmaForCausalLM"], "hidden_act": "gelu"}
    assert decoder_config(gemma).activation == "gelu_tanh"


@pytest.mark.parametrize("architecture", DECODERS)
def test_what_a_family_s_config_leaves_out_is_what_transformers_assumes(architecture: str) -> None:
    raw = LLAMA | {"architectures": [architecture], "layer_types": None}
    name = architecture.removesuffix("ForCausalLM")
    oracle = getattr(transformers, {"Gemma3": "Gemma3Text"}.get(name, name) + "Config")(**LLAMA)
    ours = decoder_config({key: value for key, value in raw.items() if value is not None})
    assert ours.ties_embeddings == oracle.tie_word_embeddings
    assert ours.norm_eps == oracle.rms_norm_eps
    assert ours.head_dim == (getattr(oracle, "head_dim", None) or 16)
    assert ours.logits_softcap == getattr(oracle, "final_logit_softcapping", None)
    assert ours.attention_softcap == getattr(oracle, "attn_logit_softcapping", None)
    scale = getattr(oracle, "query_pre_attn_scalar", ours.head_dim) ** -0.5
    assert ours.attention_scale == getattr(oracle, "attention_multiplier", scale)
    assert [window is not None for window in ours.windows] == [
        kind == "sliding_attention" for kind in getattr(oracle, "layer_types", None) or _alike(oracle)
    ]
    experts = ours.experts[0]
    assert experts is None or (experts.num_experts, experts.num_chosen) == (
        oracle.num_local_experts,
        oracle.num_experts_per_tok,
    )
    if name not in ("Gemma3", "Olmo3"):
        assert {rope.theta for rope in ours.ropes if rope} == {oracle.rope_parameters["rope_theta"]}


def _alike(oracle: Any) -> list[str]:
    has_windows = getattr(oracle, "sliding_window", None) is not None
    return ["sliding_attention" if has_windows else "full_attention"] * oracle.num_hidden_layers


@pytest.mark.parametrize("architectures", [["GPT2LMHeadModel"], [], None])
def test_an_unknown_architecture_is_refused_with_the_known_ones(architectures: Any) -> None:
    with pytest.raises(UnsupportedModel) as refusal:
        decoder_config(LLAMA | {"architectures": architectures})
    assert all(known in str(refusal.value) for known in DECODERS)
    assert not architectures or architectures[0] in str(refusal.value)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hidden_act": "gelu"}, "gelu"),
        ({"quantization_config": {"quant_method": "gptq"}}, "gptq"),
        ({"rope_scaling": {"rope_type": "ntk", "factor": 4.0}}, "ntk"),
        ({"partial_rotary_factor": 0.5}, r"partial_rotary_factor 0\.5"),
        ({"rope_parameters": {"rope_theta": 5.0, "partial_rotary_factor": 0.25}}, r"partial_rotary_factor 0\.25"),
        ({"attention_multiplier": 0.5}, r"attention_multiplier 0\.5"),
        ({"no_rope_layer_interval": 4}, "no_rope_layer_interval 4"),
        ({"attn_logit_softcapping": 50.0}, r"attn_logit_softcapping 50\.0"),
        ({"use_bidirectional_attention": True, "architectures": ["GemmaForCausalLM"]}, "use_bidirectional_attention"),
        ({"is_causal": False}, "is_causal False"),
        ({"per_layer_config": {"1": {"sliding_window": 3}}}, "per_layer_config"),
        (GEMMA3 | {"attn_logit_softcapping": 50.0}, r"attn_logit_softcapping 50\.0"),
        (GEMMA3 | {"hidden_activation": "gelu"}, "hidden_activation 'gelu'"),
        (
            GEMMA3 | {"rope_parameters": {"rope_type": "default", "rope_theta": 9.0}},
            "rope_parameters must be given for",
        ),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "full_attention"),
        ({"layer_types": ["sliding_attention", "full_attention", "full_attention"]}, "layer_types"),
        ({"architectures": ["Gemma2ForCausalLM"], "sliding_window": None}, "sliding_window None"),
        (
            {"architectures": ["Phi3ForCausalLM"], "sliding_window": 4}
            | {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
            "layer_types",
        ),
        (
            {"architectures": ["Qwen3ForCausalLM"], "sliding_window": 4, "use_sliding_window": False}
            | {"layer_types": ["sliding_attention"] * 3},
            "use_sliding_window False",
        ),
        (
            {"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": True, "sliding_window": 4}
            | {"layer_types": ["full_attention", "chunked_attention", "full_attention"]},
            "chunked_attention",
        ),
    ],
)
def test_what_is_not_built_is_refused_with_its_value(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UnsupportedModel, match=words):
        decoder_config(LLAMA | changes)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hidden_size": None}, "hidden_size"),
        ({"vocab_size": "100"}, "vocab_size"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"num_key_value_heads": 3}, "multiple"),
        ({"head_dim": 7}, "even"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps"),
        ({"layer_types": "full_attention"}, "layer_types"),
        ({"layer_types": ["full_attention"]}, "1 layer_types for 3 layers"),
        ({"rope_parameters": [1]}, "rope_parameters"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers may be at most 4096"),
        ({"architectures": ["MixtralForCausalLM"], "num_local_experts": 2 * 10**6}, "num_local_experts may be at most"),
        ({"hidden_act": ["silu"]}, "hidden_act must be a name"),
        ({"rope_parameters": {"rope_type": ["x"]}}, "rope_type must be a name"),
        ({"rope_parameters": {"rope_theta": 1.0}}, "rope_theta must be above 1"),
        ({"rope_parameters": YARN | {"original_max_position_embeddings": 1}}, "must be at least 2, got 1"),
        ({"rope_parameters": YARN | {"original_max_position_embeddings": 0.5}}, r"must be at least 2, got 0\.5"),
        ({"rms_norm_eps": float("inf")}, "rms_norm_eps must be a finite number"),
        ({"rms_norm_eps": 10**400}, "rms_norm_eps must be a finite number"),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": True}, "sliding_window"),
        ({"architectures": ["SmolLM3ForCausalLM"], "no_rope_layers": [1]}, "1 no_rope_layers for 3"),
        ({"architectures": ["MixtralForCausalLM"], "num_experts_per_tok": 9}, "9 num_experts_per_tok of 8"),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 0}, "sliding_window"),
        ({"architectures": ["GraniteForCausalLM"], "logits_scaling": 0}, "logits_scaling"),
        ({"architectures": ["Gemma2ForCausalLM"], "final_logit_softcapping": -1.0}, "final_logit_softcapping"),
    ],
)
def test_a_senseless_number_is_refused_by_name(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        decoder_config(LLAMA | changes)
