"""Arithmetic of the paged KV cache: bytes a block, blocks in a budget, tokens to blocks. No state."""

from __future__ import annotations

import msgspec

from engine.config import EngineConfig
from engine.errors import ConfigError

NULL_BLOCK = 0
"""Block 0 exists but is never handed out: what must point somewhere harmless points there."""


class KVCacheSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The shape of one token's keys and values; set by the model runner.

    Attributes:
        num_layers: Layers with a KV cache.
        num_kv_heads: K/V heads a layer.
        head_dim: Numbers a head.
        item_size_bytes: Bytes a number.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    item_size_bytes: int

    @property
    def token_size_bytes(self) -> int:
        """Bytes one token takes, keys and values of all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.item_size_bytes


def num_blocks_for(num_tokens: int, block_size: int) -> int:
    """Return how many blocks hold `num_tokens` tokens."""
    return -(-num_tokens // block_size)


def choose_num_kv_blocks(
    spec: KVCacheSpec,
    config: EngineConfig,
    max_model_len: int,
    available_memory_bytes: int,
    default_memory_bytes: int | None = None,
) -> int:
    """Return how many KV blocks to allocate, the null block included.

    The override counts first, then the memory asked for, then the default: the smaller of `default_memory_bytes` (a
    quarter of the available memory when None) and what `max_num_seqs` requests of full length need.

    Raises:
        ConfigError: What is asked for is not available, or not even one request of `max_model_len` tokens would fit,
            with the numbers.
    """
    block_size_bytes = spec.token_size_bytes * config.block_size
    blocks_a_request = num_blocks_for(max_model_len, config.block_size)
    request_bytes = blocks_a_request * block_size_bytes
    if config.num_gpu_blocks_override is not None:
        usable = config.num_gpu_blocks_override
        source = f"--num-gpu-blocks-override {usable}"
        enough, most = blocks_a_request, available_memory_bytes // block_size_bytes
    elif config.kv_cache_memory_bytes is not None:
        usable = config.kv_cache_memory_bytes // block_size_bytes
        source = f"--kv-cache-memory-bytes {config.kv_cache_memory_bytes}"
        enough, most = request_bytes, available_memory_bytes
    else:
        default = available_memory_bytes // 4 if default_memory_bytes is None else default_memory_bytes
        budget = min(default, config.max_num_seqs * request_bytes)
        usable = budget // block_size_bytes
        source = f"--kv-cache-memory-bytes, {budget} when unset,"
        enough, most = request_bytes, available_memory_bytes
    if usable * block_size_bytes > available_memory_bytes:
        raise ConfigError(
            f"{source} takes {usable * block_size_bytes} bytes of memory where {available_memory_bytes} are available: "
            f"lower it to at most {most} or leave it out"
        )
    if usable < blocks_a_request:
        remedies = [f"raise {source.split()[0].rstrip(',')} to {enough}"] if enough <= most else []
        remedies += (
            [f"lower --max-model-len to {usable * config.block_size}"] if usable * config.block_size >= 2 else []
        )
        raise ConfigError(
            f"{source} gives {usable} blocks of {config.block_size} tokens, but one request of --max-model-len "
            f"{max_model_len} needs {blocks_a_request} ({request_bytes} bytes): "
            f"{' or '.join(remedies) or f'free memory, of which {available_memory_bytes} bytes are available'}"
        )
    return usable + 1
