"""A real model that sleeps gives its memory back, and awake answers as before."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import trio

import engine
from engine.config import EngineConfig
from engine.model_runner.memory import give_back_memory, held_memory_bytes
from engine.model_runner.model_runner import ModelRunner
from engine.sampling_params import SamplingParams
from engine.verbs import SleepTag


@pytest.mark.parametrize("level", [1, 2])
def test_asleep_pages_and_weights_are_gone_and_awake_they_are_back(tiny_llama: tuple[Path, Any], level: int) -> None:
    folder = tiny_llama[0]
    config = EngineConfig(model=str(folder), num_threads=1, num_gpu_blocks_override=20)
    runner = ModelRunner(config, folder)
    runner.start(lambda phase, done, total: None)
    awake = runner.memory()
    for _ in range(2):
        runner.sleep(level)
    asleep = runner.memory()
    assert asleep["kv_cache"] == 0
    assert asleep["weights"] == (awake["weights"] if level == 1 else 0)
    for tag in (SleepTag.KV_CACHE, SleepTag.WEIGHTS, SleepTag.SCHEDULING):
        runner.wake_up([tag])
    back = runner.memory()
    assert (back["kv_cache"], back["weights"]) == (awake["kv_cache"], awake["weights"])


@pytest.mark.slow
@pytest.mark.parametrize("level", [1, 2])
async def test_frozen_streams_of_a_real_model_sleep_and_go_on_as_if_nothing_had_been(
    byte_llama: Path, level: int
) -> None:
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    settings = {"num_threads": 1, "num_gpu_blocks_override": 20, "max_num_batched_tokens": 64}
    async with engine.open_engine(str(byte_llama), isolation="thread", **settings) as llm:
        async with llm.generate([65] * 30, params) as stream:
            undisturbed = (await stream.collect()).outputs[0].token_ids
        async with llm.generate([65] * 30, params) as stream:
            begun = (await stream.__anext__()).token_ids
            await llm.sleep(level, "keep")
            assert (await llm.collective_rpc("memory"))[0]["kv_cache"] == 0
            await llm.wake_up()
            with trio.fail_after(10):
                rest = (await stream.collect()).outputs[0].token_ids
    assert begun + rest == undisturbed


def test_memory_that_is_let_go_goes_back_to_the_system() -> None:
    give_back_memory()
    before = held_memory_bytes()
    kept = [bytearray(50_000) for _ in range(2000)]
    assert held_memory_bytes() > before + 80_000_000
    del kept
    give_back_memory()
    assert held_memory_bytes() < before + 20_000_000
