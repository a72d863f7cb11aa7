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

HEADS = {"num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 16}
HEADS_CHANGES: dict[str, dict[str, Any]] = {
    "llama with wide heads, one K/V head each": {"num_attention_heads": 6, "num_key_value_heads": 6, "head_dim": 32},
    "llama with longrope": {"rope_parameters": longrope(8)},
    "qwen3": {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 48},
    "phi3": {"num_key_value_heads": 3},
    "phi3 with a part rotated, longrope and windows": {
        "rope_parameters": longrope(6) | {"partial_rotary_factor": 0.75}
    },
}
"""What a family needs beyond `HEADS`, for heads that are multiples of 16."""
DENSE = [family for family, (name, _) in FAMILIES.items() if name not in ("Mixtral", "Qwen3Moe")]


def wide(family: str) -> dict[str, Any]:
    """Return what makes the heads of a family multiples of 16, as the operations in C want them."""
    return HEADS | HEADS_CHANGES.get(family, {})


MakeCheckpoint = Callable[..., tuple[Path, Any]]


@pytest.fixture(scope="session")
def make_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> MakeCheckpoint:
    """Return a function from (family, changes) to (folder with a float32 checkpoint, the model in transformers)."""
    made: dict[str, tuple[Path, Any]] = {}

    def make(family: str, **more: Any) -> tuple[Path, Any]:
        key = repr((family, more))
        if key not in made:
            name, changes = FAMILIES[family]
            changes = changes | more
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
            made[key] = folder, model
        return made[key]

    return make


SIZES: dict[str, Any] = {
    "vocab_size": 199,
    "hidden_size": 48,
    "embedding_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rotary_dim": 8,
    "max_position_embeddings": 128,
    "initializer_range": 0.15,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "sliding_window": 7,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_k": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 24,
    "n_group": 1,
    "topk_group": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 6,
    "ffn_dim": 80,
    "word_embed_proj_dim": 48,
    "is_decoder": True,
}
"""What makes any architecture tiny, where its configuration has the name."""
MAX_SIZE = 5 * 10**6
"""Weights beyond which a model is not tiny."""
_HALVES = {"layer_types": ["sliding_attention", "full_attention"] * 2}
_LATENT = {"num_key_value_heads": 6, "head_dim": 4}
_PADS = {"pad_token_id": 0}
_STATES = {"mamba_n_heads": 12, "mamba_d_head": 8}
_DECODER = {"decoder_layers": 4, "decoder_attention_heads": 6, "decoder_ffn_dim": 80}
CHANGES: dict[str, dict[str, Any]] = {
    "axk1": _LATENT,
    "bamba": _STATES,
    "bart": _DECODER,
    "bigbird_pegasus": _DECODER,
    "blenderbot": _DECODER,
    "blenderbot-small": _DECODER,
    "camembert": _PADS,
    "cohere2": _HALVES,
    "cpmant": {"dim_model": 48, "dim_ff": 80, "dim_head": 8},
    "ctrl": {"dff": 80},
    "data2vec-text": _PADS,
    "deepseek_v2": _LATENT,
    "deepseek_v3": _LATENT,
    "exaone4": _HALVES,
    "falcon": {"without": ("head_dim",)},
    "gemma3_text": _HALVES,
    "gemma3n_text": _HALVES
    | {"num_kv_shared_layers": 0, "hidden_size_per_layer_input": 8, "laurel_rank": 4}
    | {"vocab_size_per_layer_input": 199, "activation_sparsity_pattern": [0.0] * 4},
    "gemma4_text": _HALVES
    | {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 199, "global_head_dim": 16}
    | {"without": ("num_experts", "moe_intermediate_size")},
    "gemma4_unified_text": _HALVES
    | {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 199, "global_head_dim": 16}
    | {"without": ("num_experts", "moe_intermediate_size")},
    "glm4_moe_lite": _LATENT,
    "gpt_neo": {"attention_types": [[["global", "local"], 2]], "num_layers": 4},
    "granitemoehybrid": _STATES,
    "kimi_linear": {"pad_token_id": 0, "linear_head_dim": 8, "linear_num_heads": 6},
    "lfm2": {"layer_types": ["full_attention", "conv"] * 2},
    "lfm2_moe": {"layer_types": ["full_attention", "conv"] * 2},
    "longcat_flash": _LATENT
    | {"num_layers": 2, "ffn_hidden_size": 80, "expert_ffn_hidden_size": 24, "zero_expert_num": 2, "moe_topk": 2},
    "mamba2": {"without": ("head_dim",), "num_heads": 12, "head_dim": 8},
    "marian": _DECODER,
    "mbart": _DECODER,
    "minicpm3": _LATENT,
    "ministral": _HALVES,
    "modernbert-decoder": _PADS,
    "mvp": _DECODER,
    "olmo3": _HALVES,
    "pegasus": _DECODER,
    "phimoe": {"sliding_window": None},
    "plbart": _DECODER,
    "prophetnet": {"without": ("num_hidden_layers",), "num_decoder_layers": 4}
    | {"num_decoder_attention_heads": 6, "num_encoder_attention_heads": 6},
    "reformer": {"axial_pos_embds_dim": (16, 32), "axial_pos_shape": (8, 16), "pad_token_id": 0},
    "roberta": _PADS,
    "roberta-prelayernorm": _PADS,
    "roc_bert": {"shape_vocab_size": 9, "pronunciation_vocab_size": 9, "pad_token_id": 0},
    "trocr": _DECODER,
    "whisper": _DECODER,
    "xlm": {"emb_dim": 48, "n_heads": 6, "n_layers": 4, "pad_token_id": 2},
    "xlm-roberta": _PADS,
    "xlm-roberta-xl": _PADS,
    "xlnet": {"without": ("max_position_embeddings",), "d_inner": 80, "d_head": 8},
    "xlstm": {"without": ("v_head_dim", "head_dim"), "num_heads": 4},
    "xmod": {"default_language": "en_XX", "pad_token_id": 0},
    "youtu": _LATENT,
    "zamba": {"num_hidden_layers": 12},
    "zamba2": {"without": ("num_hidden_layers",)},
    "zaya": {"num_experts_per_tok": 1},
}
"""model_type → what a tiny model of it needs beyond `SIZES`; "without": of which names of `SIZES` not."""


def _has(config: Any, name: str) -> bool:
    try:
        return hasattr(config, name)
    except RuntimeError:  # a setting of each layer, of which there is no one value
        return True


@pytest.fixture(scope="session")
def draw_model() -> Callable[..., Any]:
    """Return a function from (model_type, changes) to a random float32 model in transformers eager, norms drawn too."""

    def draw(model_type: str, **changes: Any) -> Any:
        changes = CHANGES.get(model_type, {}) | changes
        without = changes.pop("without", ())
        config_class = transformers.CONFIG_MAPPING[model_type]
        own = config_class()
        sizes = {name: size for name, size in SIZES.items() if name not in without and _has(own, name)}
        config = config_class(**(sizes | changes))
        with torch.device("meta"):
            size = transformers.AutoModelForCausalLM.from_config(config).num_parameters()
        if size > MAX_SIZE:
            raise ValueError(f"{model_type} has no tiny configuration: {size} weights")
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.dim() == 1:
                    is_factor = not name.endswith("bias") and ("norm" in name or "ln" in name)
                    parameter.normal_(1.0 if is_factor else 0.0, 0.3)
        return model

    return draw


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    """Name each family in turn."""
    return str(request.param)
