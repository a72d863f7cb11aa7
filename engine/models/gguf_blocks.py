"""The int4 blocks of a converted GGUF file, as stored: groups of 32 numbers with a factor and a least value."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from gguf import GGMLQuantizationType

from engine.errors import CheckpointError
from engine.kernels.operations import GROUP
from engine.kernels.weights import Int4
from engine.models.cache import GGUF_FILE
from engine.models.checkpoint import read_config
from engine.models.gguf import GgufFile
from engine.models.gguf_tensors import plan_tensors, row_order

_BLOCK_BYTES = {GGMLQuantizationType.Q4_0: 18, GGMLQuantizationType.Q4_1: 20}


def stored_int4(folder: Path) -> dict[str, Callable[[], Int4]]:
    """Return what reads each weight of `folder` that its GGUF file holds in 4 bits, by the names in the checkpoint.

    Empty where the folder was not converted from such a file. They raise as this does.

    Raises:
        CheckpointError: The file is truncated, corrupt or misshapen.
    """
    if not (folder / GGUF_FILE).is_file():
        return {}
    gguf = GgufFile(folder / GGUF_FILE, lambda: None)
    found: dict[str, Callable[[], Int4]] = {}
    for plan in plan_tensors(gguf, read_config(folder)):
        tensor = gguf.tensors[plan.source]
        block_bytes = _BLOCK_BYTES.get(tensor.tensor_type)
        if block_bytes is None or len(plan.shape) != 2:
            continue
        num_rows, num_inputs = plan.shape
        shape = num_rows, num_inputs // GROUP, block_bytes
        offset = int(tensor.data_offset) + (plan.expert or 0) * math.prod(shape)
        found[plan.name] = partial(_read, gguf.path, offset, shape, row_order(plan))
    return found


def _read(path: Path, offset: int, shape: tuple[int, int, int], order: npt.NDArray[np.intp] | None) -> Int4:
    """Read the blocks `[outputs, groups, bytes]` of a weight, nothing else of the file, and order its outputs."""
    try:
        found = np.fromfile(path, np.uint8, math.prod(shape), offset=offset)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error
    if len(found) < math.prod(shape):
        raise CheckpointError(f"{path} is truncated: it ends before byte {offset + math.prod(shape)}")
    blocks = found.reshape(shape)
    if order is not None:
        blocks = blocks[order]
    scales = torch.from_numpy(blocks[..., :-16].copy().view(np.float16))
    least = scales[..., 1] if shape[-1] == 20 else scales[..., 0] * -8
    return Int4(torch.from_numpy(blocks[..., -16:]), scales[..., 0], least)
