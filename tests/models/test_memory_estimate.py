from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from engine.config import EngineConfig
from engine.errors import CheckpointError, ConfigError
from engine.models.decoder import Decoder
from engine.models.memory_estimate import MemoryEstimate, estimate_memory
from engine.models.memory_estimate import refuse_what_cannot_fit as refuse
from engine.models.registry import build_model, own_shape

MIB = 2**20
LLAMA: dict[str, Any] = {
    "vocab_size": 1000,
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 8,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "dtype": "bfloat16",
}
CONFIG = EngineConfig(max_num_seqs=8, max_num_batched_tokens=16)
THROUGH_TRANSFORMERS = EngineConfig(max_num_seqs=8, max_num_batched_tokens=16, model_impl="transformers")
TOKEN_SIZE_BYTES = 2 * 4 * 2 * 8 * 2
"""Keys and values, layers, K/V heads, head size, bytes a number."""
LOGITS_SIZE_BYTES = 8 * 1000 * 4


def write(folder: Path, changes: dict[str, Any] | None = None, dtype: torch.dtype = torch.bfloat16) -> Path:
    (folder / "config.json").write_text(json.dumps(LLAMA | (changes or {})))
    tensors = {"a": torch.zeros(1000, 64, dtype=dtype), "b": torch.zeros(3, 5, dtype=dtype)}
    save_file(tensors, folder / "model.safetensors")
    return folder


def estimate(folder: Path, config: EngineConfig = CONFIG) -> MemoryEstimate:
    return estimate_memory(folder, config, 2**30, own_shape(folder, config))


def refuse_what_cannot_fit(folder: Path, config: EngineConfig, available_bytes: int) -> MemoryEstimate:
    return refuse(folder, config, available_bytes, own_shape(folder, config))


def test_the_numbers_are_those_of_the_files(tmp_path: Path) -> None:
    found = estimate(write(tmp_path))
    assert found.weights_bytes == (64000 + 15) * 2
    assert found.loading_bytes == 0
    assert found.kv_bytes == 4096 * TOKEN_SIZE_BYTES
    assert found.logits_bytes == LOGITS_SIZE_BYTES
    assert (found.max_model_len, found.longest) == (4096, 4096)
    assert found.rotary_bytes == 4096 * 8 * 4
    later = found.kv_bytes + found.rotary_bytes + found.logits_bytes
    assert found.peak_bytes == found.weights_bytes + later


def test_a_model_of_transformers_keeps_no_table_of_positions_and_a_tied_head_is_kept_once(tmp_path: Path) -> None:
    folder = write(tmp_path, {"tie_word_embeddings": True})
    tied = {"model.embed_tokens.weight": torch.zeros(1000, 64, dtype=torch.bfloat16)}
    save_file(tied, folder / "model.safetensors")
    ours, theirs = estimate(folder), estimate(folder, THROUGH_TRANSFORMERS)
    assert (theirs.weights_bytes, theirs.rotary_bytes) == (2 * 64000, 0)
    assert (ours.weights_bytes, ours.rotary_bytes) == (2 * 64000, 4096 * 8 * 4)
    write(tmp_path, {"tie_word_embeddings": True, "partial_rotary_factor": 0.5})
    save_file(tied, folder / "model.safetensors")
    assert estimate(folder) == theirs, "our own decoder does not take it"


def test_weights_take_what_the_asked_type_takes(tmp_path: Path) -> None:
    folder = write(tmp_path)
    wide = estimate(folder, EngineConfig(dtype="float32", max_model_len=2))
    assert wide.weights_bytes == (64000 + 15) * 4
    assert wide.loading_bytes == 64000 * 2
    assert wide.kv_bytes == 16 * TOKEN_SIZE_BYTES * 2


@pytest.mark.parametrize(
    ("changes", "num_tokens"),
    [
        ({"sliding_window": 33}, 4 * 64),
        ({"sliding_window": 33, "use_sliding_window": False}, 4 * 4096),
        (
            {"sliding_window": 33, "layer_types": ["full_attention", "sliding_attention"] * 2},
            2 * 4096 + 2 * 64,
        ),
        ({"head_dim": 16}, 2 * 4 * 4096),
        ({"num_key_value_heads": None}, 4 * 2048),
        ({"num_hidden_layers": None}, 0),
        ({"num_hidden_layers": None, "n_layer": 2}, 2 * 4096),
    ],
)
def test_kv_follows_heads_layers_and_windows(tmp_path: Path, changes: dict[str, Any], num_tokens: int) -> None:
    """`num_tokens` are the tokens kept, summed over the layers; a window of 33 and 16 tokens in flight take 64."""
    found = estimate(write(tmp_path, changes), THROUGH_TRANSFORMERS)
    assert found.kv_bytes == num_tokens * TOKEN_SIZE_BYTES // 4


