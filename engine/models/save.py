"""Write a checkpoint anew: in the type an engine runs it in, cut into shards, in a folder that loads again."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file

from engine.models.checkpoint import INDEX_FILE, NEVER_READ, read_config, stored_tensors, weight_files
from engine.models.weights import DTYPES, tensors_of

_WEIGHT_SUFFIXES = frozenset({".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack"})


def save_sharded(source: Path, target: Path, dtype: torch.dtype, max_size_bytes: int) -> list[str]:
    """Write the model of the folder `source` as `dtype` into the new folder `target`; return the shards' names.

    A shard holds at most `max_size_bytes`, of which that much is in memory at once; a larger tensor stands alone.
    `target` appears whole or not at all.

    Raises:
        ValueError: `target` exists, or no folder for it; the caller's fault.
        CheckpointError: A file of `source` cannot be read.
    """
    if target.exists():
        raise ValueError(f"{target} exists: name a folder that does not")
    if not target.parent.is_dir():
        raise ValueError(f"{target.parent} is no folder to make {target.name} in")
    partial = target.with_name(f"{target.name}.partial")
    partial.mkdir()
    try:
        names = _write(source, partial, dtype, max_size_bytes)
        partial.rename(target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return names


def _write(source: Path, target: Path, dtype: torch.dtype, max_size_bytes: int) -> list[str]:
    shards = list(_shards(source, dtype, max_size_bytes))
    names = [f"model-{number:05}-of-{len(shards):05}.safetensors" for number in range(1, len(shards) + 1)]
    weight_map: dict[str, str] = {}
    for name, tensor_names in zip(names, shards, strict=True):
        among = frozenset(tensor_names)
        tensors = {
            tensor_name: tensor.to(dtype)
            for file in weight_files(source)
            for tensor_name, tensor in tensors_of(file, among)
        }
        save_file(tensors, target / name, metadata={"format": "pt"})
        (target / name).chmod(0o644)  # as the files beside it; the library writes for the owner alone
        weight_map |= dict.fromkeys(tensor_names, name)
    index = {"metadata": {}, "weight_map": weight_map}
    (target / INDEX_FILE).write_text(json.dumps(index))
    for path in source.iterdir():
        if path.is_dir() and path.name == "additional_chat_templates":
            shutil.copytree(path, target / path.name)
        elif path.is_file() and path.suffix not in _WEIGHT_SUFFIXES and path.name != INDEX_FILE:
            shutil.copyfile(path, target / path.name)
    config = read_config(source) | {"dtype": next(name for name, kind in DTYPES.items() if kind == dtype)}
    config.pop("torch_dtype", None)
    (target / "config.json").write_text(json.dumps(config, indent=2))
    return names


def _shards(source: Path, dtype: torch.dtype, max_size_bytes: int) -> Iterator[list[str]]:
    """Yield the names of each shard's tensors, in stored order."""
    names: list[str] = []
    size_bytes = 0
    for tensor in stored_tensors(source):
        if NEVER_READ.search(tensor.name):
            continue
        tensor_bytes = dtype.itemsize * torch.Size(tensor.shape).numel()
        if names and size_bytes + tensor_bytes > max_size_bytes:
            yield names
            names, size_bytes = [], 0
        names.append(tensor.name)
        size_bytes += tensor_bytes
    yield names
