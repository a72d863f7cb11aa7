"""Stream safetensors into a model, tensor by tensor, and say exactly what does not fit.

The model names its tensors (`destinations`); every one must come, with its shape, and no other may. Nothing is held
twice but the tensor being copied.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from engine.errors import CheckpointError, UnsupportedModel
from engine.models.checkpoint import (
    EMBEDDING,
    HEAD,
    NEVER_READ,
    STORED_DTYPES,
    StoredTensor,
    first_few,
    stored_tensors,
    weight_files,
)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


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
        raise UnsupportedModel(f"{folder} has weights of type {name!r}: give --dtype {' or '.join(DTYPES)}")
    return DTYPES[name]


def load_weights(folder: Path, destinations: dict[str, torch.Tensor], progress: Callable[[int, int], None]) -> None:
    """Copy every tensor of the folder's safetensors into its destination, converting its type.

    Args:
        folder: In Hugging Face layout, weights in one file or in shards with an index.
        destinations: Name → tensor to fill. A checkpoint's head is skipped where the model has none, for it then uses
            the embedding; see `stores_other_head`.
        progress: Called with (tensors done, tensors in all) in this thread.

    Raises:
        CheckpointError: A file is missing, truncated or corrupt, or a tensor is missing, unknown or misshapen.
        UnsupportedModel: A tensor is stored in a form that is not read.
    """
    check_headers(folder, destinations)
    WeightReader(folder, len(destinations), progress).fill(destinations)


class WeightReader:
    """Fills tensors from a folder's weight files, whose headers were checked, in as many calls as one likes."""

    def __init__(self, folder: Path, num_tensors: int, progress: Callable[[int, int], None]) -> None:
        """Tell `progress` of each of `num_tensors` tensors that are filled."""
        self._file_of = {tensor.name: folder / tensor.file for tensor in stored_tensors(folder)}
        self._num_tensors, self._progress = num_tensors, progress
        self._num_filled = 0
        progress(0, num_tensors)

    def fill(self, destinations: Mapping[str, torch.Tensor]) -> None:
        """Copy a tensor to each destination, converting its type.

        Raises:
            CheckpointError: A file is truncated or corrupt.
        """
        for file in sorted({self._file_of[name] for name in destinations}):
            for name, tensor in tensors_of(file, destinations):
                destinations[name].copy_(tensor)
                self._num_filled += 1
                self._progress(self._num_filled, self._num_tensors)


def check_headers(folder: Path, destinations: Mapping[str, torch.Tensor]) -> None:
    """Hold what the weight files' headers say against the shapes of `destinations`; nothing is read or allocated.

    Raises:
        CheckpointError: A file is missing, truncated or corrupt, or a tensor is missing, unknown or misshapen.
        UnsupportedModel: A tensor is stored in a form that is not read.
    """
    remaining = dict(destinations)
    unknown, misshapen, repeated = [], [], []
    for tensor in stored_tensors(folder):
        name, shape = tensor.name, list(tensor.shape)
        if NEVER_READ.search(name):
            continue
        refuse_stored_type(folder, tensor)
        destination = remaining.pop(name, None)
        if destination is None:
            if name in destinations:
                repeated.append(f"{name} in {tensor.file}")
            elif name != HEAD:
                unknown.append(f"{name} {shape}")
        elif list(destination.shape) != shape:
            misshapen.append(f"{name} is {shape}, must be {list(destination.shape)}")
    missing = [f"{name} {list(destination.shape)}" for name, destination in remaining.items()]
    name_faults(folder, missing=missing, unknown=unknown, misshapen=misshapen, repeated=repeated)


def refuse_stored_type(folder: Path, tensor: StoredTensor) -> None:
    """Raise UnsupportedModel if `tensor` is stored as numbers that are not read: quantized ones, whole ones."""
    if tensor.dtype not in DTYPES:
        raise UnsupportedModel(
            f"{folder / tensor.file}: tensor {tensor.name} is stored as {tensor.dtype}; {_readable()} can be read"
        )


def stores_other_head(folder: Path, dtype: torch.dtype) -> bool:
    """Whether the folder has a head and an embedding that differ, both as `dtype`: then no config.json can tie them.

    Raises:
        CheckpointError: A file is missing, truncated or corrupt.
        UnsupportedModel: One of the two is stored in a type that is not read.
    """
    if HEAD not in {tensor.name for tensor in stored_tensors(folder)}:
        return False
    found = {
        name: tensor.to(dtype) for file in weight_files(folder) for name, tensor in tensors_of(file, {HEAD, EMBEDDING})
    }
    return EMBEDDING in found and not torch.equal(found[HEAD], found[EMBEDDING])


def tensors_of(file: Path, among: Container[str]) -> Iterable[tuple[str, torch.Tensor]]:
    """Yield the tensors of a file whose names are `among` the given."""
    try:
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118  (it is no mapping)
                if name not in among:
                    continue
                stored = opened.get_slice(name).get_dtype()
                if stored not in STORED_DTYPES and not NEVER_READ.search(name):
                    raise UnsupportedModel(f"{file}: tensor {name} is stored as {stored}; {_readable()} can be read")
                yield name, opened.get_tensor(name)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{file} is truncated or corrupt: {error}") from error


def _readable() -> str:
    return ", ".join(STORED_DTYPES)


def name_faults(folder: Path, **faults: list[str]) -> None:
    """Raise CheckpointError naming the first few tensors of each kind of fault, if there is any."""
    sentences = []
    for kind, tensors in faults.items():
        if tensors:
            sentences.append(f"{len(tensors)} {kind}: {first_few(tensors)}")
    if sentences:
        raise CheckpointError(f"tensors of {folder} do not fit its config.json; " + "; ".join(sentences))


def _first_stored_dtype(folder: Path) -> str:
    return next((tensor.dtype for tensor in stored_tensors(folder)), "none")
