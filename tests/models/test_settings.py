"""Whatever a config.json says or leaves out, a row reads it as transformers' configuration of its model_type does."""

from __future__ import annotations

import inspect
import json
import random
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from engine.config import EngineConfig
from engine.errors import ModelError, UnsupportedModel
from engine.models import decoder_config as reader
from engine.models import rotary
from engine.models.decoder_traits import NEUTRAL
from engine.models.families import DECODERS
from engine.models.registry import build_model, choose, decoder_config
from engine.models.transformers_backend import AttentionCall, TransformersModel
from engine.models.transformers_loading import open_config
from engine.models.whole_attention import WholeAttention

NUM_DRAWS, NUM_KEYS = 6, 12
"""For each row the configurations that are compared, and of each the settings that are changed at once."""
LEFT_OUT = object()
BASE: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 31,
    "max_position_embeddings": 64,
    "original_max_position_embeddings": 16,
    "sliding_window": 5,
    "sliding_window_pattern": 2,
    "num_experts_per_tok": 2,
    "pad_token_id": None,
}
NUM_EXPERTS = {"MixtralForCausalLM": {"num_local_experts": 3}, "Qwen3MoeForCausalLM": {"num_experts": 3}}
PROMPT = torch.randint(0, 31, (24,), generator=torch.Generator().manual_seed(1))

LINEAR = {"rope_type": "linear", "factor": 3.0}
OLD_LINEAR = {"type": "linear", "factor": 3.0}
YARN = {"rope_type": "yarn", "rope_theta": 99.0, "factor": 4.0, "original_max_position_embeddings": 16}
LONG = {"short_factor": [1.0, 2.0, 3.0, 4.0], "long_factor": [5.0, 7.0, 9.0, 11.0]}
LONG |= {"original_max_position_embeddings": 16}
LONGROPE = LONG | {"rope_type": "longrope", "rope_theta": 99.0}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 99.0, "factor": 8.0, "original_max_position_embeddings": 16}
LLAMA3 |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
KINDS = ["sliding_attention", "full_attention"]
VALUES: dict[str, list[Any]] = {
    "rms_norm_eps": [LEFT_OUT, 0.1],
    "rope_theta": [50.0],
    "num_key_value_heads": [1, 4],
    "head_dim": [16],
    "tie_word_embeddings": [True, False],
    "attention_bias": [True],
    "mlp_bias": [True],
    "hidden_act": [LEFT_OUT, "silu", "gelu", "gelu_pytorch_tanh"],
    "hidden_activation": ["silu", "gelu", "gelu_pytorch_tanh"],
    "sliding_window": [LEFT_OUT, 3],
    "use_sliding_window": [True, False, True],
    "max_window_layers": [LEFT_OUT, 0, 2],
    "sliding_window_pattern": [LEFT_OUT, 1, 3],
    "layer_types": [KINDS * 2, None],
    "rope_local_base_freq": [33.0],
    "no_rope_layers": [[1, 0, 1, 0], [0, 0, 1, 1, 1], None],
    "no_rope_layer_interval": [2, 3],
    "partial_rotary_factor": [0.5, 1.0],
    "original_max_position_embeddings": [20],
    "rope_scaling": [
        *(None, LINEAR, OLD_LINEAR, YARN, LONGROPE, LLAMA3, LONG | {"type": "su"}, YARN | LONG),
        *({"rope_type": "default", "rope_theta": 7.0}, {"rope_type": "yarn", "factor": 4.0}),
        *(YARN | {"mscale": 0.5, "mscale_all_dim": 0.9}, YARN | {"truncate": False, "beta_fast": 4.0}),
        *(LONGROPE | {"factor": 9.0}, LONGROPE | {"attention_factor": 2.0}, OLD_LINEAR | {"rope_type": "default"}),
    ],
    "rope_parameters": [
        *(LINEAR, OLD_LINEAR, {"rope_theta": 7.0}, {"full_attention": YARN, "sliding_attention": LINEAR}),
        *({"full_attention": OLD_LINEAR}, {"sliding_attention": {"rope_theta": 3.0}}),
    ],
    "attention_multiplier": [0.3],
    "query_pre_attn_scalar": [20],
    "embedding_multiplier": [3.0],
    "residual_multiplier": [0.3],
    "logits_scaling": [3.0],
    "attn_logit_softcapping": [2.0, None],
    "final_logit_softcapping": [2.0, None],
    "use_bidirectional_attention": [None, False],
    "is_causal": [None, False, True],
    "per_layer_config": [None],
    "num_experts": [4],
    "num_local_experts": [4],
    "num_experts_per_tok": [1],
    "moe_intermediate_size": [20],
    "norm_topk_prob": [True, False],
    "mlp_only_layers": [[1], []],
    "decoder_sparse_step": [2],
    "max_position_embeddings": [48],
    "intermediate_size": [20],
    "clip_qkv": [0.1],
    "qkv_bias": [True],
    "layer_norm_epsilon": [0.1],
}
"""Setting → what it may be changed to; some are read by no row, or by few."""


