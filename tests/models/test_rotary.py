from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from engine.errors import CheckpointError, UnsupportedModel
from engine.models.families import DECODERS
from engine.models.rotary import RopeConfig, RotaryEmbedding, rotate

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}
LONG = {
    "rope_type": "longrope",
    "short_factor": [1.0 + i / 7 for i in range(32)],
    "long_factor": [2.0 + i / 3 for i in range(32)],
}
CONFIGS: list[dict[str, Any]] = [
    {"rope_theta": 10000.0},
    {"rope_theta": 100000, "rope_scaling": None},
    {"rope_theta": 500000.0, "rope_scaling": LLAMA3},
    {"rope_theta": 10000.0, "rope_scaling": {"type": "linear", "factor": 2.0}},
    {"rope_theta": 10000.0, "rope_scaling": {"type": "dynamic", "factor": 2.0}},
    {"rope_parameters": {"rope_theta": 7000.0, "rope_type": "default"}},
    {"rope_theta": 1000000.0, "rope_scaling": YARN},
    {"rope_theta": 5000.0, "rope_scaling": YARN | {"beta_fast": 20, "beta_slow": 2.5, "truncate": False}},
    {"rope_theta": 5000.0, "rope_scaling": YARN | {"attention_factor": 0.83}},
    {"rope_theta": 5000.0, "rope_scaling": YARN | {"mscale": 0.707, "mscale_all_dim": 1.1}},
    {"rope_theta": 5000.0, "rope_scaling": YARN | {"beta_fast": 1e-9, "beta_slow": 1e-9}},
    {"rope_theta": 5000.0, "rope_scaling": LONG | {"original_max_position_embeddings": 256}},
    {"rope_theta": 5000.0, "rope_scaling": LONG | {"original_max_position_embeddings": 1024, "factor": 3.0}},
    {"rope_theta": 5000.0, "rope_scaling": LONG | {"original_max_position_embeddings": 9}}
    | {"original_max_position_embeddings": 512},
    {"rope_theta": 5000.0, "rope_scaling": LONG | {"original_max_position_embeddings": 64, "attention_factor": 1.3}},
    {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
    {"rope_scaling": {key: value for key, value in LLAMA3.items() if key != "original_max_position_embeddings"}},
    {"rope_scaling": LONG},
    {"rope_scaling": YARN, "rope_parameters": {"rope_type": "linear", "factor": 8.0, "rope_theta": 77.0}},
    {"rope_scaling": {}, "rope_parameters": {"rope_type": "linear", "factor": 8.0, "rope_theta": 77.0}},
    {"rope_theta": 500.0, "rope_scaling": {"type": "linear", "factor": 2.0}, "rope_parameters": YARN},
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("config", CONFIGS)
def test_rotation_equals_that_of_transformers_to_the_bit(config: dict[str, Any], dtype: torch.dtype) -> None:
    shape = {"hidden_size": 256, "num_attention_heads": 4, "max_position_embeddings": 1024}
    oracle = LlamaRotaryEmbedding(transformers.LlamaConfig(**shape, **copy.deepcopy(config)))
    heads = torch.randn(1024, 3, 64, generator=torch.Generator().manual_seed(0)).to(dtype)
    positions = torch.arange(1024)
    cos, sin = oracle(heads, positions[None])
    expected, _ = apply_rotary_pos_emb(heads[None], heads[None], cos, sin, unsqueeze_dim=2)
    embedding = RotaryEmbedding(RopeConfig.of(shape | config, 64), 1024, dtype)
    assert torch.equal(rotate(heads, *embedding.at(positions)), expected[0])


def test_a_part_of_each_head_is_rotated_and_the_rest_stays() -> None:
    heads = torch.randn(50, 3, 64, generator=torch.Generator().manual_seed(0))
    positions = torch.arange(50)
    part = RotaryEmbedding(RopeConfig.of({"partial_rotary_factor": 0.75}, 64), 50, torch.float32).at(positions)
    whole = RotaryEmbedding(RopeConfig.of({}, 48), 50, torch.float32).at(positions)
    rotated = rotate(heads, *part)
    assert torch.equal(rotated[..., :48], rotate(heads[..., :48], *whole))
    assert torch.equal(rotated[..., 48:], heads[..., 48:])


def test_longrope_takes_the_short_list_where_no_request_can_outgrow_the_original_context() -> None:
    rope = RopeConfig.of(
        {"max_position_embeddings": 1024, "rope_scaling": LONG | {"original_max_position_embeddings": 256}}, 64
    )
    short = RotaryEmbedding(rope, 256, torch.float32).at(torch.arange(256))
    oracle = LlamaRotaryEmbedding(
        transformers.LlamaConfig(
            hidden_size=256,
            num_attention_heads=4,
            max_position_embeddings=1024,
            rope_parameters=LONG | {"original_max_position_embeddings": 256, "rope_theta": 10000.0},
        )
    )
    cos, _ = oracle(torch.zeros(1), torch.arange(256)[None])
    assert torch.equal(short[0][:, 0], cos[0])
    longer = RotaryEmbedding(rope, 257, torch.float32).at(torch.arange(256))
    assert not torch.equal(short[0], longer[0])


def test_dynamic_scaling_is_refused_by_name_where_it_would_rescale() -> None:
    rope = RopeConfig.of({"max_position_embeddings": 64, "rope_scaling": {"type": "dynamic", "factor": 2.0}}, 64)
    RotaryEmbedding(rope, 64, torch.float32)
    with pytest.raises(UnsupportedModel, match=r"'dynamic' .* beyond 64 positions .* context of 65"):
        RotaryEmbedding(rope, 65, torch.float32)


@pytest.mark.parametrize(
    "parameters",
    [{"type": "ntk", "factor": 2.0}, {"mrope_section": [8, 12, 12]}, {"full_attention": {"rope_type": "default"}}],
)
def test_other_parameters_are_refused_by_name(parameters: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedModel, match=r"ntk|mrope_section|full_attention"):
        RopeConfig.of({"rope_scaling": parameters}, 64)


@pytest.mark.parametrize("name", ["su", "yarn"])
def test_the_early_names_of_longrope_are_known_to_phi3_alone(name: str) -> None:
    scaling = LONG | {"rope_type": name, "original_max_position_embeddings": 256}
    config = {"max_position_embeddings": 1024, "rope_scaling": scaling}
    named = config | {"rope_scaling": scaling | {"rope_type": "longrope"}}
    phi3 = DECODERS["Phi3ForCausalLM"].scalings
    assert RopeConfig.of(config, 64, names=phi3) == RopeConfig.of(named, 64)
    with pytest.raises((UnsupportedModel, CheckpointError), match=r"'su'|factor"):
        RopeConfig.of(config, 64)


@pytest.mark.parametrize(
    ("scaling", "words"),
    [
        (LONG | {"original_max_position_embeddings": 8, "short_factor": [1.0] * 31}, "short_factor .* 32"),
        (LONG | {"original_max_position_embeddings": 8, "long_factor": ["1"] * 32}, "long_factor"),
        (YARN | {"factor": None}, "factor"),
        ({"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": "8"}, "original_max_position"),
        ({"partial_rotary_factor": 1.5}, "partial_rotary_factor"),
        ({"partial_rotary_factor": 0.8}, "partial_rotary_factor"),
    ],
)
def test_a_senseless_scaling_is_refused_naming_the_number(scaling: dict[str, Any], words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        RopeConfig.of({"max_position_embeddings": 64, "rope_scaling": scaling}, 64)


@pytest.mark.parametrize("missing", ["factor", "low_freq_factor", "high_freq_factor"])
def test_a_scaling_without_its_numbers_is_refused_naming_the_number(missing: str) -> None:
    with pytest.raises(CheckpointError, match=missing):
        RopeConfig.of({"rope_scaling": {key: value for key, value in LLAMA3.items() if key != missing}}, 64)


@pytest.mark.parametrize("scaling", [YARN, LLAMA3, LONG])
def test_without_an_original_context_or_the_whole_one_a_scaling_is_refused_naming_it(scaling: dict[str, Any]) -> None:
    scaling = {key: value for key, value in scaling.items() if key != "original_max_position_embeddings"}
    with pytest.raises(CheckpointError, match="max_position_embeddings"):
        RopeConfig.of({"rope_scaling": scaling}, 64)
