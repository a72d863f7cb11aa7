"""Every family through core and runner: greedy tokens are those of transformers, however the core cuts its steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from engine.config import EngineConfig, Kernels
from engine.core import EngineCore
from engine.kv_cache.spec import max_blocks_for
from engine.model_runner.model_runner import ModelRunner
from engine.outputs import Capacity, RequestId
from engine.protocol import EngineCoreRequest
from engine.sampling_params import SamplingParams
from tests.models.conftest import DENSE, wide

MAX_MODEL_LEN = 64
MAX_TOKENS = 6
BLOCK_SIZE = 4


def draw_prompt(length: int, seed: int) -> list[int]:
    return torch.randint(0, 199, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


PROMPTS = {str(i): draw_prompt(34 + 2 * i, seed=i) for i in range(8)}
PROMPTS["7"] = PROMPTS["3"][:30] + PROMPTS["7"][:12]
PARAMS = SamplingParams(temperature=0, max_tokens=MAX_TOKENS)


def make_core(capacity: Capacity, **settings: Any) -> EngineCore:
    fields = {"max_model_len": MAX_MODEL_LEN, "max_num_seqs": 8, "block_size": capacity.block_size}
    return EngineCore(EngineConfig(**(fields | settings)), capacity)


def run(
    runner: ModelRunner, core: EngineCore, prompts: dict[str, list[int]], preempts_at: int | None = None
) -> dict[str, list[int]]:
    """Generate for all prompts; in the step `preempts_at` whoever runs is preempted and nothing stays cached."""
    for name, prompt in prompts.items():
        core.add(EngineCoreRequest(RequestId(name), name, prompt, PARAMS, arrival_time=0.0), now=0.0)
    tokens: dict[str, list[int]] = {name: [] for name in prompts}
    num_steps = 0
    while core.has_work:
        num_steps += 1
        if num_steps == preempts_at:
            assert core.reset_prefix_cache(reset_running=True)
        plan = core.plan(0.0)
        assert plan is not None
        runner.execute(plan)
        core.commit(plan, runner.sample(), 0.0)
        for output in core.take_outputs():
            tokens[output.request_id] += output.new_token_ids
    core.check_invariants()
    return tokens


@torch.inference_mode()
def is_greedy(model: Any, prompt: list[int], generated: list[int]) -> bool:
    """Tell whether transformers, given each beginning, would go on with the next generated token."""
    logits = model(torch.tensor([prompt + generated]), use_cache=False).logits[0]
    return logits[len(prompt) - 1 : -1].argmax(-1).tolist() == generated


@pytest.mark.slow
def test_greedy_tokens_are_those_of_transformers_however_the_core_cuts_its_steps(
    family: str, make_checkpoint: Any
) -> None:
    folder, model = make_checkpoint(family)
    check_every_cut(folder, model, kernels="torch", block_size=BLOCK_SIZE)


@pytest.mark.slow
@pytest.mark.parametrize("dense", DENSE)
def test_so_they_are_on_the_operations_in_c(dense: str, make_checkpoint: Any) -> None:
    folder, model = make_checkpoint(dense, **wide(dense))
    check_every_cut(folder, model, kernels="compiled", block_size=16)


def check_every_cut(folder: Path, model: Any, *, kernels: Kernels, block_size: int) -> None:
    """Check tokens in a batch, alone, in chunks, preempted, in little memory and with prefix hits."""
    config = EngineConfig(
        num_threads=1,
        num_gpu_blocks_override=800,
        block_size=block_size,
        max_model_len=MAX_MODEL_LEN,
        kernels=kernels,
    )
    runner = ModelRunner(config, folder)
    capacity = runner.start(lambda *call: None)

    uncached = make_core(capacity, max_num_batched_tokens=500, enable_prefix_caching=False)
    expected = run(runner, uncached, PROMPTS)
    assert all(is_greedy(model, PROMPTS[name], tokens) for name, tokens in expected.items())

    assert run(runner, make_core(capacity), {"3": PROMPTS["3"]})["3"] == expected["3"]
    assert run(runner, make_core(capacity, long_prefill_token_threshold=5), PROMPTS) == expected

    preempting = make_core(capacity, max_num_batched_tokens=40)
    assert run(runner, preempting, PROMPTS, preempts_at=9) == expected
    assert preempting.stats().num_preemptions > 0

    least = max_blocks_for(capacity.kv_cache_groups, MAX_MODEL_LEN, block_size, 16)
    tight = make_core(msgspec.structs.replace(capacity, num_kv_blocks=1 + 2 * least), max_num_batched_tokens=16)
    assert run(runner, tight, PROMPTS) == expected

    hitting = make_core(capacity)
    run(runner, hitting, {"3": PROMPTS["3"]})
    assert run(runner, hitting, {"7": PROMPTS["7"]})["7"] == expected["7"]
    assert hitting.stats().prefix_cache_hits > 0
