from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from engine.errors import CheckpointError, UnsupportedModel
from engine.models.rotary import RopeConfig, RotaryEmbedding, rotate

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
CONFIGS = [
    {"rope_theta": 10000.0},
    {"rope_theta": 100000, "rope_scaling": None},
    {"rope_theta": 500000.0, "rope_scaling": LLAMA3},
    {"rope_theta": 10000.0, "rope_scaling": {"type": "linear", "factor": 2.0}},
    {"rope_parameters": {"rope_theta": 7000.0, "rope_type": "default"}},
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("config", CONFIGS)
def test_rotation_equals_that_of_transformers_to_the_bit(config: dict[str, Any], dtype: torch.dtype) -> None:
    oracle = LlamaRotaryEmbedding(
        transformers.LlamaConfig(hidden_size=256, num_attention_heads=4, max_position_embeddings=1024, **config)
    )
    heads = torch.randn(1024, 3, 64, generator=torch.Generator().manual_seed(0)).to(dtype)
    positions = torch.arange(1024)
    cos, sin = oracle(heads, positions[None])
    expected, _ = apply_rotary_pos_emb(heads[None], heads[None], cos, sin, unsqueeze_dim=2)
    embedding = RotaryEmbedding(RopeConfig.of(config), 64, 1024, dtype)
    assert torch.equal(rotate(heads, *embedding.at(positions)), expected[0])


@pytest.mark.parametrize("kind", ["dynamic", "yarn", "longrope", "su"])
def test_other_scalings_are_refused_by_name(kind: str) -> None:
    with pytest.raises(UnsupportedModel, match=kind):
        RopeConfig.of({"rope_scaling": {"type": kind, "factor": 2.0}})


def test_partial_rotation_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedModel, match=r"partial_rotary_factor 0\.5"):
        RopeConfig.of({"partial_rotary_factor": 0.5})


@pytest.mark.parametrize("missing", ["factor", "low_freq_factor", "original_max_position_embeddings"])
def test_a_scaling_without_its_numbers_is_refused_naming_the_number(missing: str) -> None:
    with pytest.raises(CheckpointError, match=missing):
        RopeConfig.of({"rope_scaling": {key: value for key, value in LLAMA3.items() if key != missing}})
