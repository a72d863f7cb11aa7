"""Arithmetic of the paged KV cache: bytes a block, blocks in a budget, tokens to blocks, layers to groups. No state.

Layers that see the same positions form groups of about equal size. A group has its own block table; all take blocks
from one pool, for a block is the same memory whoever takes it: the i-th page tensor belongs to the i-th layer of each
group::

                      page tensor 0   page tensor 1
    group 0, full     layer 0         layer 3           block 7 of group 0's table
    group 1, window   layer 1         layer 4           block 9 of group 1's table
    group 2, window   layer 2         layer 5           block 2 of group 2's table
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

import msgspec

from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.outputs import KVCacheGroup

NULL_BLOCK = 0
"""Block 0 exists but is never handed out: what must point somewhere harmless points there."""
PADDING_LIMIT = 1.25
"""Groups take the size of the most frequent kind of layer if it is less than this times the least frequent one's."""


class KVCacheSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The shape of one token's keys and values; set by the model runner.

    Attributes:
        num_layers: Layers with a KV cache.
        num_kv_heads: K/V heads a layer.
        head_dim: Numbers a head.
        item_size_bytes: Bytes a number.
        scale_size_bytes: Bytes beside the numbers of one head's key, and of its value.
        windows: For each layer the positions it sees, None for all; empty where all layers see all.
        is_causal: Whether a token sees only what stands before it.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    item_size_bytes: int
    scale_size_bytes: int = 0
    windows: tuple[int | None, ...] = ()
    is_causal: bool = True

    @property
    def token_size_bytes(self) -> int:
        """Bytes one token takes, keys and values of all layers."""
        return self.num_layers * self._layer_token_size_bytes

    @property
    def _layer_token_size_bytes(self) -> int:
        return 2 * self.num_kv_heads * (self.head_dim * self.item_size_bytes + self.scale_size_bytes)

    def groups(self, max_model_len: int) -> tuple[KVCacheGroup, ...]:
        """Return the groups, those that see all positions first; a window of `max_model_len` or more sees all."""
        kinds: dict[int | None, list[int]] = {}
        for layer, window in enumerate(self.windows or (None,) * self.num_layers):
            kinds.setdefault(None if window is None or window >= max_model_len else window, []).append(layer)
        least, most = min(map(len, kinds.values())), max(map(len, kinds.values()))
        size = most if most < PADDING_LIMIT * least else least
        return tuple(
            KVCacheGroup(layers=tuple(layers[first : first + size]), sliding_window=window, is_causal=self.is_causal)
            for window, layers in sorted(kinds.items(), key=lambda kind: kind[0] or 0)
            for first in range(0, len(layers), size)
        )

    def block_size_bytes(self, groups: Sequence[KVCacheGroup], block_size: int) -> int:
        """Return the memory of one block of `block_size` tokens, whichever group takes it."""
        return num_page_tensors(groups) * self._layer_token_size_bytes * block_size


def num_page_tensors(groups: Sequence[KVCacheGroup]) -> int:
    """Return how many tensors of pages there are, for keys and for values each: the layers of the largest group."""
    return max(len(group.layers) for group in groups)


def num_blocks_for(num_tokens: int, block_size: int) -> int:
    """Return how many blocks hold `num_tokens` tokens."""
    return -(-num_tokens // block_size)


def num_skipped_blocks(group: KVCacheGroup, num_tokens: int, block_size: int) -> int:
    """Return how many leading blocks nobody reads any more who has computed `num_tokens` tokens."""
    window = group.sliding_window
    return 0 if window is None else max(0, num_tokens - window + 1) // block_size


def max_blocks_for(groups: Sequence[KVCacheGroup], num_tokens: int, block_size: int, max_in_flight: int) -> int:
    """Return the most blocks that `num_tokens` tokens of one request hold at any time, over all groups.

    A window is computed with at most `max_in_flight` uncommitted tokens, whose own windows must still be there.
    """
    most = num_blocks_for(num_tokens, block_size)
    num_blocks = most * len(groups)
    for group in groups:
        if group.sliding_window is not None:
            seen = num_blocks_for(group.sliding_window - 1 + max_in_flight, block_size) + 1
            num_blocks -= max(0, most - seen)
    return num_blocks


def choose_num_kv_blocks(
    spec: KVCacheSpec,
    config: EngineConfig,
    max_model_len: int,
    available_memory_bytes: int,
    default_memory_bytes: int | None = None,
    max_concurrent_plans: int = 1,
) -> int:
    """Return how many KV blocks to allocate, the null block included.

    The override counts first, then the memory asked for, then the default: the smaller of `default_memory_bytes` (a
    quarter of the available memory when None) and what `max_num_seqs` requests of full length need; but what one needs
    where four times that default holds it.

    Raises:
        ConfigError: What is asked for is not available, or not even one request of `max_model_len` tokens would fit,
            with the numbers.
    """
    groups = spec.groups(max_model_len)
    block_size_bytes = spec.block_size_bytes(groups, config.block_size)
    max_in_flight = max_concurrent_plans * config.max_num_batched_tokens

    def blocks_for(num_tokens: int) -> int:
        return max_blocks_for(groups, num_tokens, config.block_size, max_in_flight)

    blocks_a_request = blocks_for(max_model_len)
    request_bytes = blocks_a_request * block_size_bytes
    if config.num_gpu_blocks_override is not None:
        usable = config.num_gpu_blocks_override
        source = f"--num-gpu-blocks-override {usable}"
        enough, most, in_reach = blocks_a_request, available_memory_bytes // block_size_bytes, usable
    elif config.kv_cache_memory_bytes is not None:
        usable = config.kv_cache_memory_bytes // block_size_bytes
        source = f"--kv-cache-memory-bytes {config.kv_cache_memory_bytes}"
        enough, most, in_reach = request_bytes, available_memory_bytes, usable
    else:
        default = available_memory_bytes // 4 if default_memory_bytes is None else default_memory_bytes
        budget = min(default, config.max_num_seqs * request_bytes)
        if request_bytes <= 4 * default:
            budget = max(budget, request_bytes)
        usable = budget // block_size_bytes
        source = f"--kv-cache-memory-bytes, {budget} when unset,"
        enough, most, in_reach = request_bytes, available_memory_bytes, 4 * default // block_size_bytes
    if usable * block_size_bytes > available_memory_bytes:
        raise ConfigError(
            f"{source} takes {usable * block_size_bytes} bytes of memory where {available_memory_bytes} are available: "
            f"lower it to at most {most} or leave it out"
        )
    if usable < blocks_a_request:
        longest = bisect_right(range(max_model_len), in_reach, key=blocks_for) - 1
        remedies = [f"raise {source.split()[0].rstrip(',')} to {enough}"] if enough <= most else []
        remedies += [f"lower --max-model-len to {longest}"] if longest >= 2 else []
        raise ConfigError(
            f"{source} gives {usable} blocks of {config.block_size} tokens, but one request of --max-model-len "
            f"{max_model_len} needs {blocks_a_request} ({request_bytes} bytes): "
            f"{' or '.join(remedies) or f'free memory, of which {available_memory_bytes} bytes are available'}"
        )
    return usable + 1
