"""How much memory a model will need at least, from config.json and the headers of its weight files alone. No torch.

Said before anything is loaded, so that a model that cannot fit is refused in a moment and with the numbers, not killed
after minutes. It is a lower bound: what the files do not tell counts as nothing. Of our own decoder they tell all; of a
model of transformers not what its class assumes where config.json is silent. What the K/V pages finally take is chosen,
within what is then left, by `kv_cache.spec.choose_num_kv_blocks`.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_right
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import msgspec

from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.kv_cache.spec import KVCacheSpec, max_blocks_for
from engine.models.checkpoint import (
    EMBEDDING,
    HEAD,
    ITEM_SIZES_BYTES,
    MASKS,
    StoredTensor,
    read_config,
    refuse_above_limit,
    stored_tensors,
)

_MIB = 2**20
_ROTARY_ITEM_BYTES = 4
"""As the operations in C keep the table of rotations; torch's may take half."""
_MAX_MODEL_LEN = 2**24
"""The most that --max-model-len takes."""
_LAYER = re.compile(r"(^|\.)layers\.(\d+)\.")
_KEYS = re.compile(r"(^|\.)(k_proj|key)\.weight$")


class OwnShape(Protocol):
    """What our own decoder is built from, as far as it takes memory; see `decoder_config.DecoderConfig`."""

    @property
    def num_layers(self) -> int:
        """Layers with a KV cache."""

    @property
    def num_kv_heads(self) -> int:
        """K/V heads a layer."""

    @property
    def head_dim(self) -> int:
        """Numbers a head."""

    @property
    def windows(self) -> tuple[int | None, ...]:
        """For each layer the positions a row sees, None for all."""

    @property
    def rotary_dims(self) -> tuple[int, ...]:
        """Of each table of cosines and sines the numbers a position."""

    @property
    def ties_embeddings(self) -> bool:
        """Whether the head is the embedding."""


class MemoryEstimate(NamedTuple):
    """Bytes of memory, at least; set by `estimate_memory`.

    Attributes:
        weights_bytes: All tensors that are read, in the type they will have.
        loading_bytes: The largest tensor as it is stored, which lies beside its copy while it is converted.
        kv_bytes: Keys and values of one request of `max_model_len` tokens.
        rotary_bytes: The cosines and sines of that many positions.
        logits_bytes: The scores of the requests of one full step, in float32.
        rows_bytes: What lies between the operations of one full step, for all its rows.
        max_model_len: The context that was asked for, or the model's own; 0 where neither is known.
        longest: The longest context, of those that can be asked for, whose K/V and rotary table fit `available_bytes`
            beside the weights.
        available_bytes: What there is.
    """

    weights_bytes: int
    loading_bytes: int
    kv_bytes: int
    rotary_bytes: int
    logits_bytes: int
    rows_bytes: int
    max_model_len: int
    longest: int
    available_bytes: int

    @property
    def peak_bytes(self) -> int:
        """The most that is needed at one time."""
        return max(self.weights_bytes + self.loading_bytes, self.without_rows_bytes + self.rows_bytes)

    @property
    def without_rows_bytes(self) -> int:
        """What is needed once it is loaded, but for the rows of a step."""
        return self.weights_bytes + self.kv_bytes + self.rotary_bytes + self.logits_bytes

    def __str__(self) -> str:
        return (
            f"{_mib(self.peak_bytes)} of memory at least: weights {_mib(self.weights_bytes)} and, while loading, "
            f"{_mib(self.loading_bytes)}; then K/V of one request of {self.max_model_len} tokens "
            f"{_mib(self.kv_bytes)}, its rotary table {_mib(self.rotary_bytes)}, of one full step "
            f"logits {_mib(self.logits_bytes)} and rows {_mib(self.rows_bytes)}"
        )


