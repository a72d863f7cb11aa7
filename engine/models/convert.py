"""GGUF to the Hugging Face layout: weights as bfloat16 safetensors, configuration, tokenizer, chat template.

Numbers are dequantized by the `gguf` package and rounded to the nearest bfloat16, ties to even, a few rows at a time:
memory stays at some tens of MiB whatever the model's size. llama.cpp stores the rows of Q and K permuted, with rotary
pairs as neighbours; here they get their original order back. Only numpy is used.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import numpy.typing as npt

from engine.errors import CheckpointError, UnsupportedModel
from engine.models.gguf import GgufFile
from engine.models.gguf_tokenizer import GgufTokenizer, read_tokenizer

Progress = Callable[[str, int, int], None]
"""Called with (phase, done, total) in the calling thread."""


class _TensorPlan(NamedTuple):
    """Where one tensor comes from and how it must look."""

    source: str
    name: str
    shape: tuple[int, ...]
    num_permuted_heads: int = 0


def convert(source: Path, folder: Path, progress: Progress) -> None:
    """Write the model of the GGUF file `source` into `folder`, which must exist and be empty of them.

    `progress` is called often, so that what it raises gives up at once.

    Raises:
        CheckpointError: The file is truncated, corrupt or misshapen.
        UnsupportedModel: Its architecture, quantization or tokenizer is not one we convert.
    """
    gguf = GgufFile(source, lambda: progress("convert", 0, 0))
    config = _llama_config(gguf)
    plans = _checked_plans(gguf, config)
    tokenizer = read_tokenizer(gguf)
    if len(tokenizer.tokens) != config["vocab_size"]:
        raise CheckpointError(
            f"{source}: the tokenizer has {len(tokenizer.tokens)} tokens, the embedding {config['vocab_size']} rows"
        )
    _write_text_files(folder, config, tokenizer)
    with (folder / "model.safetensors").open("xb") as file:
        _write_safetensors(file, gguf, plans, progress)


def _llama_config(gguf: GgufFile) -> dict[str, Any]:
    """Read the metadata of a llama model as the content of config.json."""
    architecture = gguf.value("general.architecture", str)
    if architecture != "llama":
        raise UnsupportedModel(f"{gguf.path}: GGUF architecture {architecture!r} is not converted; only llama is")
    hidden_size = gguf.value("llama.embedding_length", int)
    num_heads = gguf.value("llama.attention.head_count", int)
    if num_heads < 1 or hidden_size < 1:
        raise CheckpointError(f"{gguf.path}: {num_heads} attention heads over a width of {hidden_size} make no model")
    num_kv_heads = gguf.value("llama.attention.head_count_kv", int, num_heads)
    head_dim = gguf.value("llama.attention.key_length", int, hidden_size // num_heads)
    _refuse_variants(gguf, head_dim)
    if "token_embd.weight" not in gguf.tensors:
        raise CheckpointError(f"{gguf.path}: tensor token_embd.weight is missing")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden_size,
        "intermediate_size": gguf.value("llama.feed_forward_length", int),
        "num_hidden_layers": gguf.value("llama.block_count", int),
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "head_dim": head_dim,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "max_position_embeddings": gguf.value("llama.context_length", int),
        "rms_norm_eps": _shortest(gguf.value("llama.attention.layer_norm_rms_epsilon", float)),
        "rope_theta": _shortest(gguf.value("llama.rope.freq_base", float, 10000.0)),
        "tie_word_embeddings": "output.weight" not in gguf.tensors,
        "vocab_size": _shape(gguf, "token_embd.weight")[0],
        "dtype": "bfloat16",
    }


def _refuse_variants(gguf: GgufFile, head_dim: int) -> None:
    """Refuse by name what llama files may carry and this converter would lose."""
    if gguf.value("llama.expert_count", int, 0):
        raise UnsupportedModel(f"{gguf.path}: mixtures of experts (llama.expert_count) are not converted")
    if gguf.value("llama.rope.dimension_count", int, head_dim) != head_dim or head_dim % 2:
        raise UnsupportedModel(
            f"{gguf.path}: rotary embedding of a part of each head (llama.rope.dimension_count) is not converted"
        )
    if gguf.value("llama.attention.value_length", int, head_dim) != head_dim:
        raise UnsupportedModel(f"{gguf.path}: value heads of another width than key heads are not converted")
    scaling = gguf.value("llama.rope.scaling.type", str, "none")
    if scaling != "none" or gguf.has("llama.rope.scale_linear") or "rope_freqs.weight" in gguf.tensors:
        raise UnsupportedModel(
            f"{gguf.path}: scaled rotary embeddings (llama.rope.scaling.type {scaling}, rope_freqs) are not converted"
        )


def _shortest(number: float) -> float:
    """Return the shortest decimal that is the same float32: 1e-05 where the file can only say 9.99999975e-06."""
    return float(str(np.float32(number)))


def _shape(gguf: GgufFile, source: str) -> tuple[int, ...]:
    """Return a tensor's shape, outermost dimension first."""
    return tuple(int(size) for size in reversed(gguf.tensors[source].shape))


