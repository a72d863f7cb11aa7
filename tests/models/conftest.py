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
