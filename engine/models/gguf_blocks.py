"""The int4 blocks of a converted GGUF file, as stored: groups of 32 numbers with a factor and a least value."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from gguf import GGMLQuantizationType

from engine.kernels.weights import Int4
from engine.models.cache import GGUF_FILE
from engine.models.checkpoint import read_config
from engine.models.gguf import GgufFile
from engine.models.gguf_tensors import plan_tensors, row_order

_BLOCK_BYTES = {GGMLQuantizationType.Q4_0: 18, GGMLQuantizationType.Q4_1: 20}


def stored_int4(folder: Path) -> dict[str, Int4]:
    """Return those weights of `folder` that its GGUF file holds in 4 bits, by their names in the checkpoint.

    Empty where the folder was not converted from such a file.

    Raises:
        CheckpointError: The file is truncated, corrupt or misshapen.
    """
    if not (folder / GGUF_FILE).is_file():
        return {}
    gguf = GgufFile(folder / GGUF_FILE, lambda: None)
    found = {}
    for plan in plan_tensors(gguf, read_config(folder)):
        tensor = gguf.tensors[plan.source]
        block_bytes = _BLOCK_BYTES.get(tensor.tensor_type)
        if block_bytes is None or len(plan.shape) != 2:
            continue
        data = tensor.data if plan.expert is None else tensor.data[plan.expert]
        order = row_order(plan)
        blocks = np.ascontiguousarray(data if order is None else data[order]).reshape(len(data), -1, block_bytes)
        scales = torch.from_numpy(np.ascontiguousarray(blocks[..., :-16]).view(np.float16))
        least = scales[..., 1] if block_bytes == 20 else scales[..., 0] * -8
        found[plan.name] = Int4(torch.from_numpy(blocks[..., -16:].copy()), scales[..., 0].clone(), least.clone())
    return found
