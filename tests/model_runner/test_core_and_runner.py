"""Both wings together: the core plans, the runner computes, transformers says what must come out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import trio

from engine.config import EngineConfig
from engine.core import EngineCore
from engine.executor.inline import InlineExecutor
from engine.model_runner.model_runner import ModelRunner
from engine.outputs import RequestId
from engine.protocol import EngineCoreRequest
from engine.sampling_params import SamplingParams

MAX_TOKENS = 12


def draw_prompt(length: int, seed: int) -> list[int]:
    return torch.randint(0, 199, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


PROMPTS = [draw_prompt(1 + 4 * i, seed=i) for i in range(12)] + [[*draw_prompt(41, seed=10), 7, 8, 9]]


def make_config(**settings: Any) -> EngineConfig:
    fields = {"max_num_batched_tokens": 20, "max_num_seqs": 16, "block_size": 4, "max_model_len": 64}
    return EngineConfig(**(fields | {"num_gpu_blocks_override": 18, "num_threads": 1} | settings))


def make_request(index: int, params: SamplingParams) -> EngineCoreRequest:
    name = str(index)
    return EngineCoreRequest(RequestId(name), name, PROMPTS[index], params, arrival_time=0.0)


def run(folder: Path, params: list[SamplingParams], config: EngineConfig) -> tuple[dict[int, list[int]], EngineCore]:
    runner = ModelRunner(config, folder)
    core = EngineCore(config, runner.start(lambda *call: None))
    for i, request_params in enumerate(params):
        core.add(make_request(i, request_params), now=0.0)
    tokens: dict[int, list[int]] = {i: [] for i in range(len(params))}
    while core.has_work:
        plan = core.plan(0.0)
        assert plan is not None
        runner.execute(plan)
        core.commit(plan, runner.sample(), 0.0)
        core.check_invariants()
        for output in core.take_outputs():
            tokens[int(output.request_id)] += output.new_token_ids
    return tokens, core


@pytest.fixture(scope="module")
def oracle(tiny_llama: tuple[Path, Any]) -> dict[int, list[int]]:
    expected = {}
    with torch.inference_mode():
        for i, prompt in enumerate(PROMPTS):
            tokens = list(prompt)
            for _ in range(MAX_TOKENS):
                tokens.append(tiny_llama[1](torch.tensor([tokens]), use_cache=False).logits[0, -1].argmax().item())
            expected[i] = tokens[len(prompt) :]
    return expected


@pytest.mark.parametrize("caches", [True, False])
def test_greedy_tokens_equal_transformers_through_chunks_preemption_and_prefix_hits(
    tiny_llama: tuple[Path, Any], oracle: dict[int, list[int]], caches: bool
) -> None:
    params = [SamplingParams(temperature=0, max_tokens=MAX_TOKENS)] * len(PROMPTS)
    tokens, core = run(tiny_llama[0], params, make_config(enable_prefix_caching=caches))
    assert tokens == oracle
    assert core.stats().num_preemptions > 0
    assert (core.stats().prefix_cache_hits > 0) == caches


def test_seeded_tokens_are_the_same_with_a_small_pool_and_a_large_one(tiny_llama: tuple[Path, Any]) -> None:
    params = [SamplingParams(temperature=1.2, seed=i, max_tokens=MAX_TOKENS) for i in range(len(PROMPTS))]
    tight, core = run(tiny_llama[0], params, make_config())
    wide, _ = run(tiny_llama[0], params, make_config(num_gpu_blocks_override=400, max_num_batched_tokens=500))
    assert core.stats().num_preemptions > 0
    assert tight == wide


def test_no_stop_token_comes_before_min_tokens(tiny_llama: tuple[Path, Any], oracle: dict[int, list[int]]) -> None:
    early = oracle[3][0]
    params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, min_tokens=5, stop_token_ids=(early,))
    tokens, _ = run(tiny_llama[0], [params] * 4, make_config())
    assert early not in tokens[3][:5]


async def test_the_inline_executor_gives_what_the_runner_gives(
    tiny_llama: tuple[Path, Any], oracle: dict[int, list[int]]
) -> None:
    config = make_config()
    executor = InlineExecutor(lambda: ModelRunner(config, tiny_llama[0]))
    tokens: dict[int, list[int]] = {i: [] for i in range(3)}
    try:
        core = EngineCore(config, await executor.start(config, lambda *call: None))
        for i in range(3):
            core.add(make_request(i, SamplingParams(temperature=0, max_tokens=MAX_TOKENS)), now=0.0)
        while (plan := core.plan(trio.current_time())) is not None:
            execution = executor.execute(plan)
            execution.sample(core.grammar_masks(plan))
            core.commit(plan, await execution.result(), trio.current_time())
            for output in core.take_outputs():
                tokens[int(output.request_id)] += output.new_token_ids
    finally:
        await executor.aclose()
    assert tokens == {i: oracle[i] for i in range(3)}
