"""How much memory a model will need at least, from config.json and the headers of its weight files alone. No torch.

Said before anything is loaded, so that a model that cannot fit is refused in a moment and with the numbers, not killed
after minutes. It is a lower bound: what the files do not tell counts as nothing. What the K/V pages finally take is
chosen, within what is then left, by `kv_cache.spec.choose_num_kv_blocks`.
"""

from __future__ import annotations

from bisect import bisect_right
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.kv_cache.spec import KVCacheSpec, max_blocks_for
from engine.models.checkpoint import ITEM_SIZES_BYTES, StoredTensor, read_config, refuse_above_limit, stored_tensors
from engine.models.families import DECODERS

_MIB = 2**20
_MAX_MODEL_LEN = 2**24
"""The most that --max-model-len takes."""
_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"


class MemoryEstimate(NamedTuple):
    """Bytes of memory, at least; set by `estimate_memory`.

    Attributes:
        weights_bytes: All tensors, in the type they will have; an embedding that is the head too counts twice, for
            the head is reordered.
        loading_bytes: The largest tensor as it is stored, which lies beside its copy while it is converted.
        kv_bytes: Keys and values of one request of `max_model_len` tokens.
        rotary_bytes: The cosines and sines of that many positions.
        logits_bytes: The scores of the requests of one full step, in float32.
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
    max_model_len: int
    longest: int
    available_bytes: int

    @property
    def peak_bytes(self) -> int:
        """The most that is needed at one time."""
        return self.weights_bytes + max(self.loading_bytes, self.kv_bytes + self.rotary_bytes + self.logits_bytes)

    def __str__(self) -> str:
        return (
            f"{_mib(self.peak_bytes)} of memory at least: weights {_mib(self.weights_bytes)} and, while loading, "
            f"{_mib(self.loading_bytes)}; then K/V of one request of {self.max_model_len} tokens "
            f"{_mib(self.kv_bytes)}, its rotary table {_mib(self.rotary_bytes)}, logits {_mib(self.logits_bytes)}"
        )


def estimate_memory(folder: Path, config: EngineConfig, available_bytes: int) -> MemoryEstimate:
    """Return what the model of `folder` needs under `config`.

    Raises:
        CheckpointError: A file is missing or unreadable, or a number in config.json makes no sense.
    """
    whole = read_config(folder)
    raw = whole.get("text_config") or whole
    tensors = list(stored_tensors(folder))
    dtype = config.dtype if config.dtype != "auto" else raw.get("dtype") or raw.get("torch_dtype")
    item_size_bytes = ITEM_SIZES_BYTES.get(str(dtype), 0)
    # Only our own decoder keeps a tied head in a second order, and tables of all positions.
    is_own = config.model_impl != "transformers" and any(
        str(name) in DECODERS for name in whole.get("architectures") or ()
    )
    weights_bytes, loading_bytes = _second_head_bytes(tensors, item_size_bytes) if is_own else 0, 0
    for tensor in tensors:
        size_bytes = _size_bytes(tensor, item_size_bytes)
        weights_bytes += size_bytes
        loading_bytes = max(loading_bytes, tensor.size_bytes if size_bytes != tensor.size_bytes else 0)
    max_model_len = config.max_model_len or _number(raw, "max_position_embeddings", "n_positions", "max_seq_len") or 0
    logits_bytes = config.max_num_seqs * (_number(raw, "vocab_size") or 0) * 4
    spec = _spec(raw, item_size_bytes or 2)

    def kv_bytes(num_tokens: int) -> int:
        return _kv_bytes(spec, num_tokens, config) if spec is not None and num_tokens else 0

    def rotary_bytes(num_tokens: int) -> int:
        return num_tokens * spec.head_dim * spec.item_size_bytes if spec is not None and is_own else 0

    left = available_bytes - weights_bytes - logits_bytes
    lengths = range(min(max_model_len, _MAX_MODEL_LEN) + 1)
    longest = bisect_right(lengths, left, key=lambda length: kv_bytes(length) + rotary_bytes(length)) - 1
    return MemoryEstimate(
        weights_bytes=weights_bytes,
        loading_bytes=loading_bytes,
        kv_bytes=kv_bytes(max_model_len),
        rotary_bytes=rotary_bytes(max_model_len),
        logits_bytes=logits_bytes,
        max_model_len=max_model_len,
        longest=longest,
        available_bytes=available_bytes,
    )


def refuse_what_cannot_fit(folder: Path, config: EngineConfig, available_bytes: int) -> MemoryEstimate:
    """Return the estimate.

    Raises:
        ConfigError: The model cannot fit, with the numbers and what to do.
        CheckpointError: A file is missing or unreadable.
    """
    estimate = estimate_memory(folder, config, available_bytes)
    if estimate.peak_bytes <= available_bytes:
        return estimate
    if estimate.longest >= 2 and estimate.weights_bytes + estimate.loading_bytes <= available_bytes:
        remedy = f"lower --max-model-len to at most {estimate.longest}"
    elif config.dtype == "float32" and _fits_as_bfloat16(folder, config, available_bytes):
        remedy = "take --dtype bfloat16, which halves it, or a smaller model"
    else:
        remedy = "take a smaller model"
    raise ConfigError(f"{folder} needs {estimate}; {_mib(available_bytes)} are available: {remedy}, or free memory")


def _fits_as_bfloat16(folder: Path, config: EngineConfig, available_bytes: int) -> bool:
    halved = estimate_memory(folder, msgspec.structs.replace(config, dtype="bfloat16"), available_bytes)
    return halved.peak_bytes <= available_bytes


def _size_bytes(tensor: StoredTensor, item_size_bytes: int) -> int:
    stored = ITEM_SIZES_BYTES.get(tensor.dtype)
    return tensor.size_bytes // stored * (item_size_bytes or stored) if stored else tensor.size_bytes


def _second_head_bytes(tensors: list[StoredTensor], item_size_bytes: int) -> int:
    """Return what the head takes where it is the embedding: that is then kept in two orders."""
    by_name = {tensor.name: tensor for tensor in tensors}
    if _HEAD in by_name or _EMBEDDING not in by_name:  # a stored head is counted, whether it is read or not
        return 0
    return _size_bytes(by_name[_EMBEDDING], item_size_bytes)


def _kv_bytes(spec: KVCacheSpec, num_tokens: int, config: EngineConfig) -> int:
    groups = spec.groups(num_tokens)
    num_blocks = max_blocks_for(groups, num_tokens, config.block_size, config.max_num_batched_tokens)
    return num_blocks * spec.block_size_bytes(groups, config.block_size)


def _spec(raw: dict[str, Any], item_size_bytes: int) -> KVCacheSpec | None:
    """Return the K/V of a token, under whichever names a config.json gives its numbers; None where it gives none."""
    num_layers = _number(raw, "num_hidden_layers", "n_layer", "n_layers", "num_layers")
    num_heads = _number(raw, "num_attention_heads", "n_head", "n_heads", "num_heads")
    hidden_size = _number(raw, "hidden_size", "n_embd", "d_model")
    if not (num_layers and num_heads and hidden_size):
        return None
    one = 1 if raw.get("multi_query") else None
    return KVCacheSpec(
        num_layers=num_layers,
        num_kv_heads=_number(raw, "num_key_value_heads", "num_kv_heads") or one or num_heads,
        head_dim=_number(raw, "head_dim") or hidden_size // num_heads,
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
