"""GGUF to the Hugging Face layout: weights as safetensors, configuration, tokenizer, chat template.

Numbers are dequantized by the `gguf` package, a few rows at a time: memory stays at some tens of MiB whatever the
model's size. Those of float32 and float16 files keep their type; all others are rounded to the nearest bfloat16, ties
to even. Only numpy is used.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from engine.errors import CheckpointError
from engine.models.checkpoint import ITEM_SIZES_BYTES, STORED_DTYPES
from engine.models.fetch import Progress
from engine.models.gguf import GgufFile
from engine.models.gguf_config import read_config
from engine.models.gguf_tensors import TensorPlan, plan_tensors, row_order
from engine.models.gguf_tokenizer import GgufTokenizer, read_tokenizer

_STORED = {dtype: name for name, dtype in STORED_DTYPES.items()}
"""What safetensors calls a type."""


def convert(source: Path, folder: Path, progress: Progress) -> None:
    """Write the model of the GGUF file `source` into `folder`, which must exist and be empty of them.

    `progress` is called often, so that what it raises gives up at once.

    Raises:
        CheckpointError: The file is truncated, corrupt or misshapen.
        UnsupportedModel: Its architecture, quantization or tokenizer is not one we convert.
    """
    gguf, config, plans, tokenizer = _read(source, progress)
    _write_text_files(folder, config, tokenizer)
    with (folder / "model.safetensors").open("xb") as file:
        _write_safetensors(file, gguf, plans, config["dtype"], progress)


def inspect(source: Path, progress: Progress) -> tuple[dict[str, Any], GgufTokenizer]:
    """Return the content of the config.json and the tokenizer that `convert` would write, without reading weights.

    Raises what `convert` raises, but for a quantization that cannot be undone.
    """
    _, config, _, tokenizer = _read(source, progress)
    return config, tokenizer


def _read(source: Path, progress: Progress) -> tuple[GgufFile, dict[str, Any], list[TensorPlan], GgufTokenizer]:
    gguf = GgufFile(source, lambda: progress("convert", 0, 0))
    config = read_config(gguf)
    plans = plan_tensors(gguf, config)
    tokenizer = read_tokenizer(gguf)
    if len(tokenizer.tokens) != config["vocab_size"]:
        raise CheckpointError(
            f"{source}: the tokenizer has {len(tokenizer.tokens)} tokens, the embedding {config['vocab_size']} rows"
        )
    return gguf, config, plans, tokenizer


def to_bfloat16(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """Round float32 to the nearest bfloat16, ties to even, as bit patterns; NaN stays NaN."""
    bits = np.ascontiguousarray(values).view(np.uint32)
    rounded = (bits + (np.uint32(0x7FFF) + ((bits >> 16) & 1))) >> 16
    return np.where(np.isnan(values), np.uint32(0x7FC0), rounded).astype(np.uint16)


def _stored_bytes(values: npt.NDArray[np.float32], dtype: str) -> memoryview:
    if dtype == "bfloat16":
        return to_bfloat16(values).data
    with np.errstate(over="ignore"):
        return np.ascontiguousarray(values, dtype).data


def _write_safetensors(
    file: BinaryIO, gguf: GgufFile, plans: Sequence[TensorPlan], dtype: str, progress: Progress
) -> None:
    """Write length, header and data; the sizes are known beforehand, so that one tensor at a time is in memory."""
    name, value_bytes = _STORED[dtype], ITEM_SIZES_BYTES[dtype]
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for plan in plans:
        end = offset + value_bytes * int(np.prod(plan.shape))
        header[plan.name] = {"dtype": name, "shape": list(plan.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    file.write(struct.pack("<Q", len(text)) + text)
    for done, plan in enumerate(plans):
        progress("convert", done, len(plans))
        for rows in gguf.rows(gguf.tensors[plan.source], row_order(plan), plan.expert):
            file.write(_stored_bytes(rows + np.float32(plan.offset) if plan.offset else rows, dtype))
    progress("convert", len(plans), len(plans))


def _write_text_files(folder: Path, config: dict[str, Any], tokenizer: GgufTokenizer) -> None:
    ids = {key: value for key, value in tokenizer.ids.items() if key in {"bos_token_id", "pad_token_id"}}
    eos = tokenizer.eos_token_ids
    ends = {"eos_token_id": eos[0] if len(eos) == 1 else eos} if eos else {}
    named = [{"name": name, "template": source} for name, source in tokenizer.chat_templates.items()]
    files: dict[str, Any] = {
        "config.json": {**config, **ids, **ends},
        "generation_config.json": {**ids, **ends},
        "tokenizer_config.json": tokenizer.config | ({"chat_template": named} if len(named) > 1 else {}),
    }
    texts = {name: json.dumps(content, indent=2, ensure_ascii=False) + "\n" for name, content in files.items()}
    texts["tokenizer.json"] = tokenizer.backend.to_str()
    if tokenizer.chat_templates.keys() == {"default"}:
        texts["chat_template.jinja"] = tokenizer.chat_templates["default"]
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8", newline="")
