"""The files of a model folder in Hugging Face layout, read without torch: config.json, weight files, their headers."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from engine.errors import CheckpointError

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
STORED_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
"""The forms of numbers that are read: as safetensors call them, as config.json does."""
ITEM_SIZES_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
NEVER_READ = re.compile(r"(^|\.)rotary_emb\.inv_freq$")
"""Names of tensors that old checkpoints have and no model needs."""
MASKS = re.compile(rf"{NEVER_READ.pattern}|(^|\.)position_ids$|(^|\.)(attn|attention)\.(masked_)?bias$")
"""Those, and tables that old checkpoints have beside the weights, as numbers of any kind."""
MAX_COUNT = 2**31 - 1
"""Of whatever a config.json counts that has no limit of its own."""
MAX_LAYERS = MAX_EXPERTS = 4096
MAX_COUNTS = (
    dict.fromkeys(("num_hidden_layers", "num_layers", "n_layer", "n_layers"), MAX_LAYERS)
    | dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), MAX_EXPERTS)
    | dict.fromkeys(("vocab_size", "hidden_size", "n_embd", "d_model", "intermediate_size"), MAX_COUNT)
    | dict.fromkeys(("moe_intermediate_size", "num_attention_heads", "n_head", "n_heads", "num_heads"), MAX_COUNT)
    | dict.fromkeys(("num_key_value_heads", "num_kv_heads", "head_dim", "sliding_window"), MAX_COUNT)
    | dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len", "seq_length"), MAX_COUNT)
)
"""The most that a config.json may say, by the names it has for it: far above any model, and nothing to choke on."""
_MAX_NAMED = 5
_MAX_HEADER_SIZE_BYTES = 100 * 2**20
_LENGTH_SIZE_BYTES = 8


class StoredTensor(NamedTuple):
    """One tensor of a weight file; `dtype` as config.json calls it, or as safetensors do where that has no name."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    size_bytes: int
    file: str


def read_config(folder: Path) -> dict[str, Any]:
    """Return the content of a model folder's config.json; what everybody relies on has the right type and size.

    Raises:
        CheckpointError: The file is missing or not a JSON object, or a value in it makes no sense.
    """
    config = _read_json(folder / "config.json")
    architectures, text = config.get("architectures"), config.get("text_config")
    is_list = isinstance(architectures, list) and all(isinstance(name, str) for name in architectures)
    if architectures is not None and not is_list:
        raise CheckpointError(f"config.json: architectures must be a list of names, got {architectures!r:.200}")
    if text is not None and not isinstance(text, dict):
        raise CheckpointError(f"config.json: text_config must be an object, got {text!r:.200}")
    for part in (config, text or {}):
        for key in ("dtype", "torch_dtype"):
            if part.get(key) is not None and not isinstance(part[key], str):
                raise CheckpointError(f"config.json: {key} must be the name of a type, got {part[key]!r:.200}")
        for key in MAX_COUNTS.keys() & part.keys():
            refuse_above_limit(key, part[key])
    return config


def refuse_above_limit(key: str, value: Any) -> None:
    """Raise CheckpointError if `value`, which config.json has for `key`, is a number above its limit."""
    limit = MAX_COUNTS.get(key, MAX_COUNT)
    if isinstance(value, int | float) and value > limit:
        raise CheckpointError(f"config.json: {key} may be at most {limit}, got {value}")


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
        CheckpointError: A file is missing, its header unreadable, or the file shorter than its header says.
    """
    for file in weight_files(folder):
        header = _header(file)
        data_size_bytes = file.stat().st_size - len(header) - _LENGTH_SIZE_BYTES
        for name, entry in _read_json_bytes(header, file).items():
            if name != "__metadata__":
                yield _stored_tensor(file, name, entry, data_size_bytes)


def _stored_tensor(file: Path, name: str, entry: Any, data_size_bytes: int) -> StoredTensor:
    try:
        (first, last), shape = entry["data_offsets"], tuple(entry["shape"])
        dtype = STORED_DTYPES.get(entry["dtype"], str(entry["dtype"]))
        size_bytes = last - first
        item_size_bytes = ITEM_SIZES_BYTES.get(dtype)
        if not all(type(count) is int and count >= 0 for count in (*shape, first, size_bytes)):
            raise ValueError("no whole numbers")
        if item_size_bytes is not None and size_bytes != math.prod(shape) * item_size_bytes:
            raise ValueError("the sizes differ")
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{file}: the header's entry of {name:.200} is {entry!r:.200}") from error
    if last > data_size_bytes:
        raise CheckpointError(
            f"{file} is truncated or corrupt: {name:.200} ends at byte {last} of its data, which has {data_size_bytes}"
        )
    return StoredTensor(name, dtype, shape, size_bytes, file.name)


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
        size = int.from_bytes(opened.read(_LENGTH_SIZE_BYTES), "little")
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
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{file} must hold a JSON object")
    return value
