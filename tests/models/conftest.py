"""Tiny random checkpoints of every family, with transformers eager as the oracle."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

torch.set_num_threads(1)

BASE: dict[str, Any] = {
    "vocab_size": 199,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": None,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
}
TWO_ROPES = {
    "full_attention": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 8.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
}


def longrope(num_pairs: int) -> dict[str, Any]:
    """Return parameters whose two lists differ much; the original context has 32 tokens."""
    factors = {
        "short_factor": [1.0 + i for i in range(num_pairs)],
        "long_factor": [5.0 + 2 * i for i in range(num_pairs)],
    }
    return {"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 32} | factors


FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama of one K/V head, tied, with biases": (
        "Llama",
        {"num_key_value_heads": 1, "tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True},
    ),
    "llama with wide heads, one K/V head each": ("Llama", {"head_dim": 16, "num_key_value_heads": 6}),
    "llama with linear rope scaling": (
        "Llama",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 500.0, "factor": 4.0}},
    ),
    "llama with dynamic rope scaling": ("Llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 4.0}}),
    "llama 3": ("Llama", {"rope_parameters": LLAMA3_ROPE}),
    "llama with yarn": ("Llama", {"head_dim": 16, "rope_parameters": YARN_ROPE}),
    "llama with yarn of other betas": (
        "Llama",
        {"head_dim": 16, "rope_parameters": YARN_ROPE | {"beta_fast": 8, "beta_slow": 0.5, "truncate": False}},
    ),
    "llama with yarn of two scales": (
        "Llama",
        {"rope_parameters": YARN_ROPE | {"mscale": 0.7, "mscale_all_dim": 1.2}},
    ),
    "llama with longrope": ("Llama", {"rope_parameters": longrope(4)}),
    "mistral with windows": ("Mistral", {"sliding_window": 7, "head_dim": 8}),
    "mistral without windows": ("Mistral", {"sliding_window": None, "head_dim": 8}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen2 with windows above": ("Qwen2", {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}),
    "qwen3": ("Qwen3", {"head_dim": 24, "attention_bias": True}),
    "qwen3 with chosen windows": (
        "Qwen3",
        {"head_dim": 8, "use_sliding_window": True, "sliding_window": 5}
        | {"num_hidden_layers": 3, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    ),
    "gemma": ("Gemma", {"head_dim": 12, "num_key_value_heads": 1}),
    "gemma 2": (
        "Gemma2",
        {"head_dim": 16, "query_pre_attn_scalar": 24, "sliding_window": 7, "num_hidden_layers": 4}
        | {"attn_logit_softcapping": 3.0, "final_logit_softcapping": 4.0},
    ),
    "gemma 2 without caps, untied, with biases": (
        "Gemma2",
        {"head_dim": 16, "sliding_window": 70, "tie_word_embeddings": False, "attention_bias": True}
        | {"attn_logit_softcapping": None, "final_logit_softcapping": None},
    ),
    "gemma 3": (
        "Gemma3Text",
        {"head_dim": 16, "query_pre_attn_scalar": 20, "sliding_window": 6, "num_hidden_layers": 4}
        | {"sliding_window_pattern": 3, "rope_parameters": TWO_ROPES, "final_logit_softcapping": 9.0},
    ),
    "ministral with chosen windows": (
        "Ministral",
        {"sliding_window": 10, "head_dim": 16, "layer_types": ["full_attention", "sliding_attention"]},
    ),
    "mixtral": ("Mixtral", {"num_local_experts": 5}),
    "mixtral with windows": ("Mixtral", {"num_local_experts": 3, "sliding_window": 11, "head_dim": 16}),
    "qwen3-moe": (
        "Qwen3Moe",
        {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "norm_topk_prob": True}
        | {"head_dim": 16, "num_hidden_layers": 3, "mlp_only_layers": [1]},
    ),
    "qwen3-moe in every other layer, with windows": (
        "Qwen3Moe",
        {"num_experts": 7, "num_experts_per_tok": 2, "moe_intermediate_size": 31, "decoder_sparse_step": 2}
        | {"use_sliding_window": True, "sliding_window": 9, "attention_bias": True},
    ),
    "phi3": ("Phi3", {"num_key_value_heads": 6}),
    "phi3 with a part rotated, longrope and windows": (
        "Phi3",
        {"rope_parameters": longrope(3) | {"partial_rotary_factor": 0.75}, "sliding_window": 13}
        | {"original_max_position_embeddings": 32},
    ),
    "olmo2": ("Olmo2", {}),
    "olmo2 of one K/V head, with biases": ("Olmo2", {"num_key_value_heads": 1, "attention_bias": True}),
    "olmo3": (
        "Olmo3",
        {"num_hidden_layers": 4, "sliding_window": 6}
        | {"rope_parameters": {"full_attention": YARN_ROPE, "sliding_attention": {"rope_type": "default"}}},
    ),
    "smollm3": ("SmolLM3", {"num_hidden_layers": 3, "no_rope_layer_interval": 2}),
    "smollm3 with windows": (
        "SmolLM3",
        {"no_rope_layers": [0, 1], "use_sliding_window": True, "sliding_window": 8, "tie_word_embeddings": False},
    ),
    "granite": (
        "Granite",
        {"attention_multiplier": 0.2, "embedding_multiplier": 3.0, "residual_multiplier": 0.4, "logits_scaling": 0.7}
        | {"tie_word_embeddings": True, "attention_bias": True},
    ),
}

MakeCheckpoint = Callable[[str], tuple[Path, Any]]


@pytest.fixture(scope="session")
def make_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> MakeCheckpoint:
    """Return a function from family to (folder with a float32 checkpoint, the same model in transformers)."""
    made: dict[str, tuple[Path, Any]] = {}

    def make(family: str) -> tuple[Path, Any]:
        if family not in made:
            name, changes = FAMILIES[family]
            config = getattr(transformers, f"{name}Config")(**(BASE | changes))
            config._attn_implementation = config._experts_implementation = "eager"
            torch.manual_seed(sorted(FAMILIES).index(family))
            model = transformers.AutoModelForCausalLM.from_config(config).eval()
            with torch.no_grad():
                for parameter_name, parameter in model.named_parameters():
                    is_norm = "norm" in parameter_name
                    parameter.normal_(float(is_norm), 0.3 if is_norm or parameter_name.endswith("bias") else 0.15)
            folder = tmp_path_factory.mktemp("checkpoint")
            model.save_pretrained(folder)
            made[family] = folder, model
        return made[family]

    return make


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    """Name each family in turn."""
    return str(request.param)
