"""Which tensor of a GGUF file becomes which of a checkpoint, in what shape, and what is undone on the way.

llama.cpp stores the rows of Q and K permuted for some architectures (rotary pairs as neighbours), Gemma's norm weights
with their offset of 1 added, and all experts' matrices of a layer as one tensor.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from engine.errors import CheckpointError
from engine.models import gguf_rope
from engine.models.checkpoint import first_few
from engine.models.gguf import GgufFile


class TensorPlan(NamedTuple):
    """Where one tensor of a checkpoint comes from, and how it must look.

    Attributes:
        source: The GGUF tensor.
        name: In the checkpoint.
        shape: In the checkpoint.
        expert: Whose matrix of a stacked tensor it is; None for a whole tensor.
        num_permuted_heads: Heads whose rows are stored in llama.cpp's order; 0 where they are not.
        offset: Is added to each value.
    """

    source: str
    name: str
    shape: tuple[int, ...]
    expert: int | None = None
    num_permuted_heads: int = 0
    offset: float = 0.0


class _Part(NamedTuple):
    """A row of a table below; `{}` in the target stands for the expert."""

    source: str
    target: str
    shape: tuple[str, ...]


def _parts(table: str) -> tuple[_Part, ...]:
    rows = (line.split() for line in table.strip().splitlines())
    return tuple(_Part(source, target, tuple(shape)) for source, target, *shape in rows)


_ATTENTION = _parts("""
    attn_q.weight       self_attn.q_proj.weight  queries hidden
    attn_k.weight       self_attn.k_proj.weight  keys hidden
    attn_v.weight       self_attn.v_proj.weight  keys hidden
    attn_output.weight  self_attn.o_proj.weight  hidden queries
""")
_ATTENTION_BIASES = _parts("""
    attn_q.bias         self_attn.q_proj.bias    queries
    attn_k.bias         self_attn.k_proj.bias    keys
    attn_v.bias         self_attn.v_proj.bias    keys
    attn_output.bias    self_attn.o_proj.bias    hidden
""")
_MLP = _parts("""
    ffn_gate.weight     mlp.gate_proj.weight     inner hidden
    ffn_up.weight       mlp.up_proj.weight       inner hidden
    ffn_down.weight     mlp.down_proj.weight     hidden inner
""")
_MLP_BIASES = _parts("""
    ffn_gate.bias       mlp.gate_proj.bias       inner
    ffn_up.bias         mlp.up_proj.bias         inner
    ffn_down.bias       mlp.down_proj.bias       hidden
""")
_MIXTRAL_EXPERTS = _parts("""
    ffn_gate_inp.weight   block_sparse_moe.gate.weight           experts hidden
    ffn_gate_exps.weight  block_sparse_moe.experts.{}.w1.weight  experts inner hidden
    ffn_down_exps.weight  block_sparse_moe.experts.{}.w2.weight  experts hidden inner
    ffn_up_exps.weight    block_sparse_moe.experts.{}.w3.weight  experts inner hidden
""")
_QWEN_EXPERTS = _parts("""
    ffn_gate_inp.weight   mlp.gate.weight                  experts hidden
    ffn_gate_exps.weight  mlp.experts.{}.gate_proj.weight  experts expert_inner hidden
    ffn_up_exps.weight    mlp.experts.{}.up_proj.weight    experts expert_inner hidden
    ffn_down_exps.weight  mlp.experts.{}.down_proj.weight  experts hidden expert_inner
""")
_FUSED = _parts("""
    attn_qkv.weight     self_attn.qkv_proj.weight  queries_keys_values hidden
    attn_output.weight  self_attn.o_proj.weight    hidden queries
    ffn_up.weight       mlp.gate_up_proj.weight    gate_up hidden
    ffn_down.weight     mlp.down_proj.weight       hidden inner
""")
_NORMS = _parts("""
    attn_norm.weight  input_layernorm.weight           hidden
    ffn_norm.weight   post_attention_layernorm.weight  hidden
""")
_NORMS_AFTER = _parts("""
    post_attention_norm.weight  post_attention_layernorm.weight    hidden
    post_ffw_norm.weight        post_feedforward_layernorm.weight  hidden
""")
_NORMS_AROUND = _NORMS_AFTER + _parts("""
    attn_norm.weight  input_layernorm.weight            hidden
    ffn_norm.weight   pre_feedforward_layernorm.weight  hidden
""")
_HEAD_NORMS = _parts("""
    attn_q_norm.weight  self_attn.q_norm.weight  head
    attn_k_norm.weight  self_attn.k_norm.weight  head
""")
_WIDE_HEAD_NORMS = _parts("""
    attn_q_norm.weight  self_attn.q_norm.weight  queries
    attn_k_norm.weight  self_attn.k_norm.weight  keys
