"""What core and runner draw from, against transformers on the same weights: 50 drawn parameter sets in one batch.

On torch's operations and on those in C.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from engine.config import EngineConfig
from engine.core import EngineCore
from engine.model_runner.model_runner import ModelRunner
from engine.outputs import FinishReason, RequestId
from engine.protocol import EngineCoreRequest
from engine.sampling import sampler
from engine.sampling_params import SamplingParams
from tests.model_runner.conftest import Oracle

VOCAB_SIZE, MAX_TOKENS = 199, 8
MAX_ERROR = 1e-4
DRAWS: dict[str, Callable[[random.Random], dict[str, Any]]] = {
    "temperature": lambda draw: {"temperature": draw.uniform(0.4, 2)},
    "top_k": lambda draw: {"top_k": draw.randrange(2, 150)},
    "top_p": lambda draw: {"top_p": draw.uniform(0.2, 0.99)},
    "min_p": lambda draw: {"min_p": draw.uniform(0.01, 0.4)},
    "repetition": lambda draw: {"repetition_penalty": draw.choice([0.7, 1.2, 1.8])},
    "frequency": lambda draw: {"frequency_penalty": draw.uniform(-2, 2)},
    "presence": lambda draw: {"presence_penalty": draw.uniform(-2, 2)},
    "bias": lambda draw: {"logit_bias": {draw.randrange(VOCAB_SIZE): draw.uniform(-9, 9) for _ in range(6)}},
    "allowed": lambda draw: {"allowed_token_ids": draw.sample(range(VOCAB_SIZE), 90)},
    "bad_words": lambda draw: {"bad_words_token_ids": ((9,), *((i, draw.randrange(40)) for i in range(150)))},
    "stop": lambda draw: {"stop_token_ids": draw.sample(range(VOCAB_SIZE), 30)},
    "min_tokens": lambda draw: {"min_tokens": 5, "eos_token_ids": (3, 4), "stop_token_ids": list(range(60))},
    "greedy": lambda draw: {"temperature": 0.0},
}


def draw_params(number: int) -> SamplingParams:
    """Each parameter alone at first, then several together."""
    draw = random.Random(number)
    names = list(DRAWS)
    kinds = [names[number]] if number < len(names) else draw.sample(names, draw.randrange(2, 9))
    fields: dict[str, Any] = {}
    for kind in kinds:
        fields |= DRAWS[kind](draw)
    return SamplingParams(seed=1000 + number, max_tokens=MAX_TOKENS, **fields)


def draw_prompt(number: int) -> list[int]:
    draw = random.Random(-1 - number)
    return [draw.randrange(VOCAB_SIZE) for _ in range(draw.randrange(1, 20))]


PARAMS = [draw_params(number) for number in range(50)]
PROMPTS = [draw_prompt(number) for number in range(50)]


def generate(
    oracle: Oracle, prompts: Sequence[list[int]], params: Sequence[SamplingParams], **settings: Any
) -> tuple[list[list[int]], list[FinishReason | None]]:
    """Return the tokens and finish reasons of all prompts, run together."""
    fields = {"num_threads": 1, "max_model_len": 64, "num_gpu_blocks_override": 600} | oracle.settings | settings
    config = EngineConfig(**fields)
    runner = ModelRunner(config, oracle.folder)
    core = EngineCore(config, runner.start(lambda *call: None))
    for i, (prompt, its_params) in enumerate(zip(prompts, params, strict=True)):
        core.add(EngineCoreRequest(RequestId(str(i)), str(i), prompt, its_params, arrival_time=0.0), now=0.0)
    token_ids: list[list[int]] = [[] for _ in prompts]
    reasons: list[FinishReason | None] = [None] * len(prompts)
    while core.has_work:
        plan = core.plan(0.0)
        assert plan is not None
        runner.execute(plan)
        core.commit(plan, runner.sample(), 0.0)
        for output in core.take_outputs():
            token_ids[int(output.request_id)] += output.new_token_ids
            reasons[int(output.request_id)] = output.finish_reason
    return token_ids, reasons


def by_transformers(logits: torch.Tensor, prompt: list[int], output: list[int], params: SamplingParams) -> torch.Tensor:
    """Return the masked, scaled scores `[1, vocab_size]` by transformers, and OpenAI's formula of penalties."""
    scores, written = logits[None].clone(), torch.tensor([output], dtype=torch.int64)
    tokens = torch.tensor([prompt + output])
    if params.allowed_token_ids is not None:
        allowed = list(params.allowed_token_ids)
        scores = transformers.PrefixConstrainedLogitsProcessor(lambda *_: allowed, 1)(tokens, scores)
    if params.bad_words_token_ids:  # they are looked for in the output
        words = [list(word) for word in params.bad_words_token_ids]
        scores = transformers.NoBadWordsLogitsProcessor(words, eos_token_id=-1)(written, scores)
    rest = transformers.LogitsProcessorList()
    if params.min_tokens:
        ends = [*params.stop_token_ids, *params.eos_token_ids]
        rest.append(transformers.MinNewTokensLengthLogitsProcessor(len(prompt), params.min_tokens, ends))
    if params.logit_bias:
        rest.append(transformers.SequenceBiasLogitsProcessor({(i,): bias for i, bias in params.logit_bias.items()}))
    if params.repetition_penalty != 1:
        rest.append(transformers.RepetitionPenaltyLogitsProcessor(params.repetition_penalty))
    scores = rest(tokens, scores)
    for token_id, count in Counter(output).items():
        scores[0, token_id] -= params.frequency_penalty * count + params.presence_penalty
    if params.is_greedy:
        return scores
    warpers = transformers.LogitsProcessorList([transformers.TemperatureLogitsWarper(params.temperature)])
    if params.min_p:
        warpers.append(transformers.MinPLogitsWarper(params.min_p))
    if params.top_k:
        warpers.append(transformers.TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        warpers.append(transformers.TopPLogitsWarper(params.top_p))
    return warpers(tokens, scores)


class Drawn:
    """Keeps what rows are drawn from, by seed and position."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log: dict[tuple[int | None, int], torch.Tensor] = {}
        self._draw, self._restrict = sampler._draw, sampler.restricted_probabilities
        monkeypatch.setattr(sampler, "_draw", self._look)

    def _look(self, logits: torch.Tensor, rows: Sequence[sampler.SamplingRow]) -> torch.Tensor:
        probabilities = self._restrict(logits, [row.params for row in rows]).double()
        for row, of_row in zip(rows, probabilities / probabilities.sum(dim=-1, keepdim=True), strict=True):
            self.log[row.params.seed, row.position] = of_row.log()
        return self._draw(logits, rows)


@torch.inference_mode()
def test_every_draw_is_from_the_distribution_of_transformers(oracle: Oracle, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = Drawn(monkeypatch)
    outputs, reasons = generate(oracle, PROMPTS, PARAMS, max_num_seqs=24, max_num_batched_tokens=64)
    num_compared, num_greedy, worst = 0, 0, 0.0
    for prompt, params, output in zip(PROMPTS, PARAMS, outputs, strict=True):
        all_logits = oracle.model(torch.tensor([prompt + output]), use_cache=False).logits[0]
        for i, token_id in enumerate(output):
            position = len(prompt) + i
            scores = by_transformers(all_logits[position - 1], prompt, output[:i], params)[0]
            if params.is_greedy:
                num_greedy += 1
                assert token_id == int(scores.argmax())
                continue
            expected, ours = scores.double().log_softmax(-1), drawn.log[params.seed, position]
            assert torch.equal(ours == -torch.inf, expected == -torch.inf), params
            kept = expected > -torch.inf
            assert kept[token_id]
            worst = max(worst, float((ours - expected)[kept].abs().max()))
            num_compared += 1
    assert worst <= MAX_ERROR
    assert num_compared > 250
    assert num_greedy >= 3 * MAX_TOKENS
    assert {FinishReason.STOP, FinishReason.LENGTH} == set(reasons)


def test_outputs_end_at_the_first_end_token_that_may_end_them(oracle: Oracle) -> None:
    outputs, reasons = generate(oracle, PROMPTS, PARAMS, max_num_seqs=50)
    for params, output, reason in zip(PARAMS, outputs, reasons, strict=True):
        ends = {*params.stop_token_ids, *params.eos_token_ids}
        assert not ends & set(output[:-1])
        is_stopped = output[-1] in ends
        assert reason == (FinishReason.STOP if is_stopped else FinishReason.LENGTH)
        assert len(output) == MAX_TOKENS or (is_stopped and len(output) > params.min_tokens)


@torch.inference_mode()
def test_frequencies_of_many_seeds_follow_the_distribution_of_transformers(oracle: Oracle) -> None:
    num_draws, prompt = 1500, [17, 5, 101]
    fields = {"temperature": 1.3, "top_k": 12, "repetition_penalty": 1.4, "logit_bias": {8: 1.0}, "max_tokens": 1}
    params = [SamplingParams(seed=seed, **fields) for seed in range(num_draws)]
    outputs, _ = generate(oracle, [prompt] * num_draws, params, max_num_seqs=512)
    counts = np.bincount([output[0] for output in outputs], minlength=VOCAB_SIZE)
    logits = oracle.model(torch.tensor([prompt]), use_cache=False).logits[0, -1]
    expected = num_draws * by_transformers(logits, prompt, [], params[0])[0].double().softmax(-1).numpy()
    kept = expected > 0
    assert kept.sum() == 12
    assert expected[kept].min() > 5
    assert counts[~kept].sum() == 0
    assert ((counts - expected)[kept] ** 2 / expected[kept]).sum() < 37.4  # chi-square, 11 degrees: p = 1e-4