def estimate_memory(
    folder: Path, config: EngineConfig, available_bytes: int, own: OwnShape | None, row_bytes: int = 0
) -> MemoryEstimate:
    """Return what the model of `folder` needs under `config`.

    Args:
        folder: In Hugging Face layout.
        config: Of the engine.
        available_bytes: What there is.
        own: Of our own decoder, if that will run the model; None if transformers will.
        row_bytes: What a row of a step takes between operations, as far as it is known.

    Raises:
        CheckpointError: A file is missing or unreadable, or a number in config.json makes no sense.
    """
    whole = read_config(folder)
    raw = whole.get("text_config") or whole
    dtype = config.dtype if config.dtype != "auto" else raw.get("dtype") or raw.get("torch_dtype")
    item_size_bytes = ITEM_SIZES_BYTES.get(str(dtype), 0)
    tensors = _read_tensors(list(stored_tensors(folder)), raw, own)
    weights_bytes = loading_bytes = 0
    for tensor in tensors:
        is_head = tensor.name == HEAD or (tensor.name == EMBEDDING and own is not None and own.ties_embeddings)
        size_bytes = _held_bytes(tensor, config, item_size_bytes, is_head=is_head)
        weights_bytes += size_bytes
        loading_bytes = max(loading_bytes, tensor.size_bytes if size_bytes != tensor.size_bytes else 0)
    max_model_len = config.max_model_len or _number(raw, "max_position_embeddings", "n_positions", "max_seq_len") or 0
    logits_bytes = config.max_num_seqs * (_number(raw, "vocab_size") or 0) * 4
    kv_item_bytes = _kv_item_bytes(config, item_size_bytes or 2)
    spec = _own_spec(own, kv_item_bytes) if own is not None else _spec(raw, tensors, kv_item_bytes)

    def kv_bytes(num_tokens: int) -> int:
        return _kv_bytes(spec, num_tokens, config) if spec is not None and num_tokens else 0

    def rotary_bytes(num_tokens: int) -> int:
        return num_tokens * sum(own.rotary_dims) * _ROTARY_ITEM_BYTES if own is not None else 0

    def rows_bytes(num_tokens: int) -> int:
        return row_bytes * min(config.max_num_batched_tokens, config.max_num_seqs * num_tokens)

    def taken_bytes(num_tokens: int) -> int:
        return kv_bytes(num_tokens) + rotary_bytes(num_tokens) + rows_bytes(num_tokens)

    left = available_bytes - weights_bytes - logits_bytes
    lengths = range(min(max_model_len, _MAX_MODEL_LEN) + 1)
    longest = bisect_right(lengths, left, key=taken_bytes) - 1
    return MemoryEstimate(
        weights_bytes=weights_bytes,
        loading_bytes=loading_bytes,
        kv_bytes=kv_bytes(max_model_len),
        rotary_bytes=rotary_bytes(max_model_len),
        logits_bytes=logits_bytes,
        rows_bytes=rows_bytes(max_model_len),
        max_model_len=max_model_len,
        longest=longest,
        available_bytes=available_bytes,
    )


def refuse_what_cannot_fit(
    folder: Path, config: EngineConfig, available_bytes: int, own: OwnShape | None, row_bytes: int = 0
) -> MemoryEstimate:
    """Return the estimate; see `estimate_memory`.

    Raises:
        ConfigError: The model cannot fit, with the numbers and what to do.
        CheckpointError: A file is missing or unreadable.
    """
    estimate = estimate_memory(folder, config, available_bytes, own, row_bytes)
    if estimate.peak_bytes <= available_bytes:
        return estimate
    loads = estimate.weights_bytes + estimate.loading_bytes <= available_bytes
    most_rows = (available_bytes - estimate.without_rows_bytes) // max(1, row_bytes)
    most_rows -= most_rows // 32  # what is available changes a little until the next start
    if loads and most_rows >= config.max_num_seqs:
        remedy = f"lower --max-num-batched-tokens {config.max_num_batched_tokens} to at most {most_rows}"
    elif loads and estimate.longest >= 2:
        remedy = f"lower --max-model-len to at most {estimate.longest}"
    elif config.dtype == "float32" and _fits_as_bfloat16(folder, config, available_bytes, own, row_bytes):
        remedy = "take --dtype bfloat16, which halves it, or a smaller model"
    else:
        remedy = "take a smaller model"
    raise ConfigError(f"{folder} needs {estimate}; {_mib(available_bytes)} are available: {remedy}, or free memory")


def _fits_as_bfloat16(
    folder: Path, config: EngineConfig, available_bytes: int, own: OwnShape | None, row_bytes: int
) -> bool:
    halved = estimate_memory(folder, msgspec.structs.replace(config, dtype="bfloat16"), available_bytes, own, row_bytes)
    return halved.peak_bytes <= available_bytes


def _size_bytes(tensor: StoredTensor, item_size_bytes: int) -> int:
    stored = ITEM_SIZES_BYTES.get(tensor.dtype)
    return tensor.size_bytes // stored * (item_size_bytes or stored) if stored else tensor.size_bytes


