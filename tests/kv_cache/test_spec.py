"""How many blocks a budget gives, what is said where it cannot be had, and which layers share a table."""

from __future__ import annotations

from typing import Any

import pytest

from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.kv_cache.spec import KVCacheSpec, choose_num_kv_blocks, max_blocks_for, num_page_tensors, num_skipped_blocks
from engine.outputs import KVCacheGroup

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
        ({"max_model_len": 16 * 300}, 301),
        ({"max_model_len": 16 * 1000, "max_num_seqs": 3}, 1001),
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
            {"max_model_len": 16 * 300, "default": 40 * BLOCK_BYTES},
            f"({300 * BLOCK_BYTES} bytes): raise --kv-cache-memory-bytes to {300 * BLOCK_BYTES} or "
            f"lower --max-model-len to 2560",
        ),
        ({"max_model_len": 16 * 1001}, "bytes): lower --max-model-len to 16000"),
        ({"max_model_len": 16 * 1001, "default": 1}, f"bytes): free memory, of which {AVAILABLE} bytes are available"),
    ],
)
def test_what_cannot_be_had_is_refused_with_advice_that_helps(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        choose(**settings)
    assert str(refused.value).endswith(said)


def windowed(*windows: int | None) -> KVCacheSpec:
    return KVCacheSpec(num_layers=len(windows), num_kv_heads=1, head_dim=16, item_size_bytes=2, windows=windows)


@pytest.mark.parametrize(
    ("windows", "groups"),
    [
        ((None, None), [(None, (0, 1))]),
        ((None, 8, 8, None, 8, 8), [(None, (0, 3)), (8, (1, 2)), (8, (4, 5))]),
        ((8, 8, None), [(None, (2,)), (8, (0,)), (8, (1,))]),
        ((4, 8, None), [(None, (2,)), (4, (0,)), (8, (1,))]),
        ((100, None), [(None, (0, 1))]),  # a window as long as the context sees all
        ((*[None] * 5, *[8] * 6), [(None, (0, 1, 2, 3, 4)), (8, (5, 6, 7, 8, 9, 10))]),  # less than a quarter is unused
    ],
)
def test_layers_that_see_the_same_form_groups_of_about_equal_size(
    windows: tuple[int | None, ...], groups: list[tuple[int | None, tuple[int, ...]]]
) -> None:
    made = windowed(*windows).groups(100)
    assert [(group.sliding_window, group.layers) for group in made] == groups
    assert num_page_tensors(made) == max(len(group.layers) for group in made)
    assert windowed(*windows).block_size_bytes(made, 16) == num_page_tensors(made) * 2 * 16 * 2 * 16


def test_layers_that_see_what_comes_after_say_so_in_every_group() -> None:
    spec = KVCacheSpec(num_layers=2, num_kv_heads=1, head_dim=16, item_size_bytes=2, is_causal=False)
    assert [group.is_causal for group in spec.groups(100)] == [False]


@pytest.mark.parametrize(("num_computed", "num_skipped"), [(0, 0), (4, 0), (5, 1), (6, 1), (7, 2), (11, 4)])
def test_blocks_are_skipped_once_their_last_token_is_behind_the_window(num_computed: int, num_skipped: int) -> None:
    assert num_skipped_blocks(KVCacheGroup(layers=(0,), sliding_window=4), num_computed, 2) == num_skipped
    assert num_skipped_blocks(KVCacheGroup(layers=(0,)), num_computed, 2) == 0


@pytest.mark.parametrize("window", [1, 2, 4, 7])
@pytest.mark.parametrize("block_size", [1, 2, 3])
@pytest.mark.parametrize("max_in_flight", [1, 3, 8])
def test_a_window_never_holds_more_blocks_than_are_counted_for_it(
    window: int, block_size: int, max_in_flight: int
) -> None:
    group = KVCacheGroup(layers=(0,), sliding_window=window)
    held = [
        -(-end // block_size) - num_skipped_blocks(group, processed, block_size)
        for processed in range(60)
        for end in range(processed, processed + max_in_flight + 1)
    ]
    most = max_blocks_for([group], 1000, block_size, max_in_flight)
    assert max(held) <= most <= max(held) + 1
    assert max_blocks_for([group], 2, block_size, max_in_flight) <= -(-2 // block_size)
