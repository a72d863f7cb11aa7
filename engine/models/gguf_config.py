"""The metadata of a GGUF file as the content of a Hugging Face config.json.

llama.cpp keeps some numbers in its code, not in the file (the scale of Gemma's largest models, which layers of SmolLM3
rotate); they stand here by name. A key below the architecture's name that nothing here reads is refused: the model
would be computed otherwise than it was trained.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from gguf import LlamaFileType

from engine.errors import CheckpointError, UnsupportedModel
from engine.models.gguf import GgufFile
from engine.models.gguf_metadata import Metadata
from engine.models.gguf_rope import read_rope

Config = dict[str, Any]
_SOFTMAX_GATING = 1


def read_config(gguf: GgufFile) -> Config:
    """Return the content of config.json.

    Raises:
        UnsupportedModel: The architecture, or something the metadata asks for, is not converted; named.
        CheckpointError: Metadata is missing or makes no sense.
    """
    architecture = gguf.value("general.architecture", str)
    if architecture not in _READERS:
        known = ", ".join(_READERS)
        raise UnsupportedModel(f"{gguf.path}: GGUF architecture {architecture!r} is not converted; known are: {known}")
    if gguf.value("split.count", int, 1) > 1:
        raise UnsupportedModel(
            f"{gguf.path} is one of several parts: join them with llama.cpp's llama-gguf-split --merge"
        )
    metadata = Metadata(gguf, architecture)
    try:
        config = _READERS[architecture](metadata)
    except (ArithmeticError, ValueError) as error:
        raise CheckpointError(f"{gguf.path}: the numbers of its metadata make no model: {error}") from error
    metadata.refuse_unread()
    matrices = Counter(tensor.tensor_type.name for tensor in gguf.tensors.values() if len(tensor.shape) > 1)
    most = matrices.most_common(1)[0][0] if matrices else "none"
    return config | {"dtype": _dtype(most, architecture), "gguf_file_type": _file_type(gguf, most)}


def _dtype(most: str, architecture: str) -> str:
    """Numbers keep their type where it is one; Gemma's activations exceed float16."""
    if most == "F16" and not architecture.startswith("gemma"):
        return "float16"
    return "float32" if most == "F32" else "bfloat16"


def _file_type(gguf: GgufFile, most: str) -> str:
    number = gguf.value("general.file_type", int, -1)
    names = {member.value: member.name.removeprefix("ALL_").removeprefix("MOSTLY_") for member in LlamaFileType}
    return names.get(number, most)


# -- what all share --------------------------------------------------------------------------------------------------