def _checked_plans(gguf: GgufFile, config: dict[str, Any]) -> list[_TensorPlan]:
    """Plan every tensor of the model; missing, extra and misshapen ones are named."""
    if config["num_hidden_layers"] > len(gguf.tensors):
        raise CheckpointError(
            f"{gguf.path}: {config['num_hidden_layers']} layers cannot be made of {len(gguf.tensors)} tensors"
        )
    plans = _llama_plans(config)
    planned = {plan.source for plan in plans}
    for kind, names in (("missing", planned - gguf.tensors.keys()), ("unknown", gguf.tensors.keys() - planned)):
        if names:
            listed = ", ".join(sorted(names)[:5])
            raise CheckpointError(f"{gguf.path}: {len(names)} tensors of a llama model are {kind}: {listed}")
    for plan in plans:
        shape = _shape(gguf, plan.source)
        if shape != plan.shape:
            raise CheckpointError(
                f"{gguf.path}: tensor {plan.source} has shape {list(shape)} where the metadata needs {list(plan.shape)}"
            )
    return plans


def _llama_plans(config: dict[str, Any]) -> list[_TensorPlan]:
    hidden, inner, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    num_heads, num_kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    queries, keys = num_heads * config["head_dim"], num_kv_heads * config["head_dim"]
    plans = [_TensorPlan("token_embd.weight", "model.embed_tokens.weight", (vocab, hidden))]
    for index in range(config["num_hidden_layers"]):
        block, layer = f"blk.{index}.", f"model.layers.{index}."
        plans += [
            _TensorPlan(f"{block}attn_norm.weight", f"{layer}input_layernorm.weight", (hidden,)),
            _TensorPlan(f"{block}attn_q.weight", f"{layer}self_attn.q_proj.weight", (queries, hidden), num_heads),
            _TensorPlan(f"{block}attn_k.weight", f"{layer}self_attn.k_proj.weight", (keys, hidden), num_kv_heads),
            _TensorPlan(f"{block}attn_v.weight", f"{layer}self_attn.v_proj.weight", (keys, hidden)),
            _TensorPlan(f"{block}attn_output.weight", f"{layer}self_attn.o_proj.weight", (hidden, queries)),
            _TensorPlan(f"{block}ffn_norm.weight", f"{layer}post_attention_layernorm.weight", (hidden,)),
            _TensorPlan(f"{block}ffn_gate.weight", f"{layer}mlp.gate_proj.weight", (inner, hidden)),
            _TensorPlan(f"{block}ffn_up.weight", f"{layer}mlp.up_proj.weight", (inner, hidden)),
            _TensorPlan(f"{block}ffn_down.weight", f"{layer}mlp.down_proj.weight", (hidden, inner)),
        ]
    plans.append(_TensorPlan("output_norm.weight", "model.norm.weight", (hidden,)))
    if not config["tie_word_embeddings"]:
        plans.append(_TensorPlan("output.weight", "lm_head.weight", (vocab, hidden)))
    return plans


def _original_row_order(num_rows: int, num_heads: int) -> npt.NDArray[np.intp]:
    """Return which stored row becomes row i.

    A head's rows are stored as (pair, half), the two that a rotation mixes being neighbours; the model's are (half,
    pair).
    """
    stored = np.arange(num_rows).reshape(num_heads, num_rows // num_heads // 2, 2)
    return stored.swapaxes(1, 2).reshape(num_rows)


def to_bfloat16(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """Round float32 to the nearest bfloat16, ties to even, as bit patterns; NaN stays NaN."""
    bits = np.ascontiguousarray(values).view(np.uint32)
    rounded = (bits + (np.uint32(0x7FFF) + ((bits >> 16) & 1))) >> 16
    return np.where(np.isnan(values), np.uint32(0x7FC0), rounded).astype(np.uint16)


def _write_safetensors(file: BinaryIO, gguf: GgufFile, plans: Sequence[_TensorPlan], progress: Progress) -> None:
    """Write length, header and data; the sizes are known beforehand, so that one tensor at a time is in memory."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for plan in plans:
        end = offset + 2 * int(np.prod(plan.shape))
        header[plan.name] = {"dtype": "BF16", "shape": list(plan.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    file.write(struct.pack("<Q", len(text)) + text)
    for done, plan in enumerate(plans):
        progress("convert", done, len(plans))
        heads = plan.num_permuted_heads
        order = _original_row_order(plan.shape[0], heads) if heads else None
        for rows in gguf.rows(gguf.tensors[plan.source], order):
            file.write(to_bfloat16(rows).data)
    progress("convert", len(plans), len(plans))


def _write_text_files(folder: Path, config: dict[str, Any], tokenizer: GgufTokenizer) -> None:
    ids = {key: value for key, value in tokenizer.ids.items() if key in {"bos_token_id", "pad_token_id"}}
    eos = tokenizer.eos_token_ids
    ends = {"eos_token_id": eos[0] if len(eos) == 1 else eos} if eos else {}
    files: dict[str, Any] = {
        "config.json": {**config, **ids, **ends},
        "generation_config.json": {**ids, **ends},
        "tokenizer_config.json": tokenizer.config,
    }
    texts = {name: json.dumps(content, indent=2, ensure_ascii=False) + "\n" for name, content in files.items()}
    texts["tokenizer.json"] = tokenizer.backend.to_str()
    if tokenizer.chat_template is not None:
        texts["chat_template.jinja"] = tokenizer.chat_template
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8", newline="")
