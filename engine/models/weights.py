"""Stream safetensors into a model, tensor by tensor, and say exactly what does not fit.

The model names its tensors (`destinations`); every one must come, with its shape, and no other may. Nothing is held
twice but the tensor being copied.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from engine.errors import CheckpointError, UnsupportedModel

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_STORED_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
_NEVER_READ = re.compile(r"(^|\.)rotary_emb\.inv_freq$")
_MAX_NAMED = 5
_MAX_HEADER_SIZE_BYTES = 100 * 2**20


def read_config(folder: Path) -> dict[str, Any]:
    """Return the content of a model folder's config.json.

    Raises:
        CheckpointError: The file is missing or not a JSON object.
    """
    return _read_json(folder / "config.json")


def resolve_dtype(asked: str, config: dict[str, Any], folder: Path) -> torch.dtype:
    """Return the type of weights and K/V: the one asked for, or for "auto" the checkpoint's.

    Raises:
        UnsupportedModel: The checkpoint's own type is not one of `DTYPES`; the message says what to ask for.
        CheckpointError: There is no readable weight file.
    """
    if asked != "auto":
        return DTYPES[asked]
    name = config.get("dtype") or config.get("torch_dtype") or _first_stored_dtype(folder)
    if name not in DTYPES:
        raise UnsupportedModel(f"{folder} has weights of type {name!r}: ask for --dtype {', '.join(DTYPES)}")
    return DTYPES[name]


def load_weights(folder: Path, destinations: dict[str, torch.Tensor], progress: Callable[[int, int], None]) -> None:
    """Copy every tensor of the folder's safetensors into its destination, converting its type.

    Args:
        folder: In Hugging Face layout, weights in one file or in shards with an index.
        destinations: Name → tensor to fill. A checkpoint's `lm_head.weight` is skipped where the model has none,
            for it then uses the embedding.
        progress: Called with (tensors done, tensors in all) in this thread.

    Raises:
        CheckpointError: A file is missing, truncated or corrupt, or a tensor is missing, unknown or misshapen.
    """
    remaining = dict(destinations)
    unknown: list[str] = []
    misshapen: list[str] = []
    repeated: list[str] = []
    progress(0, len(destinations))
    for file in weight_files(folder):
        for name, tensor in _tensors_of(file):
            destination = remaining.pop(name, None)
            if destination is None:
                if name in destinations:
                    repeated.append(f"{name} in {file.name}")
                elif not _is_skipped(name, destinations):
                    unknown.append(f"{name} {list(tensor.shape)}")
            elif destination.shape != tensor.shape:
                misshapen.append(f"{name} is {list(tensor.shape)}, must be {list(destination.shape)}")
            else:
                destination.copy_(tensor)
                progress(len(destinations) - len(remaining), len(destinations))
    missing = [f"{name} {list(tensor.shape)}" for name, tensor in remaining.items()]
    _refuse(folder, missing=missing, unknown=unknown, misshapen=misshapen, repeated=repeated)


def weight_files(folder: Path) -> list[Path]:
    """Return the folder's weight files in order of name.

    Raises:
        CheckpointError: There are none, or some that the index names are missing or lie elsewhere.
    """
    if (folder / SINGLE_FILE).is_file():
        return [folder / SINGLE_FILE]
    if not (folder / INDEX_FILE).is_file():
        raise CheckpointError(f"{folder} has neither {SINGLE_FILE} nor {INDEX_FILE}: only safetensors are read")
    weight_map = _read_json(folder / INDEX_FILE).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{folder / INDEX_FILE} has no weight_map")
    names = sorted({str(name) for name in weight_map.values()})
    elsewhere = [name for name in names if Path(name).name != name]
    if elsewhere:
        raise CheckpointError(f"{folder / INDEX_FILE} names files outside its folder: {_some(elsewhere)}")
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise CheckpointError(
            f"{folder}: {len(missing)} of {len(names)} files that {INDEX_FILE} names are missing: {_some(missing)}"
        )
    return [folder / name for name in names]


def model_digest(folder: Path) -> str:
    """Return 32 hex digits that change with configuration, file sizes, tensor names, shapes and places.

    Cheap: of a weight file only its header is read.

    Raises:
        CheckpointError: A file is missing or its header unreadable.
    """
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    for file in weight_files(folder):
        digest.update(f"{file.name} {file.stat().st_size}".encode())
        digest.update(_header(file))
    return digest.hexdigest()[:32]


def _is_skipped(name: str, destinations: dict[str, torch.Tensor]) -> bool:
    return _NEVER_READ.search(name) is not None or (name == "lm_head.weight" and name not in destinations)


def _tensors_of(file: Path) -> Iterable[tuple[str, torch.Tensor]]:
    try:
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118  (it is no mapping)
                stored = opened.get_slice(name).get_dtype()
                if stored not in _STORED_DTYPES and not _NEVER_READ.search(name):
                    raise UnsupportedModel(f"{file}: tensor {name} is stored as {stored}; {_readable()} can be read")
                yield name, opened.get_tensor(name)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{file} is truncated or corrupt: {error}") from error


def _readable() -> str:
    return ", ".join(_STORED_DTYPES)


def _refuse(folder: Path, **faults: list[str]) -> None:
    """Raise CheckpointError naming the first few tensors of each kind of fault, if there is any."""
    sentences = []
    for kind, tensors in faults.items():
        if tensors:
            sentences.append(f"{len(tensors)} {kind}: {_some(tensors)}")
    if sentences:
        raise CheckpointError(f"tensors of {folder} do not fit its config.json; " + "; ".join(sentences))


def _some(names: list[str]) -> str:
    more = f" and {len(names) - _MAX_NAMED} more" if len(names) > _MAX_NAMED else ""
    return ", ".join(names[:_MAX_NAMED]) + more


def _first_stored_dtype(folder: Path) -> str:
    header = _read_json_bytes(_header(weight_files(folder)[0]), folder / SINGLE_FILE)
    stored = next((entry["dtype"] for name, entry in header.items() if name != "__metadata__"), "none")
    return _STORED_DTYPES.get(stored, stored)


def _header(file: Path) -> bytes:
    with file.open("rb") as opened:
        size = int.from_bytes(opened.read(8), "little")
        header = opened.read(size) if size <= _MAX_HEADER_SIZE_BYTES else b""
    if len(header) != size or not size:
        raise CheckpointError(f"{file} is truncated or corrupt: its header of {size} bytes cannot be read")
    return header


def _read_json(file: Path) -> dict[str, Any]:
    try:
        return _read_json_bytes(file.read_bytes(), file)
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error.strerror}") from error


def _read_json_bytes(content: bytes, file: Path) -> dict[str, Any]:
    try:
        value = json.loads(content)
    except ValueError as error:
        raise CheckpointError(f"{file} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{file} must hold a JSON object")
    return value