def test_the_text_part_of_a_nested_config_counts(tmp_path: Path) -> None:
    folder = write(tmp_path)
    (folder / "config.json").write_text(json.dumps({"model_type": "pictures", "text_config": LLAMA}))
    assert estimate(folder).kv_bytes == 4096 * TOKEN_SIZE_BYTES


def test_a_context_that_cannot_fit_is_refused_with_the_numbers_and_the_longest_that_fits(tmp_path: Path) -> None:
    folder = write(tmp_path)
    available = (64000 + 15) * 2 + LOGITS_SIZE_BYTES + 1000 * (TOKEN_SIZE_BYTES + 8 * 2)
    with pytest.raises(ConfigError) as refusal:
        refuse_what_cannot_fit(folder, CONFIG, available)
    for words in (
        "weights 0.1 MiB",
        "of 4096 tokens 1.0 MiB",
        "0.4 MiB are available",
        "--max-model-len to at most 944",
    ):
        assert words in str(refusal.value)
    lower = EngineConfig(max_num_seqs=8, max_num_batched_tokens=16, max_model_len=944)
    assert refuse_what_cannot_fit(folder, lower, available).longest == 944


def test_rows_that_cannot_fit_are_refused_with_the_number_that_does(tmp_path: Path) -> None:
    folder = write(tmp_path)
    config = EngineConfig(max_num_seqs=8, max_num_batched_tokens=5000, max_model_len=128)
    shape = own_shape(folder, config)
    found = estimate_memory(folder, config, 2**30, shape, row_bytes=3000)
    assert found.rows_bytes == 3000 * 8 * 128, "no step has more rows than its requests have tokens"
    assert found.peak_bytes == found.without_rows_bytes + found.rows_bytes
    available = found.without_rows_bytes + 3000 * 700 + 2999
    with pytest.raises(ConfigError, match="lower --max-num-batched-tokens 5000 to at most 679, or"):
        refuse(folder, config, available, shape, row_bytes=3000)
    for num_rows, fits in ((700, True), (701, False)):
        lower = EngineConfig(max_num_seqs=8, max_num_batched_tokens=num_rows, max_model_len=128)
        assert (estimate_memory(folder, lower, available, shape, 3000).peak_bytes <= available) is fits
    with pytest.raises(ConfigError, match=r"lower --max-model-len to at most \d+, or"):
        refuse(folder, config, found.without_rows_bytes + 3000 * 7, shape, row_bytes=3000)


@pytest.mark.parametrize(
    ("dtype", "available_bytes", "remedy"),
    [
        ("float32", 230_000, "take --dtype bfloat16"),
        ("float32", 1000, "available: take a smaller model, or free memory"),
        ("auto", 1000, "available: take a smaller model, or free memory"),
    ],
)
def test_weights_that_cannot_fit_are_refused_with_a_remedy_that_helps(
    tmp_path: Path, dtype: str, available_bytes: int, remedy: str
) -> None:
    config = EngineConfig(dtype=dtype, max_model_len=2, max_num_seqs=1)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=remedy):
        refuse_what_cannot_fit(write(tmp_path), config, available_bytes)


def test_a_context_of_windows_alone_is_bounded_by_its_rotary_table_and_by_what_can_be_asked_for(tmp_path: Path) -> None:
    changes = {"architectures": ["MistralForCausalLM"], "sliding_window": 5, "max_position_embeddings": 10**9}
    folder = write(tmp_path, changes)
    with pytest.raises(ConfigError, match=f"lower --max-model-len to at most {2**24}, or"):
        refuse_what_cannot_fit(folder, CONFIG, 2**30)
    assert estimate(folder).rotary_bytes == 10**9 * 32


@pytest.mark.parametrize(
    "names", [["model.embed_tokens.weight"], ["lm_head.weight"], ["model.embed_tokens.weight", "lm_head.weight"]]
)
def test_an_embedding_that_is_the_head_too_counts_once(tmp_path: Path, names: list[str]) -> None:
    folder = write(tmp_path, {"tie_word_embeddings": True})
    save_file({name: torch.zeros(1000, 64) for name in names}, folder / "model.safetensors")
    assert estimate(folder).weights_bytes == 1000 * 64 * 2


