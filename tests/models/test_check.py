from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from engine.config import EngineConfig
from engine.errors import CheckpointError, ConfigError, ModelError, UnsupportedModel
from engine.models import DEFAULT, transformers_loading
from engine.models.check import check
from engine.models.likeness import draw
from engine.models.registry import build_model

Tensors = dict[str, torch.Tensor]


def quiet(*_progress: Any) -> None:
    """Tell nobody."""


@pytest.fixture
def folder(make_checkpoint: Callable[[str], tuple[Path, Any]], tmp_path: Path) -> Path:
    """A folder of a whole llama."""
    copied = shutil.copytree(make_checkpoint("llama")[0], tmp_path / "llama")
    tokenizers.Tokenizer(tokenizers.models.BPE(vocab={"a": 0}, merges=[])).save(str(copied / "tokenizer.json"))
    return copied


def configure(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def edit(folder: Path, change: Callable[[Tensors], Any]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def refused(folder: Path, kind: type[ModelError], words: str) -> None:
    """Expect the same refusal of the check and of the load."""
    with pytest.raises(kind, match=words):
        check(str(folder), quiet)
    with pytest.raises(kind, match=words):
        build_model(folder, EngineConfig(), quiet)


def test_a_whole_model_runs(folder: Path) -> None:
    assert "LlamaForCausalLM, the own decoder runs it" in check(str(folder), quiet)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda tensors: tensors.pop("model.norm.weight"), r"1 missing: model\.norm\.weight \[48\]"),
        (lambda tensors: tensors.update(foo=torch.ones(3)), r"1 unknown: foo \[3\]"),
        (lambda tensors: tensors.update({"model.norm.weight": torch.ones(3)}), r"is \[3\], must be \[48\]"),
    ],
)
def test_tensors_that_do_not_fit_are_named_before_anything_is_loaded(
    folder: Path, change: Callable[[Tensors], Any], words: str
) -> None:
    edit(folder, change)
    refused(folder, CheckpointError, words)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_a_stored_type_that_is_not_read_is_named(folder: Path, dtype: torch.dtype) -> None:
    edit(folder, lambda tensors: tensors.update({"model.norm.weight": torch.ones(48).to(dtype)}))
    refused(folder, UnsupportedModel, "is stored as")


@pytest.mark.parametrize("content", [b"", b"\xff" * 1000, None])
def test_a_file_that_is_cut_short_or_no_file_of_weights_is_refused(folder: Path, content: bytes | None) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1] if content is None else content)
    refused(folder, CheckpointError, "is truncated or corrupt")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_hidden_layers": 4096}, "4096 layers of 4096 MLPs in all, but the weight files of .* hold 21 tensors"),
        ({"hidden_size": 48 * 10**7}, r"misshapen: .*, must be \[199, 480000000\]"),
        ({"intermediate_size": 2**31 - 1, "hidden_size": 2**31 - 1}, "make no model"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers may be at most 4096"),
    ],
)
def test_sizes_that_the_files_do_not_hold_are_refused_before_anything_is_allocated(
    folder: Path, changes: dict[str, Any], words: str
) -> None:
    configure(folder, **changes)
    refused(folder, CheckpointError, words)


def test_the_architecture_that_is_taken_is_the_one_that_is_named(folder: Path, tmp_path: Path) -> None:
    configure(folder, architectures=["NovelForCausalLM", "LlamaForCausalLM"])
    assert "LlamaForCausalLM, the own decoder runs it" in check(str(folder), quiet)
    describe(tmp_path, "gpt2", n_layer=2)
    configure(tmp_path, architectures=["NovelForCausalLM", "GPT2LMHeadModel"])
    assert "GPT2LMHeadModel, transformers' model, which passes" in check(str(tmp_path), quiet)


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({}, "weights not downloaded"),
        ({"b"}, "weights downloaded in part, without a.safetensors, c.safetensors"),
        ({"a", "b", "c"}, r"0 MB in 3 files"),
    ],
)
def test_of_a_model_of_the_hub_it_is_said_how_much_is_downloaded(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: set[str], said: str
) -> None:
    repository, commit = tmp_path / "hub" / "models--org--part", "c" * 40
    snapshot = repository / "snapshots" / commit
    shutil.copytree(folder, snapshot)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    tensors = load_file(snapshot / "model.safetensors")
    (snapshot / "model.safetensors").unlink()
    shards = {name: "abc"[number % 3] for number, name in enumerate(tensors)}
    index = {"weight_map": {name: f"{shard}.safetensors" for name, shard in shards.items()}}
    (snapshot / "model.safetensors.index.json").write_text(json.dumps(index))
    for file in files:
        held = {name: tensor for name, tensor in tensors.items() if shards[name] == file}
        save_file(held, snapshot / f"{file}.safetensors")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    assert re.search(f"LlamaForCausalLM, the own decoder runs it; .*, {said}, vocabulary 1", check("org/part", quiet))


