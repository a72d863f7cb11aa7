"""What a mirror of the prefix cache, such as a cache-aware router, is told."""

from __future__ import annotations

from typing import Any

import pytest

from engine.config import EngineConfig
from engine.core import EngineCore
from engine.executor.null import Windows
from engine.kv_cache.events import AllBlocksCleared, BlockRemoved, BlockStored, KVCacheEvent
from engine.testing import CoreDriver, NullModelRunner


def make_driver(windows: Windows = (None, None), depth: int = 1, **settings: Any) -> CoreDriver:
    defaults = {"max_num_batched_tokens": 256, "max_model_len": 200, "max_num_seqs": 4, "num_gpu_blocks_override": 40}
    config = EngineConfig.of(model="null", **{**defaults, **settings})
    runner = NullModelRunner(config, depth, windows=windows)
    return CoreDriver(EngineCore(config, runner.start(lambda *_: None), records_events=True), runner)


def mirror(known: set[tuple[bytes, int]], events: list[KVCacheEvent]) -> None:
    """Apply `events` to the hashes that can be hit, each with its group."""
    for event in events:
        match event:
            case BlockStored(block_hashes, _, _, _, group):
                known.update((block_hash, group) for block_hash in block_hashes)
            case BlockRemoved(block_hashes, group):
                assert known >= {(block_hash, group) for block_hash in block_hashes}, "removed, yet never stored"
                known.difference_update((block_hash, group) for block_hash in block_hashes)
            case AllBlocksCleared():
                known.clear()


def test_each_group_tells_the_run_of_a_prompt_once_and_what_follows_names_its_parent() -> None:
    driver = make_driver(windows=(None, 24))
    driver.add("a", list(range(32)), max_tokens=17)
    driver.step()
    first, second = driver.core.take_kv_events()
    for index, event in enumerate((first, second)):
        assert (len(event.block_hashes), event.parent_block_hash, event.token_ids) == (2, None, list(range(32)))
        assert (event.block_size, event.group, event.adapter) == (16, index, None)
    assert first.block_hashes == second.block_hashes
    driver.run()
    for index, event in enumerate(driver.core.take_kv_events()):
        assert (event.parent_block_hash, event.group) == (first.block_hashes[-1], index)
        assert event.token_ids == driver.completions["a"].token_ids[:16]
    driver.core.reset_prefix_cache()
    assert driver.core.take_kv_events() == [AllBlocksCleared()]


def test_without_a_listener_nothing_is_kept() -> None:
    driver = CoreDriver.of(max_model_len=64)
    driver.add("a", list(range(32)))
    driver.run()
    assert driver.core.take_kv_events() == []


@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize("windows", [(None, None), (None, 4)])
def test_who_follows_the_events_knows_exactly_what_can_be_hit(windows: Windows, depth: int) -> None:
    driver = make_driver(windows, depth, block_size=4, num_gpu_blocks_override=24, max_model_len=48)
    cache = driver.core._kv_cache.prefix_cache
    known: set[tuple[bytes, int]] = set()
    for number in range(60):
        driver.add(f"r{number}", [65 + number % 5] * (5 + number % 17), max_tokens=1 + number % 9)
        driver.plan(fails=number % 7 == 3)
        if driver.plans and number % 3:
            driver.finish_step(blamed=[])
        if number % 29 == 28:
            driver.reset_prefix_cache(reset_running=True)
        mirror(known, driver.core.take_kv_events())
        hittable = {(key[:32], int.from_bytes(key[32:], "big")) for key in cache._block_of}
        assert known == hittable
    driver.run()