def config_of(architecture: str, changes: dict[str, Any]) -> dict[str, Any]:
    named = {"architectures": [architecture], "model_type": DECODERS[architecture].model_type}
    raw = named | BASE | NUM_EXPERTS.get(architecture, {}) | changes
    return {key: value for key, value in raw.items() if value is not LEFT_OUT}


def is_taken(architecture: str, changes: dict[str, Any]) -> bool:
    """Whether our own decoder takes it: what it refuses is transformers' to read."""
    try:
        decoder_config(config_of(architecture, changes))
    except ModelError:
        return False
    return True


def draw(architecture: str) -> list[dict[str, Any]]:
    """Draw changes that are taken together."""
    rng = random.Random(architecture)
    pairs = [(key, value) for key, values in VALUES.items() for value in values]
    pairs = [pair for pair in pairs if is_taken(architecture, dict([pair]))]
    draws = (dict(rng.sample(pairs, NUM_KEYS)) for _ in range(100 * NUM_DRAWS))
    return [{}, *(changes for changes in draws if is_taken(architecture, changes))][:NUM_DRAWS]


class Attention:
    """A backend for one prompt."""

    def __init__(self) -> None:
        self._attend = WholeAttention(None).bind([(0, len(PROMPT))])

    def attend(self, layer: int, q: Any, k: Any, v: Any, scale: Any, window: Any, cap: Any, sinks: Any, _: Any) -> Any:
        return self._attend(AttentionCall(layer, q, k, v, scale, window, cap, sinks))


