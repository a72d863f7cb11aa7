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
    "initializer_range": 0.15,
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
    "llama 3": ("Llama", {"rope_parameters": LLAMA3_ROPE}),
    "mistral with windows": ("Mistral", {"sliding_window": 7, "head_dim": 8}),
    "mistral without windows": ("Mistral", {"sliding_window": None, "head_dim": 8}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen2 with windows above": ("Qwen2", {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}),
    "qwen3": ("Qwen3", {"head_dim": 24, "attention_bias": True}),
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
            config._attn_implementation = "eager"
            torch.manual_seed(sorted(FAMILIES).index(family))
            model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
            with torch.no_grad():
                for parameter_name, parameter in model.named_parameters():
                    if "norm" in parameter_name or parameter_name.endswith("bias"):
                        parameter.normal_(1.0 if "norm" in parameter_name else 0.0, 0.3)
            folder = tmp_path_factory.mktemp("checkpoint")
            model.save_pretrained(folder)
            made[family] = folder, model
        return made[family]

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
Draw = Callable[..., Any]


@pytest.fixture(scope="session")
def draw_model() -> Draw:
    """Return a function from (model_type, changes) to a random float32 model in transformers eager, norms drawn too."""

    def draw(model_type: str, without: tuple[str, ...] = (), **changes: Any) -> Any:
        config_class = transformers.CONFIG_MAPPING[model_type]
        own = config_class()
        sizes = {name: size for name, size in SIZES.items() if hasattr(own, name) and name not in without}
        config = config_class(**(sizes | changes))
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.dim() == 1:
                    is_factor = not name.endswith("bias") and ("norm" in name or "ln" in name)
                    parameter.normal_(1.0 if is_factor else 0.0, 0.3)
        return model

    return draw
