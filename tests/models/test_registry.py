from __future__ import annotations

from typing import Any

import pytest

from engine.errors import CheckpointError, UnsupportedModel
from engine.models.registry import DECODERS, decoder_config

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "vocab_size": 100,
    "max_position_embeddings": 128,
}


def test_what_a_config_leaves_out_is_what_transformers_assumes() -> None:
    config = decoder_config(LLAMA)
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
    ],
)
def test_each_family_reads_its_windows(changes: dict[str, Any], windows: tuple[int | None, ...]) -> None:
    assert decoder_config(LLAMA | changes).windows == windows


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
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "yarn"),
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
    ],
)
def test_a_senseless_number_is_refused_by_name(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        decoder_config(LLAMA | changes)
