"""What is loaded through transformers is whole and the model that config.json means; all else is refused by name."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from engine.config import EngineConfig
from engine.errors import CheckpointError, ConfigError, UnsupportedModel
from engine.models.checkpoint import read_config
from engine.models.decoder import Decoder
from engine.models.registry import BuiltModel, build_model, choose
from engine.models.transformers_backend import TransformersModel


def quiet(*_progress: Any) -> None:
    """Tell nobody."""


@pytest.fixture(scope="module")
def gpt2_folder(draw_model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("gpt2")
    draw_model("gpt2").save_pretrained(folder)
    return folder


def build(folder: Path, **settings: Any) -> BuiltModel:
    return build_model(folder, EngineConfig(**settings), quiet)


def copy_of(folder: Path, target: Path, change: Callable[[dict[str, Any], dict[str, torch.Tensor]], None]) -> Path:
    """Return a copy of the checkpoint, with config.json and tensors changed."""
    raw, tensors = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
    change(raw, tensors)
    (target / "config.json").write_text(json.dumps(raw))
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    return target


def test_auto_takes_our_own_decoder_where_it_can_and_transformers_where_not(
    draw_model: Any, tmp_path: Path, gpt2_folder: Path
) -> None:
    draw_model("llama").save_pretrained(tmp_path)
    assert isinstance(build(tmp_path).model, Decoder)
    assert isinstance(build(tmp_path, model_impl="transformers").model, TransformersModel)
    assert isinstance(build(gpt2_folder).model, TransformersModel)


def test_own_refuses_what_is_no_row(gpt2_folder: Path) -> None:
    with pytest.raises(UnsupportedModel, match="names GPT2LMHeadModel; our own decoder runs Gemma2"):
        build(gpt2_folder, model_impl="own")


def test_what_neither_runs_is_refused_with_both_reasons(draw_model: Any, tmp_path: Path) -> None:
    draw_model("bloom").save_pretrained(tmp_path)
    words = "^BloomForCausalLM does not .* check 'call a layer' failed: .* Our own decoder .* names BloomForCausalLM"
    with pytest.raises(UnsupportedModel, match=words):
        build(tmp_path, max_model_len=64)


@pytest.fixture(scope="module")
def llama_folder(draw_model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("llama")
    draw_model("llama").save_pretrained(folder)
    return folder


def test_a_number_that_only_our_own_decoder_refuses_is_for_transformers_to_read(
    llama_folder: Path, tmp_path: Path
) -> None:
    scaling = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": None, "original_max_position_embeddings": 32}
    folder = copy_of(llama_folder, tmp_path, lambda raw, tensors: raw.update(rope_parameters=scaling))
    with pytest.raises(CheckpointError, match="factor must be a finite number above 0, got None"):
        build(folder, model_impl="own")
    assert isinstance(build(folder).model, TransformersModel)
    assert choose(read_config(folder), None, quiet).implementation == "transformers' model, which passes the guard,"


def test_a_number_that_both_refuse_is_refused_with_both_reasons(llama_folder: Path, tmp_path: Path) -> None:
    folder = copy_of(llama_folder, tmp_path, lambda raw, tensors: raw.update(vocab_size="many"))
    words = "config.json is not accepted by transformers: .* Our own decoder .* vocab_size must be a whole number"
    for refuse in (build, lambda folder: choose(read_config(folder), None, quiet)):
        with pytest.raises(CheckpointError, match=f"(?s)^{words}"):
            refuse(folder)


@pytest.mark.parametrize(
    ("error", "words"),
    [(AssertionError(), r"AssertionError\(\)"), (KeyError(None), r"KeyError\(None\)"), (OSError("no"), "no")],
)
def test_an_error_of_transformers_without_a_text_is_named_by_its_type(
    gpt2_folder: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, words: str
) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise error

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", fail)
    with pytest.raises(CheckpointError, match=f"cannot be loaded by transformers: {words}"):
        build(gpt2_folder)
    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", fail)
    with pytest.raises(CheckpointError, match=f"is not accepted by transformers: {words}"):
        build(gpt2_folder)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"architectures": ["NovelForCausalLM"]}, "has no causal language model NovelForCausalLM$"),
        (
            {"architectures": ["NovelForCausalLM"], "auto_map": {"AutoModelForCausalLM": "novel.Novel"}},
            "code from a model folder is never run",
        ),
        ({"architectures": []}, "names no architecture"),
        ({"architectures": ["OPTForCausalLM"]}, "its model_type is one of GPT2LMHeadModel"),
        ({"quantization_config": {"quant_method": "gptq"}}, "gptq"),
    ],
)
def test_what_transformers_does_not_have_is_refused_by_name(
    gpt2_folder: Path, tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    folder = copy_of(gpt2_folder, tmp_path, lambda raw, tensors: raw.update(changes))
    with pytest.raises(UnsupportedModel, match=words):
        build(folder, model_impl="transformers")


@pytest.mark.parametrize(("model_type", "spelled"), [("phimoe", "PhiMoEForCausalLM"), ("gpt2", "GPT2LMHEADModel")])
def test_an_architecture_may_be_spelled_otherwise(
    draw_model: Any, tmp_path: Path, model_type: str, spelled: str
) -> None:
    model = draw_model(model_type)
    model.save_pretrained(tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text()) | {"architectures": [spelled]}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    assert isinstance(build(tmp_path).model, TransformersModel)
    assert choose(raw, None, quiet).architecture == type(model).__name__ != spelled


@pytest.mark.parametrize("size", [0, -5])
@pytest.mark.parametrize("folder", ["gpt2_folder", "llama_folder"])
def test_a_longest_context_of_nothing_is_refused_with_the_value(
    request: pytest.FixtureRequest, tmp_path: Path, folder: str, size: int
) -> None:
    key = "n_positions" if folder == "gpt2_folder" else "max_position_embeddings"
    changed = copy_of(request.getfixturevalue(folder), tmp_path, lambda raw, tensors: raw.update({key: size}))
    for refuse in (build, lambda folder: choose(read_config(folder), folder, quiet)):
        with pytest.raises(CheckpointError, match=f"max_position_embeddings must be above 0, got {size}"):
            refuse(changed)


def test_code_in_a_folder_is_never_run(gpt2_folder: Path, tmp_path: Path) -> None:
    def add_code(raw: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        raw["auto_map"] = {"AutoConfig": "novel.Config", "AutoModelForCausalLM": "novel.Novel"}
        (tmp_path / "novel.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nraise SystemExit\n")

    folder = copy_of(gpt2_folder, tmp_path, add_code)
    assert isinstance(build(folder).model, TransformersModel)
    assert not (tmp_path / "ran").exists()


def test_numbers_that_transformers_does_not_accept_are_the_checkpoint_s_fault(
    gpt2_folder: Path, tmp_path: Path
) -> None:
    folder = copy_of(gpt2_folder, tmp_path, lambda raw, tensors: raw.update(n_head="six"))
    with pytest.raises(CheckpointError, match=r"config\.json is not accepted by transformers"):
        build(folder)


def lose(raw: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    del tensors["transformer.h.1.mlp.c_fc.weight"]


def bend(raw: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    tensors["transformer.ln_f.weight"] = torch.ones(47)


def invent(raw: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    tensors["transformer.h.1.adapter.weight"] = torch.ones(3)


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (lose, r"1 missing: transformer\.h\.1\.mlp\.c_fc\.weight"),
        (bend, r"transformer\.ln_f\.weight is \[47\], must be \[48\]"),
        (invent, r"1 unknown: transformer\.h\.1\.adapter\.weight"),
    ],
)
def test_a_tensor_that_does_not_fit_is_named_by_the_load_and_by_what_foretells_it(
    gpt2_folder: Path, tmp_path: Path, fault: Any, words: str
) -> None:
    folder = copy_of(gpt2_folder, tmp_path, fault)
    with pytest.raises(CheckpointError, match=words):
        build(folder)
    with pytest.raises(CheckpointError, match=words):
        choose(read_config(folder), folder, quiet)


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.float8_e4m3fn, torch.int32, torch.float64])
def test_weights_of_a_type_that_is_not_read_are_refused_by_name(
    gpt2_folder: Path, tmp_path: Path, dtype: torch.dtype
) -> None:
    name = "transformer.h.1.mlp.c_fc.weight"
    folder = copy_of(gpt2_folder, tmp_path, lambda raw, tensors: tensors.update({name: tensors[name].to(dtype)}))
    with pytest.raises(UnsupportedModel, match=rf"tensor {re.escape(name)} is stored as .*; F32, BF16, F16 can be"):
        build(folder)
    with pytest.raises(UnsupportedModel, match="is stored as"):
        choose(read_config(folder), folder, quiet)


def test_tables_that_old_checkpoints_have_beside_the_weights_may_be_of_any_type(
    gpt2_folder: Path, tmp_path: Path
) -> None:
    mask = {"transformer.h.0.attn.bias": torch.ones(1, 1, 8, 8, dtype=torch.uint8)}
    folder = copy_of(gpt2_folder, tmp_path, lambda raw, tensors: tensors.update(mask))
    assert isinstance(build(folder).model, TransformersModel)
    assert "passes the guard" in choose(read_config(folder), folder, quiet).implementation


def test_a_truncated_weight_file_is_a_checkpoint_error(gpt2_folder: Path, tmp_path: Path) -> None:
    folder = copy_of(gpt2_folder, tmp_path, lambda raw, tensors: None)
    content = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(content[: len(content) // 2])
    with pytest.raises(CheckpointError, match="is truncated or corrupt"):
        build(folder)


def test_a_model_without_a_longest_context_must_be_given_one(draw_model: Any, tmp_path: Path) -> None:
    draw_model("bloom").save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="names no longest context: give --max-model-len"):
        build(tmp_path)


def test_weights_are_loaded_in_the_calling_thread(gpt2_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[threading.Thread] = []
    monkeypatch.setattr(threading.Thread, "start", threads.append)
    assert isinstance(build(gpt2_folder).model, TransformersModel)
    assert not threads


def test_what_would_run_a_model_is_said_without_its_weights() -> None:
    gpt2 = {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2"}
    assert choose(gpt2, None, quiet) == ("GPT2LMHeadModel", "transformers' model, which passes the guard,", 1024)
    words = "^transformers .* has no causal language model NovelForCausalLM. Our own decoder"
    with pytest.raises(UnsupportedModel, match=words):
        choose({"architectures": ["NovelForCausalLM"]}, None, quiet)
    with pytest.raises(UnsupportedModel, match=r"^quantized checkpoints are not supported"):
        choose(gpt2 | {"quantization_config": {"quant_method": "gptq"}}, None, quiet)