def test_what_transformers_leaves_unread_takes_nothing(tmp_path: Path) -> None:
    folder = write(tmp_path, {"architectures": ["Glm4MoeForCausalLM"]})
    names = ("model.layers.3.mlp.up_proj.weight", "model.layers.4.mlp.up_proj.weight", "h.0.attn.bias")
    save_file({name: torch.zeros(10, 10) for name in names}, folder / "model.safetensors")
    assert estimate(folder).weights_bytes == 100 * 2


@pytest.mark.parametrize(
    ("model_type", "left_out"),
    [
        *(("llama", ""), ("gemma2", "num_key_value_heads"), ("mixtral", ""), ("gpt2", ""), ("gpt_bigcode", "")),
        *(("glm", "num_key_value_heads"), ("deepseek_v3", ""), ("minicpm3", "head_dim"), ("jetmoe", "")),
        *(("longcat_flash", ""), ("phi3", "num_key_value_heads")),
    ],
)
def test_it_is_no_more_than_what_is_taken(draw_model: Any, tmp_path: Path, model_type: str, left_out: str) -> None:
    changes = {"num_key_value_heads": {"gemma2": 4, "phi3": 6}[model_type]} if model_type in ("gemma2", "phi3") else {}
    draw_model(model_type, num_attention_heads=8 if model_type == "gemma2" else 6, **changes).save_pretrained(tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({key: raw[key] for key in raw if key != left_out}))
    config = EngineConfig(max_model_len=64, max_num_seqs=8)
    model, found = build_model(tmp_path, config, lambda done, total: None).model, estimate(tmp_path, config)
    shape = model.config
    kept = 2 * 4 * shape.num_layers * shape.num_kv_heads * shape.head_dim * 64
    assert 0 < found.kv_bytes <= kept
    if isinstance(model, Decoder):
        assert found.kv_bytes == kept or any(shape.windows)
    else:
        module = model._body.module  # type: ignore[attr-defined]
        assert 0 < found.weights_bytes <= sum(part.nbytes for part in (*module.parameters(), *module.buffers()))


@pytest.mark.parametrize("key", ["num_hidden_layers", "hidden_size", "vocab_size", "max_position_embeddings"])
def test_a_claim_beyond_all_models_is_refused_with_value_and_limit(tmp_path: Path, key: str) -> None:
    with pytest.raises(CheckpointError, match=rf"{key} may be at most \d+, got 10{{30}}"):
        estimate(write(tmp_path, {key: 10**30}))


@pytest.mark.parametrize(
    "entry",
    [
        {"data_offsets": [-4, 0]},
        {"data_offsets": [0.0, 4.0]},
        {"data_offsets": [4, 0]},
        {"shape": [2]},
        {"shape": [True]},
        {"dtype": ["F32"]},
    ],
)
def test_an_entry_of_a_header_that_makes_no_sense_is_refused(tmp_path: Path, entry: dict[str, Any]) -> None:
    (tmp_path / "config.json").write_text("{}")
    header = json.dumps({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]} | entry}).encode()
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
    with pytest.raises(CheckpointError, match="the header's entry of a is"):
        estimate(tmp_path)


def test_json_nested_too_deep_is_a_checkpoint_error(tmp_path: Path) -> None:
    deep = "[" * 100_000 + "]" * 100_000
    write(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(len(deep).to_bytes(8, "little") + deep.encode())
    with pytest.raises(CheckpointError, match=r"model\.safetensors is not JSON"):
        estimate(tmp_path)
    (tmp_path / "config.json").write_text(deep)
    with pytest.raises(CheckpointError, match=r"config\.json is not JSON"):
        estimate(tmp_path)


@pytest.mark.parametrize(
    "changes",
    [
        {"architectures": 5},
        {"architectures": "LlamaForCausalLM"},
        {"architectures": [["x"]]},
        {"architectures": [{}]},
        {"text_config": [1]},
        {"text_config": "x"},
        {"dtype": ["float32"]},
        {"text_config": {"torch_dtype": 5}},
    ],
)
def test_a_value_of_the_wrong_type_is_a_checkpoint_error(tmp_path: Path, changes: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json: (architectures|text_config|dtype|torch_dtype) must be"):
        estimate(write(tmp_path, changes))


def test_a_header_that_makes_no_sense_is_a_checkpoint_error(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    header = json.dumps({"a": {"dtype": "F32"}}).encode()
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(CheckpointError, match="the header's entry of a is"):
        estimate(tmp_path)


def test_the_estimate_needs_no_torch() -> None:
    code = "import sys, engine.models.memory_estimate; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
