"""How many blocks a budget gives, and what is said where it cannot be had."""

from __future__ import annotations

from typing import Any

import pytest

from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.kv_cache.spec import KVCacheSpec, choose_num_kv_blocks

SPEC = KVCacheSpec(num_layers=2, num_kv_heads=1, head_dim=16, item_size_bytes=2)
BLOCK_BYTES = 16 * SPEC.token_size_bytes
AVAILABLE = 1000 * BLOCK_BYTES


def choose(max_model_len: int = 160, default: int | None = None, **settings: Any) -> int:
    return choose_num_kv_blocks(SPEC, EngineConfig(**settings), max_model_len, AVAILABLE, default)


@pytest.mark.parametrize(
    ("settings", "num_blocks"),
    [
        ({"num_gpu_blocks_override": 30, "kv_cache_memory_bytes": 1}, 31),
        ({"kv_cache_memory_bytes": 20 * BLOCK_BYTES + 7}, 21),
        ({"kv_cache_memory_bytes": AVAILABLE}, 1001),
        ({"num_gpu_blocks_override": 1000}, 1001),
        ({}, 251),
        ({"max_num_seqs": 3}, 31),
        ({"default": 40 * BLOCK_BYTES}, 41),
    ],
)
def test_override_counts_before_memory_before_the_default(settings: dict[str, Any], num_blocks: int) -> None:
    assert choose(**settings) == num_blocks


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (
            {"kv_cache_memory_bytes": 99999999999999},
            f"--kv-cache-memory-bytes 99999999999999 takes {99999999999999 // BLOCK_BYTES * BLOCK_BYTES} bytes "
            f"of memory where {AVAILABLE} are available: lower it to at most {AVAILABLE} or leave it out",
        ),
        (
            {"num_gpu_blocks_override": 1001},
            f"--num-gpu-blocks-override 1001 takes {1001 * BLOCK_BYTES} bytes of memory "
            f"where {AVAILABLE} are available: lower it to at most 1000 or leave it out",
        ),
        (
            {"num_gpu_blocks_override": 1},
            f"--num-gpu-blocks-override 1 gives 1 blocks of 16 tokens, but one request of --max-model-len 160 needs 10 "
            f"({10 * BLOCK_BYTES} bytes): raise --num-gpu-blocks-override to 10 or lower --max-model-len to 16",
        ),
        (
            {"kv_cache_memory_bytes": 1},
            f"--kv-cache-memory-bytes 1 gives 0 blocks of 16 tokens, but one request of --max-model-len 160 needs 10 "
            f"({10 * BLOCK_BYTES} bytes): raise --kv-cache-memory-bytes to {10 * BLOCK_BYTES}",
        ),
        (
            {"max_model_len": 16 * 300},
            f"({300 * BLOCK_BYTES} bytes): raise --kv-cache-memory-bytes to {300 * BLOCK_BYTES} or "
            f"lower --max-model-len to 4000",
        ),
        ({"max_model_len": 16 * 1001}, "bytes): lower --max-model-len to 4000"),
        ({"max_model_len": 16 * 1001, "default": 1}, f"bytes): free memory, of which {AVAILABLE} bytes are available"),
    ],
)
def test_what_cannot_be_had_is_refused_with_advice_that_helps(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        choose(**settings)
    assert str(refused.value).endswith(said)
