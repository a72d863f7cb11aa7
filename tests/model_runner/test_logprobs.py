"""Logprobs through core and runner against transformers: in chunks, preempted, beside others, with cached prompts.

On torch's operations and on those in C.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from engine.config import EngineConfig
from engine.core import EngineCore
from engine.model_runner.model_runner import ModelRunner
from engine.outputs import Logprobs, RequestId
from engine.protocol import EngineCoreRequest
from engine.sampling_params import SamplingParams
from tests.model_runner.conftest import Oracle

MAX_TOKENS = 10
SHARED = torch.randint(0, 199, (18,), generator=torch.Generator().manual_seed(77)).tolist()


def draw_prompt(i: int) -> list[int]:
    own = torch.randint(0, 199, (4 * i,), generator=torch.Generator().manual_seed(i)).tolist()
    return [*SHARED, *own][: max(1, 5 * i)]


PROMPTS = [draw_prompt(i) for i in range(10)]
PARAMS = [
    SamplingParams(
        temperature=0.9,
        seed=i,
        max_tokens=MAX_TOKENS,
        logprobs=(None, 0, 3, 20)[i % 4],
        prompt_logprobs=(None, 2, 0)[i % 3],
        repetition_penalty=1.5 if i % 2 else 1.0,
        frequency_penalty=0.7 if i % 5 == 1 else 0.0,
        logit_bias={i: 4.0} if i % 4 == 2 else {},
        bad_words_token_ids=((5, 6), (i,)) if i % 5 == 3 else (),
    )
    for i in range(len(PROMPTS))
]


class Result:
    """What one request got, over all its outputs."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.logprobs: list[Logprobs] = []
        self.prompt_logprobs: list[Logprobs] = []


def run(oracle: Oracle, which: list[int], **settings: Any) -> tuple[dict[int, Result], EngineCore]:
    fields = {"max_num_batched_tokens": 11, "max_num_seqs": 8, "max_model_len": 64, "num_threads": 1}
    config = EngineConfig(**(fields | {"num_gpu_blocks_override": 7} | oracle.settings | settings))
    runner = ModelRunner(config, oracle.folder)
    core = EngineCore(config, runner.start(lambda *call: None))
    for i in which:
        core.add(EngineCoreRequest(RequestId(str(i)), str(i), PROMPTS[i], PARAMS[i], arrival_time=0.0), now=0.0)
    results = {i: Result() for i in which}
    while core.has_work:
        plan = core.plan(0.0)
        assert plan is not None
        runner.execute(plan)
        core.commit(plan, runner.sample(), 0.0)
        core.check_invariants()
        for output in core.take_outputs():
            result = results[int(output.request_id)]
            result.token_ids += output.new_token_ids
            if output.logprobs is not None:
                assert len(output.logprobs) == len(output.new_token_ids)
                result.logprobs.append(output.logprobs)
            if output.prompt_logprobs is not None:
                result.prompt_logprobs.append(output.prompt_logprobs)
    return results, core


@pytest.fixture(scope="module")
def together(oracle: Oracle) -> tuple[dict[int, Result], EngineCore]:
    return run(oracle, list(range(len(PROMPTS))))


def assert_is(told: Logprobs, expected: torch.Tensor, token_ids: list[int], num_top: int) -> None:
    """Check against `expected [n, vocab_size]`, the logprobs by transformers."""
    assert told.token_ids.shape == told.logprobs.shape == (len(token_ids), 1 + num_top)
    assert told.token_ids[:, 0].tolist() == token_ids
    values = torch.from_numpy(told.logprobs)
    by_id = expected.gather(-1, torch.from_numpy(told.token_ids.astype(np.int64)))
    assert torch.allclose(values, by_id, rtol=0, atol=1e-4)
    assert torch.allclose(values[:, 1:], expected.topk(max(num_top, 1)).values[:, :num_top], rtol=0, atol=1e-4)
    ranks = (expected > by_id[:, :1]).sum(-1) + 1
    assert told.ranks.tolist() == ranks.tolist()


@torch.inference_mode()
def test_logprobs_are_those_of_transformers_before_every_parameter(
    oracle: Oracle, together: tuple[dict[int, Result], EngineCore]
) -> None:
    results, core = together
    assert core.stats().num_preemptions > 0
    assert core.stats().prefix_cache_hits > 0
    for i, (prompt, params) in enumerate(zip(PROMPTS, PARAMS, strict=True)):
        result = results[i]
        assert len(result.token_ids) == MAX_TOKENS
        logits = oracle.model(torch.tensor([prompt + result.token_ids]), use_cache=False).logits[0]
        expected = logits.log_softmax(-1)
        if params.logprobs is None:
            assert result.logprobs == []
        else:
            of_output = expected[len(prompt) - 1 : -1]
            assert_is(Logprobs.join(result.logprobs), of_output, result.token_ids, params.logprobs)
        if params.prompt_logprobs is None or len(prompt) == 1:
            assert result.prompt_logprobs == []
        else:
            (told,) = result.prompt_logprobs
            assert_is(told, expected[: len(prompt) - 1], prompt[1:], params.prompt_logprobs)


def test_each_request_gets_alone_what_it_gets_in_a_mixed_and_preempted_batch(
    oracle: Oracle, together: tuple[dict[int, Result], EngineCore]
) -> None:
    for i, result in together[0].items():
        alone = run(oracle, [i], max_num_batched_tokens=64)[0][i]
        assert alone.token_ids == result.token_ids
        for ours, theirs in ((result.logprobs, alone.logprobs), (result.prompt_logprobs, alone.prompt_logprobs)):
            if not theirs:
                assert not ours
                continue
            told, expected = Logprobs.join(ours), Logprobs.join(theirs)
            assert np.array_equal(told.token_ids, expected.token_ids)
            assert np.array_equal(told.ranks, expected.ranks)
            assert np.abs(told.logprobs - expected.logprobs).max() < 1e-5
