from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from engine.errors import CheckpointError, UnsupportedModel
from engine.models.checkpoint import EMBEDDING, HEAD, model_digest
from engine.models.weights import load_weights, resolve_dtype, stores_other_head

NAMES = [f"layer.{i}.weight" for i in range(8)]


def make_tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(3, 4, generator=generator) for name in NAMES}


def write(folder: Path, tensors: dict[str, torch.Tensor]) -> Path:
    (folder / "config.json").write_text("{}")
    save_file(tensors, folder / "model.safetensors")
    return folder


def write_shards(folder: Path, tensors: dict[str, torch.Tensor]) -> Path:
    (folder / "config.json").write_text("{}")
    shards = {"a.safetensors": NAMES[:5], "b.safetensors": NAMES[5:]}
    for file, names in shards.items():
        save_file({name: tensors[name] for name in names}, folder / file)
    weight_map = {name: file for file, names in shards.items() for name in names}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


def load(folder: Path, dtype: torch.dtype = torch.float32) -> tuple[dict[str, torch.Tensor], list[tuple[int, int]]]:
    destinations = {name: torch.full((3, 4), torch.nan, dtype=dtype) for name in NAMES}
    calls: list[tuple[int, int]] = []
    load_weights(folder, destinations, lambda done, total: calls.append((done, total)))
    return destinations, calls


@pytest.mark.parametrize("form", [write, write_shards])
def test_every_tensor_is_copied_and_counted(tmp_path: Path, form: object) -> None:
    tensors = make_tensors()
    loaded, calls = load(form(tmp_path, tensors))  # type: ignore[operator]
    assert all(torch.equal(loaded[name], tensors[name]) for name in NAMES)
    assert calls == [(i, 8) for i in range(9)]


def test_tensors_are_converted_to_the_model_s_type(tmp_path: Path) -> None:
    tensors = make_tensors()
    loaded, _ = load(write(tmp_path, tensors), torch.bfloat16)
    assert all(torch.equal(loaded[name], tensors[name].bfloat16()) for name in NAMES)


def test_rotary_buffers_and_the_head_of_a_model_that_has_none_are_skipped(tmp_path: Path) -> None:
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(2), "lm_head.weight": torch.ones(2, 2)}
    load(write(tmp_path, make_tensors() | extra))


def test_missing_unknown_and_misshapen_tensors_are_all_named_with_shapes(tmp_path: Path) -> None:
    tensors = make_tensors()
    del tensors[NAMES[2]]
    tensors[NAMES[4]] = torch.ones(4, 3)
    tensors["bias"] = torch.ones(7)
    with pytest.raises(CheckpointError) as refusal:
        load(write(tmp_path, tensors))
    for words in (str(tmp_path), f"1 missing: {NAMES[2]} [3, 4]", "1 unknown: bias [7]", "is [4, 3], must be [3, 4]"):
        assert words in str(refusal.value)


def test_of_many_missing_tensors_the_first_few_are_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"7 missing: .* and 2 more"):
        load(write(tmp_path, {NAMES[0]: torch.ones(3, 4)}))


@pytest.mark.parametrize("size", [0, 5, 100, -10])
def test_a_truncated_file_is_named(tmp_path: Path, size: int) -> None:
    file = write(tmp_path, make_tensors()) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:size])
    with pytest.raises(CheckpointError, match=f"{file} is truncated or corrupt"):
        load(tmp_path)


@pytest.mark.parametrize("size", [0, 5, 100])
def test_a_file_without_a_whole_header_has_no_digest(tmp_path: Path, size: int) -> None:
    file = write(tmp_path, make_tensors()) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:size])
    with pytest.raises(CheckpointError, match=f"{file} is truncated or corrupt"):
        model_digest(tmp_path)


def test_a_folder_without_safetensors_is_refused(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(CheckpointError, match="only safetensors are read"):
        load(tmp_path)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    (write_shards(tmp_path, make_tensors()) / "b.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"1 of 2 files that .*index\.json names are missing: b\.safetensors"):
        load(tmp_path)


def test_an_index_that_points_out_of_its_folder_is_refused(tmp_path: Path) -> None:
    write_shards(tmp_path, make_tensors())
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../b.safetensors"}}')
    with pytest.raises(CheckpointError, match=r"names files outside its folder: \.\./b\.safetensors"):
        load(tmp_path)


def test_a_tensor_in_two_shards_is_named(tmp_path: Path) -> None:
    write_shards(tmp_path, make_tensors())
    save_file(make_tensors(), tmp_path / "b.safetensors")
    with pytest.raises(CheckpointError, match=rf"repeated: {NAMES[0]} in b\.safetensors"):
        load(tmp_path)


def test_a_stored_type_that_is_not_read_is_named(tmp_path: Path) -> None:
    tensors = make_tensors()
    tensors[NAMES[1]] = torch.ones(3, 4, dtype=torch.int8)
    with pytest.raises(UnsupportedModel, match=rf"{NAMES[1]} is stored as I8"):
        load(write(tmp_path, tensors))


def test_the_type_is_the_one_asked_for_or_the_checkpoint_s(tmp_path: Path) -> None:
    write(tmp_path, {name: tensor.half() for name, tensor in make_tensors().items()})
    assert resolve_dtype("float32", {"dtype": "bfloat16"}, tmp_path) == torch.float32
    assert resolve_dtype("auto", {"dtype": "bfloat16"}, tmp_path) == torch.bfloat16
    assert resolve_dtype("auto", {"torch_dtype": "float32"}, tmp_path) == torch.float32
    assert resolve_dtype("auto", {}, tmp_path) == torch.float16
    with pytest.raises(UnsupportedModel, match="float8"):
        resolve_dtype("auto", {"dtype": "float8_e4m3fn"}, tmp_path)


def test_the_digest_changes_with_configuration_and_layout_alone(tmp_path: Path) -> None:
    write(tmp_path, make_tensors())
    digest = model_digest(tmp_path)
    assert len(digest) == 32
    assert model_digest(tmp_path) == digest
    (tmp_path / "config.json").write_text("{} ")
    assert model_digest(tmp_path) != digest
    write(tmp_path, {name: tensor.half() for name, tensor in make_tensors().items()})
    assert model_digest(tmp_path) != digest


@pytest.mark.parametrize("shards", [1, 2])
def test_a_head_is_another_if_it_differs_from_the_embedding_in_the_type_of_the_model(
    tmp_path: Path, shards: int
) -> None:
    embedding = torch.ones(5, 4)

    def differs(head: torch.Tensor | None, dtype: torch.dtype = torch.float32) -> bool:
        tensors = {EMBEDDING: embedding} | ({} if head is None else {HEAD: head})
        files = {name: f"{i % shards}.safetensors" for i, name in enumerate(tensors)}
        for file in set(files.values()):
            save_file({name: tensor for name, tensor in tensors.items() if files[name] == file}, tmp_path / file)
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
        return stores_other_head(tmp_path, dtype)

    assert not differs(None)
    assert not differs(embedding.clone())
    assert differs(embedding * (1 + 2**-12))
    assert not differs(embedding * (1 + 2**-12), torch.bfloat16)
    assert differs(torch.ones(5, 3))