def _base(metadata: Metadata, architecture: str, model_type: str, **more: Any) -> Config:
    hidden_size = metadata.value("embedding_length", int)
    num_heads = metadata.value("attention.head_count", int)
    if num_heads < 1 or hidden_size < 1:
        raise CheckpointError(
            f"{metadata.gguf.path}: {num_heads} attention heads over a width of {hidden_size} make no model"
        )
    head_dim = metadata.value("attention.key_length", int, hidden_size // num_heads)
    if metadata.value("attention.value_length", int, head_dim) != head_dim:
        raise metadata.refusal("a width of value heads other than that of key heads")
    if not metadata.value("attention.causal", bool, True):
        raise metadata.refusal("attention that sees what comes after (attention.causal)")
    if not metadata.has_tensor("token_embd.weight"):
        raise CheckpointError(f"{metadata.gguf.path}: tensor token_embd.weight is missing")
    return {
        "architectures": [architecture],
        "model_type": model_type,
        "hidden_size": hidden_size,
        "intermediate_size": metadata.value("feed_forward_length", int),
        "num_hidden_layers": metadata.value("block_count", int),
        "num_attention_heads": num_heads,
        "num_key_value_heads": metadata.value("attention.head_count_kv", int, num_heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": metadata.value("context_length", int),
        "rms_norm_eps": metadata.number("attention.layer_norm_rms_epsilon"),
        **read_rope(metadata, head_dim, may_be_partial=model_type == "phi3"),
        "tie_word_embeddings": not metadata.has_tensor("output.weight"),
        "vocab_size": metadata.gguf.shape("token_embd.weight")[0],
        "pad_token_id": None,
        **more,
    }


def _biases(metadata: Metadata) -> Config:
    return {
        "attention_bias": metadata.has_tensor("blk.0.attn_q.bias"),
        "mlp_bias": metadata.has_tensor("blk.0.ffn_up.bias"),
    }


# -- architectures ---------------------------------------------------------------------------------------------------


def _llama(metadata: Metadata) -> Config:
    """Llama, and what llama.cpp stores under its name: Mistral, and experts as in Mixtral."""
    num_experts, num_used = (metadata.value(f"expert_{name}", int, 0) for name in ("count", "used_count"))
    window = metadata.value("attention.sliding_window", int, 0)
    if num_experts:
        more = {"num_local_experts": num_experts, "num_experts_per_tok": num_used, "sliding_window": window or None}
        return _base(metadata, "MixtralForCausalLM", "mixtral", **more)
    if window:
        return _base(metadata, "MistralForCausalLM", "mistral", sliding_window=window)
    return _base(metadata, "LlamaForCausalLM", "llama", **_biases(metadata))


def _qwen2(metadata: Metadata) -> Config:
    return _base(metadata, "Qwen2ForCausalLM", "qwen2", use_sliding_window=False)


def _qwen3(metadata: Metadata) -> Config:
    return _base(metadata, "Qwen3ForCausalLM", "qwen3", attention_bias=False, use_sliding_window=False)


def _qwen3_moe(metadata: Metadata) -> Config:
    gating = metadata.value("expert_gating_func", int, _SOFTMAX_GATING)
    if gating != _SOFTMAX_GATING or not metadata.value("expert_weights_norm", bool, True):
        raise metadata.refusal("a choice of experts other than by a normalised softmax")
    return _base(
        metadata,
        "Qwen3MoeForCausalLM",
        "qwen3_moe",
        attention_bias=False,
        use_sliding_window=False,
        num_experts=metadata.value("expert_count", int),
        num_experts_per_tok=metadata.value("expert_used_count", int),
        moe_intermediate_size=metadata.value("expert_feed_forward_length", int),
        norm_topk_prob=True,
        decoder_sparse_step=1,
        mlp_only_layers=[],
    )


def _gemma(metadata: Metadata) -> Config:
    return _base(metadata, "GemmaForCausalLM", "gemma", **_gelu(), attention_bias=False)


def _gemma2(metadata: Metadata) -> Config:
    config = _base(metadata, "Gemma2ForCausalLM", "gemma2", **_gelu(), attention_bias=False)
    return config | {
        "attn_logit_softcapping": metadata.number("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": metadata.number("final_logit_softcapping", 30.0),
        "sliding_window": metadata.value("attention.sliding_window", int, 4096),
        "layer_types": _layer_types(config["num_hidden_layers"], full_every=2),
        "query_pre_attn_scalar": _gemma_scale(config, num_layers_of_27b=46),
    }


def _gemma3(metadata: Metadata) -> Config:
    config = _base(metadata, "Gemma3ForCausalLM", "gemma3_text", **_gelu(), attention_bias=False)
    cap = metadata.number("final_logit_softcapping", 0.0)
    return config | {
        "attn_logit_softcapping": None,
        "final_logit_softcapping": cap or None,
        "sliding_window": metadata.value("attention.sliding_window", int),
        "rope_local_base_freq": metadata.number("rope.freq_base_swa", 10000.0),
        "layer_types": _layer_types(config["num_hidden_layers"], full_every=6),
        "query_pre_attn_scalar": _gemma_scale(config, num_layers_of_27b=62),
    }


def _gelu() -> Config:
    return {"hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh"}


def _layer_types(num_layers: int, full_every: int) -> list[str]:
    return ["sliding_attention" if i % full_every else "full_attention" for i in range(1, num_layers + 1)]


def _gemma_scale(config: Config, num_layers_of_27b: int) -> int:
    """The largest model scales by the width a head would have if all made up the hidden size."""
    if config["num_hidden_layers"] == num_layers_of_27b:
        return int(config["hidden_size"] // config["num_attention_heads"])
    return int(config["head_dim"])


def _phi3(metadata: Metadata) -> Config:
    config = _base(metadata, "Phi3ForCausalLM", "phi3")
    original = metadata.value("rope.scaling.original_context_length", int, config["max_position_embeddings"])
    window = metadata.value("attention.sliding_window", int, 0)
    return config | {"original_max_position_embeddings": original, "sliding_window": window or None}


def _olmo2(metadata: Metadata) -> Config:
    return _base(metadata, "Olmo2ForCausalLM", "olmo2", attention_bias=False)


def _smollm3(metadata: Metadata) -> Config:
    biases = _biases(metadata)
    return _base(
        metadata, "SmolLM3ForCausalLM", "smollm3", no_rope_layer_interval=4, use_sliding_window=False, **biases
    )


def _granite(metadata: Metadata) -> Config:
    if not metadata.value("rope.scaling.finetuned", bool, True):
        raise metadata.refusal("a Granite without rotary embedding (rope.scaling.finetuned)")
    config = _base(metadata, "GraniteForCausalLM", "granite", **_biases(metadata))
    return config | {
        "attention_multiplier": metadata.number("attention.scale", config["head_dim"] ** -0.5),
        "embedding_multiplier": metadata.number("embedding_scale", 1.0),
        "residual_multiplier": metadata.number("residual_scale", 1.0),
        "logits_scaling": metadata.number("logit_scale", 1.0),
    }


_READERS: dict[str, Callable[[Metadata], Config]] = {
    "llama": _llama,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "qwen3moe": _qwen3_moe,
    "gemma": _gemma,
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "phi3": _phi3,
    "olmo2": _olmo2,
    "smollm3": _smollm3,
    "granite": _granite,
}
