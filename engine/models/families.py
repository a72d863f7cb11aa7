"""The families of decoders that run on `models.decoder`, a row of traits each."""

from __future__ import annotations

from typing import Any

from engine.models.decoder_traits import DecoderTraits, ExpertNames

_MISTRAL = {"sliding_window": 4096, "num_key_value_heads": 8}
_QWEN = {"sliding_window": 4096, "max_window_layers": 28, "num_key_value_heads": 32}
_QWEN3 = _QWEN | {"head_dim": 128}
_GEMMA: dict[str, Any] = {"tie_word_embeddings": True, "head_dim": 256}
_GEMMA2 = _GEMMA | {
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "num_key_value_heads": 4,
    "final_logit_softcapping": 30.0,
    "attn_logit_softcapping": 50.0,
}
_GEMMA3 = {key: value for key, value in _GEMMA2.items() if key != "attn_logit_softcapping"} | {
    "sliding_window_pattern": 6,
    "final_logit_softcapping": None,
    "rope_theta": 1e6,
    "rope_local_base_freq": 1e4,
}
_TANH_GELU = {"gelu_pytorch_tanh": "gelu_tanh"}

DECODERS: dict[str, DecoderTraits] = {
    "LlamaForCausalLM": DecoderTraits(model_type="llama"),
    "MistralForCausalLM": DecoderTraits(model_type="mistral", biases="none", windows="each", defaults=_MISTRAL),
    "MinistralForCausalLM": DecoderTraits(model_type="ministral", biases="none", windows="each", defaults=_MISTRAL),
    "MixtralForCausalLM": DecoderTraits(
        model_type="mixtral",
        biases="none",
        windows="all",
        experts=ExpertNames(
            router="block_sparse_moe.gate",
            gate="block_sparse_moe.experts.{}.w1",
            up="block_sparse_moe.experts.{}.w3",
            down="block_sparse_moe.experts.{}.w2",
        ),
        defaults={"rms_norm_eps": 1e-5, "rope_theta": 1e6, "num_key_value_heads": 8}
        | {"num_experts": 8, "num_experts_per_tok": 2},
        fixed={"norm_topk_prob": True, "moe_intermediate_size": None, "mlp_only_layers": [], "decoder_sparse_step": 1},
    ),
    "Qwen2ForCausalLM": DecoderTraits(
        model_type="qwen2", biases="qkv", windows="upper", switches_windows=True, defaults=_QWEN
    ),
    "Qwen3ForCausalLM": DecoderTraits(
        model_type="qwen3", biases="attention", qk_norm="head", windows="upper", switches_windows=True, defaults=_QWEN3
    ),
    "Qwen3MoeForCausalLM": DecoderTraits(
        model_type="qwen3_moe",
        biases="attention",
        qk_norm="head",
        windows="all",
        switches_windows=True,
        experts=ExpertNames(
            router="mlp.gate",
            gate="mlp.experts.{}.gate_proj",
            up="mlp.experts.{}.up_proj",
            down="mlp.experts.{}.down_proj",
        ),
        defaults={"sliding_window": 4096, "num_key_value_heads": 4, "moe_intermediate_size": 768, "num_experts": 128}
        | {"num_experts_per_tok": 8, "decoder_sparse_step": 1},
    ),
    "GemmaForCausalLM": DecoderTraits(
        model_type="gemma",
        biases="attention",
        norm="unit_offset",
        scales_embedding=True,
        activations=_TANH_GELU | {"gelu": "gelu_tanh"},  # as its first checkpoints call it
        defaults=_GEMMA | {"hidden_act": "gelu_pytorch_tanh", "num_key_value_heads": 16},
    ),
    "Gemma2ForCausalLM": DecoderTraits(
        model_type="gemma2",
        biases="attention",
        norm="unit_offset",
        norm_places="around",
        scales_embedding=True,
        windows="alternating",
        activations=_TANH_GELU,
        activation_key="hidden_activation",
        defaults=_GEMMA2,
        fixed={"sliding_window_pattern": 2},
    ),
    "Gemma3ForCausalLM": DecoderTraits(
        model_type="gemma3_text",
        biases="attention",
        norm="unit_offset",
        norm_places="around",
        qk_norm="head",
        scales_embedding=True,
        windows="alternating",
        rotates_windows_apart=True,
        activations=_TANH_GELU,
        activation_key="hidden_activation",
        defaults=_GEMMA3,
    ),
    "Phi3ForCausalLM": DecoderTraits(
        model_type="phi3",
        biases="none",
        windows="all",
        fuses_tensors=True,
        scalings={"default": "default", "longrope": "longrope", "su": "longrope", "yarn": "longrope"},
        defaults={"rms_norm_eps": 1e-5, "original_max_position_embeddings": 4096, "partial_rotary_factor": 1.0},
    ),
    "Olmo2ForCausalLM": DecoderTraits(
        model_type="olmo2",
        biases="attention",
        norm="wide",
        norm_places="after",
        qk_norm="width",
        defaults={"rms_norm_eps": 1e-5},
    ),
    "Olmo3ForCausalLM": DecoderTraits(
        model_type="olmo3",
        biases="attention",
        norm="wide",
        norm_places="after",
        qk_norm="width",
        windows="alternating",
        rotates_windows_apart=True,
        defaults={"rms_norm_eps": 1e-5, "sliding_window": 4096, "rope_theta": 5e5},
        fixed={"sliding_window_pattern": 4, "rope_local_base_freq": 5e5},
    ),
    "SmolLM3ForCausalLM": DecoderTraits(
        model_type="smollm3",
        windows="unrotated",
        switches_windows=True,
        defaults={"tie_word_embeddings": True, "rope_theta": 2e6, "num_key_value_heads": 4}
        | {"no_rope_layers": None, "no_rope_layer_interval": 4},
    ),
    "GraniteForCausalLM": DecoderTraits(
        model_type="granite",
        defaults={"attention_multiplier": 1.0, "embedding_multiplier": 1.0}
        | {"residual_multiplier": 1.0, "logits_scaling": 1.0},
    ),
}
"""Architecture, as config.json names it → traits of `models.decoder`."""
