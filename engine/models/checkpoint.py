"""The files of a model folder in Hugging Face layout, read without torch: config.json, weight files, their headers."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from engine.errors import CheckpointError

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
STORED_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
"""The forms of numbers that are read: as safetensors call them, as config.json does."""
_MAX_NAMED = 5
_MAX_HEADER_SIZE_BYTES = 100 * 2**20


class StoredTensor(NamedTuple):
    """One tensor of a weight file; `dtype` as safetensors call it, or as config.json does where that is known."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    size_bytes: int


def read_config(folder: Path) -> dict[str, Any]:
    """Return the content of a model folder's config.json.

    Raises:
        CheckpointError: The file is missing or not a JSON object.
    """
    return _read_json(folder / "config.json")


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
        raise CheckpointError(f"{folder / INDEX_FILE} names files outside its folder: {first_few(elsewhere)}")
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise CheckpointError(
            f"{folder}: {len(missing)} of {len(names)} files that {INDEX_FILE} names are missing: {first_few(missing)}"
        )
    return [folder / name for name in names]


def stored_tensors(folder: Path) -> Iterator[StoredTensor]:
    """Yield what the headers of the folder's weight files say; no weight is read.

    Raises:
        CheckpointError: A file is missing or its header unreadable.
    """
    for file in weight_files(folder):
        for name, entry in _read_json_bytes(_header(file), file).items():
            if name != "__metadata__":
                try:
                    (first, last), shape = entry["data_offsets"], tuple(entry["shape"])
                    yield StoredTensor(name, STORED_DTYPES.get(entry["dtype"], entry["dtype"]), shape, last - first)
                except (KeyError, TypeError, ValueError) as error:
                    raise CheckpointError(f"{file}: the header's entry of {name} is {entry}") from error


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


def first_few(names: list[str]) -> str:
    """Join names for a message, the first few and how many more."""
    more = f" and {len(names) - _MAX_NAMED} more" if len(names) > _MAX_NAMED else ""
    return ", ".join(names[:_MAX_NAMED]) + more


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