@torch.inference_mode()
def compare(raw: dict[str, Any], folder: Path) -> None:
    """Hold the logits of our own decoder against those of transformers' model, both made from one config.json."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(raw))
    config = open_config(folder, raw)
    torch.manual_seed(0)
    model: Any = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    for name, parameter in model.named_parameters():
        parameter.normal_(float("norm" in name), 0.3 if parameter.dim() == 1 else 0.25)
    model.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(raw))
    expected = model(input_ids=PROMPT[None], use_cache=False).logits[0]

    own = build_model(folder, EngineConfig(model_impl="own"), lambda done, total: None).model
    own.use_attention(Attention())  # type: ignore[arg-type]
    logits = own.logits(own.forward(PROMPT, torch.arange(len(PROMPT)), None))
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=3e-5 * max(1.0, float(expected.abs().max())))
    assert own.config.max_positions == config.max_position_embeddings
    assert {*own.config.windows} <= {None, getattr(config, "sliding_window", None)}


@pytest.mark.parametrize("architecture", DECODERS)
def test_drawn_settings_mean_what_they_mean_to_transformers(tmp_path: Path, architecture: str) -> None:
    draws = draw(architecture)
    assert len(draws) == NUM_DRAWS
    for number, changes in enumerate(draws):
        try:
            compare(config_of(architecture, changes), tmp_path / str(number))
        except Exception as error:
            raise AssertionError(f"{architecture} with {changes}") from error


def test_all_settings_that_are_read_are_drawn() -> None:
    source = inspect.getsource(reader) + inspect.getsource(rotary)
    read = {*re.findall(r'\braw(?:\.get\(|\[|, )"(\w+)"', source), *NEUTRAL}
    read |= {key for traits in DECODERS.values() for key in (*traits.defaults, *traits.fixed)}
    assert len(read) > 40
    assert read - {*VALUES} == {"hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size"}


@pytest.mark.parametrize("architecture", DECODERS)
def test_heads_that_are_not_named_are_as_many_as_transformers_assumes(architecture: str) -> None:
    heads = {"num_attention_heads": 32, "hidden_size": 64, "num_key_value_heads": LEFT_OUT}
    raw = config_of(architecture, heads)
    oracle = transformers.CONFIG_MAPPING[raw["model_type"]](**raw)
    assert decoder_config(raw).num_kv_heads == oracle.num_key_value_heads


OTHER_TYPES = [
    (name, architecture)
    for name, architecture in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items()
    if architecture in DECODERS and name != DECODERS[architecture].model_type
]


@pytest.mark.parametrize("architecture", DECODERS)
def test_a_row_has_the_model_type_of_its_architecture(architecture: str) -> None:
    traits = DECODERS[architecture]
    assert MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[traits.model_type] == architecture
    others = [name for name, other in DECODERS.items() if other.model_type != traits.model_type]
    for model_type in ("exaone", "no such type", 5, *(DECODERS[name].model_type for name in others)):
        raw = config_of(architecture, {"model_type": model_type})
        with pytest.raises(UnsupportedModel, match=f"names {architecture} with model_type {model_type!r}, whose"):
            decoder_config(raw)
        assert decoder_config(raw | {"model_type": None}) == decoder_config(config_of(architecture, {}))


def test_of_several_architectures_the_model_type_s_counts() -> None:
    raw = config_of("MistralForCausalLM", {"architectures": ["GPT2LMHeadModel", *DECODERS]})
    assert decoder_config(raw).traits is DECODERS["MistralForCausalLM"]


@pytest.mark.parametrize(("model_type", "architecture"), OTHER_TYPES)
def test_another_model_type_of_a_row_s_architecture_runs_with_its_own_defaults_through_transformers(
    draw_model: Any, tmp_path: Path, model_type: str, architecture: str
) -> None:
    model = draw_model(model_type)
    model.save_pretrained(tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    assert (raw["architectures"], raw["model_type"]) == ([architecture], model_type)
    for key in ("rms_norm_eps", "rope_parameters"):
        raw.pop(key, None)
    (tmp_path / "config.json").write_text(json.dumps(raw))
    built = build_model(tmp_path, EngineConfig(), lambda done, total: None).model
    assert isinstance(built, TransformersModel)
    assert "transformers' model" in choose(raw, tmp_path, lambda done, total: None).implementation
    with pytest.raises(UnsupportedModel, match=f"with model_type '{model_type}'"):
        build_model(tmp_path, EngineConfig(model_impl="own"), lambda done, total: None)


def test_two_names_of_one_number_may_not_contradict_each_other() -> None:
    both = {"num_experts": 4, "num_local_experts": 5}
    with pytest.raises(UnsupportedModel, match="'num_local_experts': 5} contradict each other"):
        decoder_config(config_of("MixtralForCausalLM", both))
    assert not is_taken("Qwen3MoeForCausalLM", both)
    assert is_taken("Qwen3MoeForCausalLM", both | {"num_local_experts": 4})


def test_a_mistral_with_layer_types_is_a_ministral_as_in_transformers(tmp_path: Path) -> None:
    raw = config_of("MistralForCausalLM", {"layer_types": KINDS * 2})
    assert decoder_config(raw).windows == (5, None, 5, None)
    compare(raw, tmp_path / "mixed")


@pytest.mark.parametrize(
    ("architecture", "changes"),
    [
        ("Gemma2ForCausalLM", {"sliding_window_pattern": 3}),
        ("Olmo3ForCausalLM", {"sliding_window_pattern": 3}),
        ("Olmo3ForCausalLM", {"rope_local_base_freq": 33.0}),
        ("Olmo3ForCausalLM", {"rope_scaling": OLD_LINEAR}),
        ("Gemma3ForCausalLM", {"rope_scaling": OLD_LINEAR}),
        ("MinistralForCausalLM", {"max_window_layers": 2}),
        ("MixtralForCausalLM", {"moe_intermediate_size": 20}),
        ("LlamaForCausalLM", {"rope_scaling": YARN | LONG}),
    ],
)
def test_what_other_families_read_is_not_heard(tmp_path: Path, architecture: str, changes: dict[str, Any]) -> None:
    assert is_taken(architecture, changes)
    compare(config_of(architecture, changes), tmp_path / "one")
