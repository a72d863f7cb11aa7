"""Tiny random checkpoints of every family, through a GGUF file as llama.cpp writes it, give the same logits.

The writer here follows llama.cpp's conversion script: which rows it permutes, which norms get 1 added, what it stacks
and which numbers it stores. Tensor names are those of the gguf package.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import pytest
import torch
import transformers
from safetensors.torch import load_file
from tokenizers import pre_tokenizers

import engine
from engine.errors import UnsupportedModel
from engine.models.checkpoint import read_config
from engine.models.convert import convert
from engine.models.registry import choose

torch.set_num_threads(1)

BASE: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.15,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}
LINEAR = {"rope_type": "linear", "rope_theta": 500.0, "factor": 4.0}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0 + i / 8 for i in range(6)],
    "long_factor": [2.0 + i for i in range(6)],
    "original_max_position_embeddings": 32,
}
GEMMA3_ROPE = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
}
GRANITE = {
    "attention_multiplier": 0.3,
    "embedding_multiplier": 6.0,
    "residual_multiplier": 0.4,
    "logits_scaling": 3.0,
}
EXPERTS = {"num_experts_per_tok": 2, "num_hidden_layers": 2}


class Case(NamedTuple):
    """A family: its class in transformers, its name in GGUF, what sets it apart."""

    family: str
    architecture: str
    changes: dict[str, Any]
    loads_as: str | None = None


CASES = {
    "llama with wide heads": Case("Llama", "llama", {"head_dim": 16}),
    "llama tied, with biases": Case(
        "Llama", "llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}
    ),
    "llama 3": Case("Llama", "llama", {"rope_parameters": LLAMA3}),
    "llama with linear scaling": Case("Llama", "llama", {"rope_parameters": LINEAR}),
    "mistral": Case("Mistral", "llama", {"sliding_window": None}, loads_as="Llama"),
    "mistral with windows": Case("Mistral", "llama", {"sliding_window": 9}),
    "mixtral": Case("Mixtral", "llama", {"num_local_experts": 4, "sliding_window": None, **EXPERTS}),
    "qwen2 with yarn": Case("Qwen2", "qwen2", {"rope_parameters": YARN}),
    "qwen3": Case("Qwen3", "qwen3", {"head_dim": 16}),
    "qwen3 with experts": Case(
        "Qwen3Moe",
        "qwen3moe",
        {"head_dim": 16, "num_experts": 4, "moe_intermediate_size": 32, "norm_topk_prob": True, **EXPERTS},
    ),
    "gemma": Case("Gemma", "gemma", {"head_dim": 16}),
    "gemma2": Case("Gemma2", "gemma2", {"head_dim": 16, "sliding_window": 9, "query_pre_attn_scalar": 16}),
    "gemma3": Case(
        "Gemma3",
        "gemma3",
        {
            "head_dim": 16,
            "sliding_window": 9,
            "query_pre_attn_scalar": 16,
            "num_hidden_layers": 7,
            "rope_parameters": GEMMA3_ROPE,
        },
    ),
    "phi3 with windows": Case("Phi3", "phi3", {"sliding_window": 9, "original_max_position_embeddings": 128}),
    "phi3 with longrope": Case("Phi3", "phi3", {"rope_parameters": LONGROPE, "original_max_position_embeddings": 32}),
    "olmo2": Case("Olmo2", "olmo2", {}),
    "smollm3": Case("SmolLM3", "smollm3", {"num_hidden_layers": 5}),
    "granite": Case("Granite", "granite", GRANITE),
}
PERMUTED = {"Llama", "Mistral", "Mixtral", "SmolLM3", "Granite"}
STACKED = {
    "w1": "ffn_gate",
    "gate_proj": "ffn_gate",
    "w2": "ffn_down",
    "down_proj": "ffn_down",
    "w3": "ffn_up",
    "up_proj": "ffn_up",
}


def make_model(case: Case) -> Any:
    """The model, its weights ones that bfloat16 holds: what the norms' offset of 1 rounds away must not matter."""
    suffix = "TextConfig" if case.family == "Gemma3" else "Config"
    config = getattr(transformers, case.family + suffix)(**(BASE | case.changes))
    config._attn_implementation = "eager"
    torch.manual_seed(3)
    model = getattr(transformers, f"{case.family}ForCausalLM")(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or name.endswith("bias"):
                parameter.normal_(1.0 if "norm" in name and "Gemma" not in case.family else 0.0, 0.3)
            parameter.copy_(parameter.to(torch.bfloat16))
    return model


def permuted(weight: torch.Tensor, num_heads: int) -> torch.Tensor:
    half = weight.shape[0] // num_heads // 2
    return weight.reshape(num_heads, 2, half, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def stored_tensors(case: Case, config: Any, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The checkpoint's tensors under llama.cpp's names, in its form."""
    architecture = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == case.architecture)
    names = gguf.get_tensor_name_map(architecture, config.num_hidden_layers)
    stored: dict[str, torch.Tensor] = {}
    experts: dict[str, list[torch.Tensor]] = {}
    for name, tensor in tensors.items():
        base, _, kind = name.rpartition(".")
        if ".experts." in name:
            layer, (expert, matrix) = name.split(".")[2], base.split(".experts.")[1].split(".")
            matrices = experts.setdefault(f"blk.{layer}.{STACKED[matrix]}_exps.weight", [])
            matrices += [torch.empty(0)] * (int(expert) + 1 - len(matrices))
            matrices[int(expert)] = tensor
            continue
        if case.family in PERMUTED and base.endswith(("q_proj", "k_proj")):
            heads = config.num_attention_heads if base.endswith("q_proj") else config.num_key_value_heads
            tensor = permuted(tensor, heads)
        if "Gemma" in case.family and base.endswith("norm"):
            tensor = tensor + 1
        stored[f"{names.get_name(base)}.{kind}"] = tensor
    return stored | {name: torch.stack(matrices) for name, matrices in experts.items()}


def write_numbers(writer: gguf.GGUFWriter, case: Case, config: Any) -> None:
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    if getattr(config, "sliding_window", None):
        writer.add_sliding_window(config.sliding_window)
    for name, add in {
        "num_local_experts": writer.add_expert_count,
        "num_experts": writer.add_expert_count,
        "num_experts_per_tok": writer.add_expert_used_count,
        "moe_intermediate_size": writer.add_expert_feed_forward_length,
        "attn_logit_softcapping": writer.add_attn_logit_softcapping,
        "final_logit_softcapping": writer.add_final_logit_softcapping,
        "attention_multiplier": writer.add_attention_scale,
        "embedding_multiplier": writer.add_embedding_scale,
        "residual_multiplier": writer.add_residual_scale,
        "logits_scaling": writer.add_logit_scale,
    }.items():
        if getattr(config, name, None) is not None:
            add(getattr(config, name))
    write_rope(writer, config, head_dim)


def write_rope(writer: gguf.GGUFWriter, config: Any, head_dim: int) -> None:
    rope = config.rope_parameters
    rope = rope.get("full_attention", rope)
    writer.add_rope_freq_base(rope["rope_theta"])
    original = rope.get("original_max_position_embeddings")
    match rope["rope_type"]:
        case "linear":
            writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
            writer.add_rope_scaling_factor(rope["factor"])
        case "yarn":
            writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
            writer.add_rope_scaling_factor(rope["factor"])
            writer.add_rope_scaling_orig_ctx_len(original)
        case "longrope":
            scale = config.max_position_embeddings / original
            writer.add_rope_scaling_attn_factors(math.sqrt(1 + math.log(scale) / math.log(original)))
            writer.add_rope_scaling_orig_ctx_len(original)
            for name in ("long", "short"):
                factors = torch.tensor(rope[f"{name}_factor"], dtype=torch.float32)
                writer.add_tensor(f"rope_factors_{name}.weight", factors.numpy())
        case "llama3":
            writer.add_tensor("rope_freqs.weight", torch.tensor(llama3_divisors(rope, head_dim)).numpy())


def llama3_divisors(rope: dict[str, Any], head_dim: int) -> list[float]:
    divisors = []
    for pair in range(0, head_dim, 2):
        turns = rope["original_max_position_embeddings"] / (2 * math.pi * rope["rope_theta"] ** (pair / head_dim))
        if turns > rope["high_freq_factor"]:
            divisors.append(1.0)
        elif turns < rope["low_freq_factor"]:
            divisors.append(rope["factor"])
        else:
            share = (turns - rope["low_freq_factor"]) / (rope["high_freq_factor"] - rope["low_freq_factor"])
            divisors.append(1 / ((1 - share) / rope["factor"] + share))
    return divisors


def write_gguf(path: Path, case: Case, config: Any, tensors: dict[str, torch.Tensor]) -> Path:
    writer = gguf.GGUFWriter(path, case.architecture)
    write_numbers(writer, case, config)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(sorted(pre_tokenizers.ByteLevel.alphabet()))
    writer.add_token_types([1] * 256)
    writer.add_token_merges([])
    for name, tensor in stored_tensors(case, config, tensors).items():
        writer.add_tensor(name, tensor.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def quiet(phase: str, done: int, total: int) -> None:
    pass


def through_gguf(case: Case, folder: Path) -> tuple[Any, dict[str, torch.Tensor], Path]:
    """Return the model, its checkpoint's tensors, and the folder that was converted from its GGUF file."""
    model = make_model(case)
    model.save_pretrained(folder / "original")
    tensors = load_file(folder / "original" / "model.safetensors")
    path = write_gguf(folder / "model.gguf", case, model.config, tensors)
    (folder / "converted").mkdir()
    convert(path, folder / "converted", quiet)
    return model, tensors, folder / "converted"


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_model_through_a_gguf_file_has_the_same_weights_and_logits(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    model, tensors, folder = through_gguf(case, tmp_path)
    converted = load_file(folder / "model.safetensors")
    assert converted.keys() == tensors.keys()
    for tensor_name, tensor in tensors.items():
        # (w + 1) - 1 is rounded once
        exact = "Gemma" not in case.family or not tensor_name.endswith("norm.weight")
        torch.testing.assert_close(converted[tensor_name], tensor, rtol=0, atol=0 if exact else 2**-23)
    again = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    assert type(again).__name__ == f"{case.loads_as or case.family}ForCausalLM"
    token_ids = torch.randint(256, (1, 60), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        torch.testing.assert_close(again(token_ids).logits, model(token_ids).logits, rtol=0, atol=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_engine_runs_what_was_converted_and_gives_the_models_own_tokens(name: str, tmp_path: Path) -> None:
    model, _, folder = through_gguf(CASES[name], tmp_path)
    try:
        choose(read_config(folder), None, lambda done, total: None)
    except UnsupportedModel as refusal:
        pytest.skip(str(refusal))
    settings: dict[str, Any] = {"dtype": "float32", "kv_cache_memory_bytes": 2**23, "num_threads": 1}
    llm = engine.LLM(str(folder), log_level="warning", **settings)
    prompt = [(7 * i * i + 3) % 256 for i in range(40)]
    params = engine.SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    (output,) = llm.generate([prompt], params, use_tqdm=False)
    token_ids = list(prompt)
    with torch.no_grad():
        for _ in range(12):
            token_ids.append(int(model(torch.tensor([token_ids])).logits[0, -1].argmax()))
    assert output.outputs[0].token_ids == token_ids[len(prompt) :]


@pytest.mark.slow
@pytest.mark.parametrize(("family", "layers", "scale"), [("Gemma2", 46, 12), ("Gemma3", 62, 12)])
def test_largest_gemmas_scale_by_what_llama_cpp_knows_of_them(
    family: str, layers: int, scale: int, tmp_path: Path
) -> None:
    changes = {"head_dim": 16, "sliding_window": 9, "query_pre_attn_scalar": scale, "num_hidden_layers": layers}
    case = Case(family, family.lower(), changes)
    model, _, folder = through_gguf(case, tmp_path)
    again = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    assert again.config.query_pre_attn_scalar == scale
    assert again.config.layer_types == model.config.layer_types