def test_a_quantized_checkpoint_is_refused(folder: Path) -> None:
    configure(folder, quantization_config={"quant_method": "gptq"})
    refused(folder, UnsupportedModel, "quantized checkpoints are not supported")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"vocab_size": 10**9}, "describes .* numbers, the weight files of .* hold"),
        ({"num_hidden_layers": 4096}, "4096 layers .* tensors"),
    ],
)
def test_sizes_that_the_files_do_not_hold_are_refused_before_transformers_allocates(
    draw_model: Any, tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    draw_model("stablelm").save_pretrained(tmp_path)
    configure(tmp_path, **changes)
    refused(tmp_path, CheckpointError, words)


def test_layers_that_are_not_attention_are_refused_without_loading(draw_model: Any, tmp_path: Path) -> None:
    draw_model("lfm2").save_pretrained(tmp_path)
    refused(tmp_path, UnsupportedModel, "check 'layer types' failed: conv is neither full nor sliding attention")


REFUSED = {
    "bloom": ({}, "call a layer"),
    "llama4_text": ({}, "layer types"),
    "qwen3_next": ({}, "layer types"),
    "minimax": ({}, "layer types"),
    "lfm2": ({"layer_types": ["conv", "full_attention"] * 8, "num_hidden_layers": 16}, "layer types"),
    "bamba": ({}, "layer types"),
    "jamba": ({}, "layer types"),
    "mamba2": ({}, "layer types"),
    "rwkv": ({"num_hidden_layers": 4}, "call a layer"),
    "falcon": ({"alibi": True}, "call a layer"),
    "mpt": ({"n_layers": 4}, "call a layer"),
    "laguna": ({"num_hidden_layers": 4, "per_layer_config": {"1": {"sliding_window": 3}}}, "windows"),
    "roberta": ({"is_decoder": True}, "eager"),
    "doge": ({"num_hidden_layers": 4, "num_experts": 64}, "eager"),
}
"""model_type → (changes of what transformers has as its sizes, the check that fails)."""


def describe(folder: Path, model_type: str, **changes: Any) -> Any:
    """Write a config.json, of real size, and nothing else."""
    config = transformers.CONFIG_MAPPING[model_type](**changes)
    config.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type]]
    config.save_pretrained(folder)
    return config


@pytest.mark.parametrize("model_type", REFUSED)
def test_what_would_be_wrong_without_a_word_is_refused_from_its_configuration_alone(
    tmp_path: Path, model_type: str
) -> None:
    changes, failed = REFUSED[model_type]
    describe(tmp_path, model_type, **changes)
    assert [file.name for file in tmp_path.iterdir()] == ["config.json"]
    with pytest.raises(UnsupportedModel, match=f"check '{failed}' failed: .* Our own decoder does not run it either"):
        check(str(tmp_path), quiet)


@pytest.mark.parametrize("model_type", ["gpt2", "cohere2", "qwen2_moe"])
def test_what_runs_through_transformers_is_known_from_its_configuration_alone(tmp_path: Path, model_type: str) -> None:
    describe(tmp_path, model_type, num_hidden_layers=8)
    calls: list[tuple[str, int, int]] = []
    said = check(str(tmp_path), lambda *call: calls.append(call))
    assert "transformers' model, which passes the guard, runs it; context " in said
    assert said.endswith("no *.safetensors file here")
    assert calls == [("guard", 0, 2), ("guard", 1, 2), ("guard", 2, 2)]


def test_what_magnifies_rounding_where_it_has_many_layers_is_known_too(tmp_path: Path) -> None:
    heads = {"hidden_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}
    config = describe(tmp_path, "gemma3n_text", intermediate_size=64, hidden_size_per_layer_input=16, **heads)
    assert (draw(config).dtype, config.num_hidden_layers, config.num_kv_shared_layers) == (torch.float64, 35, 15)
    assert "transformers' model, which passes the guard, runs it" in check(str(tmp_path), quiet)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"n_inner": 10**7}, None),
        ({"n_layer": 300}, "300 layers is not small"),
        ({"n_embd": 2**20, "n_head": 1}, "numbers"),
    ],
)
def test_what_cannot_be_made_small_is_left_to_the_guard(tmp_path: Path, changes: Any, why: str | None) -> None:
    describe(tmp_path, "gpt2", **changes)
    expected = "which passes the guard, runs it" if why is None else f"if it passes the guard .*{why}.*, runs it"
    assert re.search(expected, check(str(tmp_path), quiet))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"n_layer": 0}, "num_hidden_layers must be above 0, got 0"),
        ({"n_head": -1}, "num_attention_heads must be above 0, got -1"),
        ({"vocab_size": -1}, "vocab_size must be above 0, got -1"),
        ({"n_head": 7}, "makes no model of transformers: .*divisible"),
    ],
)
def test_numbers_that_make_no_model_are_refused_without_weights(
    tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    describe(tmp_path, "gpt2", n_layer=2)
    configure(tmp_path, **changes)
    with pytest.raises(CheckpointError, match=words):
        check(str(tmp_path), quiet)


def test_a_model_that_names_no_longest_context_is_told_what_it_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    describe(tmp_path, "gpt2", n_layer=2)
    monkeypatch.setattr(transformers_loading, "max_positions", lambda config: None)
    assert "runs it; no longest context: give --max-model-len" in check(str(tmp_path), quiet)


def test_a_known_model_that_is_not_cached_is_not_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("METRONOME_CACHE", str(tmp_path))
    with pytest.raises(ConfigError, match=f"{DEFAULT} is not cached: python -m engine models pull {DEFAULT}"):
        check(DEFAULT, quiet)
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("model", ["~nosuchuser/x", "~nosuchuser/x.gguf", "x" * 300])
def test_what_is_no_path_is_refused(model: str) -> None:
    with pytest.raises(ConfigError, match="cannot be looked up"):
        check(model, quiet)