def _read_tensors(tensors: list[StoredTensor], raw: dict[str, Any], own: OwnShape | None) -> list[StoredTensor]:
    """Return those that take memory: some classes of transformers leave others unread without a word."""
    tensors = [tensor for tensor in tensors if not MASKS.search(tensor.name)]
    names = {tensor.name for tensor in tensors}
    if own is not None:
        has_head = not (own.ties_embeddings and EMBEDDING in names)
        return [tensor for tensor in tensors if has_head or tensor.name != HEAD]
    may_be_tied = EMBEDDING in names and raw.get("tie_word_embeddings") is not False
    num_layers = _number(raw, "num_hidden_layers") or 0
    return [
        tensor
        for tensor in tensors
        if not (tensor.name == HEAD and may_be_tied)
        and not any(num_layers and int(index) >= num_layers for _, index in _LAYER.findall(tensor.name))
    ]


def _kv_bytes(spec: KVCacheSpec, num_tokens: int, config: EngineConfig) -> int:
    groups = spec.groups(num_tokens)
    num_blocks = max_blocks_for(groups, num_tokens, config.block_size, config.max_num_batched_tokens)
    return num_blocks * spec.block_size_bytes(groups, config.block_size)


def _held_bytes(tensor: StoredTensor, config: EngineConfig, item_size_bytes: int, *, is_head: bool) -> int:
    """Return what `tensor` takes once it is loaded: at least, for scales are left out."""
    form = config.head_quantization if is_head else config.quantization
    if form == "auto":
        form = "none" if config.quantization == "none" else "int8"
    if form == "none" or (tensor.name == EMBEDDING and not is_head) or len(tensor.shape) < 2:
        return _size_bytes(tensor, item_size_bytes)
    return math.prod(tensor.shape) // (1 if form == "int8" else 2)


def _kv_item_bytes(config: EngineConfig, item_size_bytes: int) -> int:
    if config.kv_cache_dtype == "int8" or (config.kv_cache_dtype == "auto" and config.quantization != "none"):
        return 1
    return ITEM_SIZES_BYTES.get(config.kv_cache_dtype, item_size_bytes)


def _own_spec(own: OwnShape, item_size_bytes: int) -> KVCacheSpec:
    return KVCacheSpec(
        num_layers=own.num_layers,
        num_kv_heads=own.num_kv_heads,
        head_dim=own.head_dim,
        item_size_bytes=item_size_bytes,
        windows=own.windows,
    )


def _spec(raw: dict[str, Any], tensors: list[StoredTensor], item_size_bytes: int) -> KVCacheSpec | None:
    """Return the K/V of a token, under whichever names a config.json gives its numbers; None where it gives none.

    A class may assume fewer K/V heads than heads, or smaller ones, where config.json is silent: the weights tell, if
    those of the keys are stored by themselves; else one head is what there is at least.
    """
    num_layers = _number(raw, "num_hidden_layers", "n_layer", "n_layers", "num_layers")
    num_heads = _number(raw, "num_attention_heads", "n_head", "n_heads", "num_heads")
    hidden_size = _number(raw, "hidden_size", "n_embd", "d_model")
    if not (num_layers and num_heads and hidden_size):
        return None
    widths = [tensor.shape[0] for tensor in tensors if _KEYS.search(tensor.name) and len(tensor.shape) > 1]
    named = 1 if raw.get("multi_query") else _number(raw, "num_key_value_heads", "num_kv_heads")
    one_head = _number(raw, "head_dim") or hidden_size // num_heads
    return KVCacheSpec(
        num_layers=num_layers,
        num_kv_heads=1 if widths else named or 1,
        head_dim=min(widths, default=one_head),
        item_size_bytes=item_size_bytes,
        windows=_windows(raw, num_layers),
    )


def _windows(raw: dict[str, Any], num_layers: int) -> tuple[int | None, ...]:
    window = _number(raw, "sliding_window")
    if window is None or raw.get("use_sliding_window") is False:
        return ()
    kinds = raw.get("layer_types")
    if not isinstance(kinds, list) or len(kinds) != num_layers:
        return (window,) * num_layers  # some or all: the least
    return tuple(None if kind == "full_attention" else window for kind in kinds)


def _number(raw: dict[str, Any], *names: str) -> int | None:
    for name in names:
        value = raw.get(name)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            refuse_above_limit(name, value)
            return value
    return None


def _mib(size_bytes: int) -> str:
    return f"{size_bytes / _MIB:,.1f} MiB"
