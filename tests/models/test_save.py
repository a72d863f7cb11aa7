"""A model written anew, in shards, loads again and answers the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import engine
from engine.config import EngineConfig
from engine.errors import CheckpointError
from engine.model_runner.model_runner import ModelRunner
from engine.models.checkpoint import INDEX_FILE, stored_tensors
from engine.models.save import save_sharded
from engine.sampling_params import SamplingParams
from engine.verbs import SaveShardedState

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


def answers(folder: Path, **settings: Any) -> list[list[int]]:
    llm = engine.LLM(str(folder), num_threads=1, num_gpu_blocks_override=20, **settings)
    outputs = llm.generate(["hello", "world again"], GREEDY, use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]


@pytest.mark.slow
def test_a_model_saved_in_shards_can_be_served_again_and_gives_the_same_tokens(
    byte_llama: Path, tmp_path: Path
) -> None:
    llm = engine.LLM(str(byte_llama), num_threads=1, num_gpu_blocks_override=20)
    names = llm.client.call(SaveShardedState(str(tmp_path / "saved"), 20_000))
    assert len(names) > 3
    assert names[0] == f"model-00001-of-{len(names):05}.safetensors"
    assert {path.name for path in (tmp_path / "saved").iterdir()} >= {"config.json", "tokenizer.json", INDEX_FILE}
    assert all((tmp_path / "saved" / name).stat().st_size < 40_000 for name in names)
    assert answers(tmp_path / "saved") == answers(byte_llama)


def test_it_is_written_in_the_type_it_runs_in(byte_llama: Path, tmp_path: Path) -> None:
    (name,) = save_sharded(byte_llama, tmp_path / "saved", torch.bfloat16, 2**30)
    assert {tensor.dtype for tensor in stored_tensors(tmp_path / "saved")} == {"bfloat16"}
    assert json.loads((tmp_path / "saved" / "config.json").read_text())["dtype"] == "bfloat16"
    assert {tensor.file for tensor in stored_tensors(tmp_path / "saved")} == {name}


def test_a_folder_that_exists_or_cannot_be_made_is_refused_and_nothing_is_written(
    byte_llama: Path, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match="exists: name a folder that does not"):
        save_sharded(byte_llama, tmp_path, torch.float32, 2**30)
    with pytest.raises(ValueError, match="is no folder to make saved in"):
        save_sharded(byte_llama, tmp_path / "missing" / "saved", torch.float32, 2**30)
    assert not list(tmp_path.iterdir())


def test_what_fails_half_way_leaves_nothing(byte_llama: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    whole = (byte_llama / "model.safetensors").read_bytes()
    (broken / "model.safetensors").write_bytes(whole[:-100])
    (broken / "config.json").write_bytes((byte_llama / "config.json").read_bytes())
    with pytest.raises(CheckpointError, match="truncated"):
        save_sharded(broken, tmp_path / "saved", torch.float32, 2**30)
    assert [path.name for path in tmp_path.iterdir()] == ["broken"]


def test_memory_is_told_by_what_holds_it(byte_llama: Path) -> None:
    runner = ModelRunner(EngineConfig(model=str(byte_llama), num_threads=1, num_gpu_blocks_override=20), byte_llama)
    capacity = runner.start(lambda phase, done, total: None)
    memory = runner.memory()
    num_numbers = 2 * 2 * capacity.num_kv_blocks * capacity.block_size * 2 * 8  # K and V, layers, slots, heads, size
    assert memory["kv_cache"] == 4 * num_numbers
    assert memory["weights"] == sum(tensor.size_bytes for tensor in stored_tensors(byte_llama))
    assert memory["process"] > memory["weights"]