""")


class _Layout(NamedTuple):
    """How llama.cpp stores a layer of an architecture."""

    parts: tuple[_Part, ...]
    is_permuted: bool = False
    norm_offset: float = 0.0


_PLAIN = _NORMS + _ATTENTION + _MLP
_LAYOUTS = {
    "LlamaForCausalLM": _Layout(_PLAIN, is_permuted=True),
    "MistralForCausalLM": _Layout(_PLAIN, is_permuted=True),
    "SmolLM3ForCausalLM": _Layout(_PLAIN, is_permuted=True),
    "GraniteForCausalLM": _Layout(_PLAIN, is_permuted=True),
    "MixtralForCausalLM": _Layout(_NORMS + _ATTENTION + _MIXTRAL_EXPERTS, is_permuted=True),
    "Qwen2ForCausalLM": _Layout(_PLAIN + _ATTENTION_BIASES[:3]),
    "Qwen3ForCausalLM": _Layout(_PLAIN + _HEAD_NORMS),
    "Qwen3MoeForCausalLM": _Layout(_NORMS + _ATTENTION + _HEAD_NORMS + _QWEN_EXPERTS),
    "GemmaForCausalLM": _Layout(_PLAIN, norm_offset=-1.0),
    "Gemma2ForCausalLM": _Layout(_NORMS_AROUND + _ATTENTION + _MLP, norm_offset=-1.0),
    "Gemma3ForCausalLM": _Layout(_NORMS_AROUND + _ATTENTION + _HEAD_NORMS + _MLP, norm_offset=-1.0),
    "Phi3ForCausalLM": _Layout(_NORMS + _FUSED),
    "Olmo2ForCausalLM": _Layout(_NORMS_AFTER + _ATTENTION + _WIDE_HEAD_NORMS + _MLP),
}


def plan_tensors(gguf: GgufFile, config: dict[str, Any]) -> list[TensorPlan]:
    """Plan every tensor of the model that `config`, the content of its config.json, describes.

    Raises:
        CheckpointError: Tensors are missing, unknown or misshapen; the first few of each are named.
    """
    if config["num_hidden_layers"] > len(gguf.tensors):
        raise CheckpointError(
            f"{gguf.path}: {config['num_hidden_layers']} layers cannot be made of {len(gguf.tensors)} tensors"
        )
    stored = list(_stored(config))
    planned = {plan.source for plan in stored}
    found = gguf.tensors.keys() - set(gguf_rope.TENSORS)
    misshapen = [
        f"{plan.source} has shape {list(gguf.shape(plan.source))} where the metadata needs {list(plan.shape)}"
        for plan in stored
        if plan.source in found and gguf.shape(plan.source) != plan.shape
    ]
    faults = {"missing": sorted(planned - found), "unknown": sorted(found - planned), "misshapen": misshapen}
    sentences = [f"{len(names)} {kind}: {first_few(names)}" for kind, names in faults.items() if names]
    if sentences:
        model = config["model_type"]
        raise CheckpointError(f"{gguf.path}: tensors do not make a {model} model; {'; '.join(sentences)}")
    return [plan for whole in stored for plan in _by_expert(whole)]


def row_order(plan: TensorPlan) -> npt.NDArray[np.intp] | None:
    """Return which stored row becomes row i; None where the order stays.

    A head's rows are stored as (pair, half), the two that a rotation mixes being neighbours; the model's are (half,
    pair).
    """
    if not plan.num_permuted_heads:
        return None
    num_rows, num_heads = plan.shape[0], plan.num_permuted_heads
    stored = np.arange(num_rows).reshape(num_heads, num_rows // num_heads // 2, 2)
    return stored.swapaxes(1, 2).reshape(num_rows)


def _by_expert(stored: TensorPlan) -> Iterable[TensorPlan]:
    if "{}" not in stored.name:
        yield stored
        return
    for expert in range(stored.shape[0]):
        yield stored._replace(name=stored.name.format(expert), shape=stored.shape[1:], expert=expert)


def _stored(config: dict[str, Any]) -> Iterable[TensorPlan]:
    """Plan each tensor of the file; the matrices of all experts are one."""
    layout = _LAYOUTS[config["architectures"][0]]
    sizes = _sizes(config)
    hidden, vocab = sizes["hidden"], sizes["vocab"]
    yield TensorPlan("token_embd.weight", "model.embed_tokens.weight", (vocab, hidden))
    parts = layout.parts
    parts += _ATTENTION_BIASES if config.get("attention_bias") else ()
    parts += _MLP_BIASES if config.get("mlp_bias") else ()
    permuted = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    for index in range(config["num_hidden_layers"]):
        for part in parts:
            yield TensorPlan(
                f"blk.{index}.{part.source}",
                f"model.layers.{index}.{part.target}",
                tuple(sizes[name] for name in part.shape),
                num_permuted_heads=permuted.get(part.source.split(".")[0], 0) if layout.is_permuted else 0,
                offset=layout.norm_offset if part.target.endswith("norm.weight") else 0.0,
            )
    yield TensorPlan("output_norm.weight", "model.norm.weight", (hidden,), offset=layout.norm_offset)
    if not config["tie_word_embeddings"]:
        yield TensorPlan("output.weight", "lm_head.weight", (vocab, hidden))


def _sizes(config: dict[str, Any]) -> dict[str, int]:
    queries = config["num_attention_heads"] * config["head_dim"]
    keys = config["num_key_value_heads"] * config["head_dim"]
    return {
        "vocab": config["vocab_size"],
        "hidden": config["hidden_size"],
        "inner": config["intermediate_size"],
        "head": config["head_dim"],
        "queries": queries,
        "keys": keys,
        "queries_keys_values": queries + 2 * keys,
        "gate_up": 2 * config["intermediate_size"],
        "experts": config.get("num_local_experts") or config.get("num_experts") or 0,
        "expert_inner": config.get("moe_intermediate_size") or 0,
    }
