"""Each processor against transformers' own, over drawn parameters; a row in a batch gets what it gets alone."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
import transformers

from engine.sampling.sampler import SamplingRow, process, restricted_probabilities, sample
from engine.sampling_params import SamplingParams

torch.set_num_threads(1)
VOCAB_SIZE, NUM_PROMPT = 60, 7


def logits_of(num_rows: int, seed: int) -> torch.Tensor:
    return torch.randn(num_rows, VOCAB_SIZE, generator=torch.Generator().manual_seed(seed)) * 3


def row(tokens: list[int], **params: object) -> SamplingRow:
    resolved = SamplingParams(**params)  # type: ignore[arg-type]
    return SamplingRow(resolved, len(tokens), len(tokens) - NUM_PROMPT, np.array(tokens, dtype=np.int32))


def draw_tokens(rng: random.Random) -> list[int]:
    return [rng.randrange(20) for _ in range(NUM_PROMPT + rng.randrange(25))]


def draw_params(rng: random.Random, kind: str, tokens: list[int]) -> dict[str, object]:
    output = tokens[NUM_PROMPT:]
    if kind == "bad_words":
        words = [(*output[max(0, len(output) - n) :], rng.randrange(VOCAB_SIZE)) for n in range(4)]
        return {"bad_words_token_ids": (*words, (1, 2, 3, 4, 5))}
    return {
        "repetition": {"repetition_penalty": rng.choice([0.5, 1.2, 1.7])},
        "presence": {"presence_penalty": rng.uniform(-2, 2)},
        "frequency": {"frequency_penalty": rng.uniform(-2, 2)},
        "bias": {"logit_bias": {rng.randrange(VOCAB_SIZE): rng.uniform(-9, 9) for _ in range(5)}},
        "allowed": {"allowed_token_ids": [rng.randrange(VOCAB_SIZE) for _ in range(6)]},
        "min_tokens": {"min_tokens": 10, "stop_token_ids": [3, 4], "eos_token_ids": (5,)},
    }[kind]


def by_transformers(logits: torch.Tensor, drawn: SamplingRow) -> torch.Tensor:
    """Process one row as transformers does, or by the formula where it has none."""
    params, tokens = drawn.params, torch.from_numpy(drawn.tokens.astype(np.int64))[None]
    output = drawn.tokens[NUM_PROMPT:].tolist()
    scores = logits.clone()
    if params.allowed_token_ids is not None:
        allowed = lambda _batch, _tokens: list(params.allowed_token_ids)  # noqa: E731
        scores = transformers.PrefixConstrainedLogitsProcessor(allowed, 1)(tokens, scores)
    if params.bad_words_token_ids:
        words = [list(word) for word in params.bad_words_token_ids]
        scores = transformers.NoBadWordsLogitsProcessor(words, eos_token_id=-1)(tokens[:, NUM_PROMPT:], scores)
    if params.min_tokens:
        ends = [*params.stop_token_ids, *params.eos_token_ids]
        least = transformers.MinNewTokensLengthLogitsProcessor(NUM_PROMPT, params.min_tokens, ends)
        scores = least(tokens, scores)
    if params.logit_bias:
        bias = {(token_id,): value for token_id, value in params.logit_bias.items()}
        scores = transformers.SequenceBiasLogitsProcessor(bias)(tokens, scores)
    if params.repetition_penalty != 1:
        scores = transformers.RepetitionPenaltyLogitsProcessor(params.repetition_penalty)(tokens, scores)
    for token_id in range(VOCAB_SIZE):
        scores[0, token_id] -= params.frequency_penalty * output.count(token_id)
        scores[0, token_id] -= params.presence_penalty * (token_id in output)
    return scores


KINDS = ("repetition", "presence", "frequency", "bias", "allowed", "bad_words", "min_tokens")


@pytest.mark.parametrize("kind", KINDS)
def test_each_processor_gives_the_distribution_of_transformers(kind: str) -> None:
    rng = random.Random(kind)
    for number in range(50):
        tokens = draw_tokens(rng)
        drawn = row(tokens, **draw_params(rng, kind, tokens))
        logits = logits_of(1, number)
        expected = by_transformers(logits, drawn).log_softmax(-1)
        process(logits, [drawn])
        assert torch.allclose(logits.log_softmax(-1), expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("kind", ["temperature", "top_k", "top_p", "min_p"])
def test_each_filter_gives_the_distribution_of_transformers(kind: str) -> None:
    rng = random.Random(kind)
    for number in range(50):
        temperature = rng.uniform(0.2, 2)
        value = {"temperature": 0, "top_k": rng.randrange(1, 60)}.get(kind, rng.uniform(0.05, 0.95))
        params = SamplingParams(temperature=temperature, **({} if kind == "temperature" else {kind: value}))
        logits = logits_of(1, number)
        scores = transformers.TemperatureLogitsWarper(temperature)(None, logits)
        if kind != "temperature":
            warpers = {
                "top_k": transformers.TopKLogitsWarper,
                "top_p": transformers.TopPLogitsWarper,
                "min_p": transformers.MinPLogitsWarper,
            }
            scores = warpers[kind](value)(None, scores)
        probabilities = restricted_probabilities(logits, [params])
        ours = (probabilities / probabilities.sum()).log()
        assert torch.allclose(ours, scores.log_softmax(-1), rtol=0, atol=1e-4)


def test_all_processors_together_keep_their_order() -> None:
    rng = random.Random(1)
    for number in range(50):
        tokens = draw_tokens(rng)
        params: dict[str, object] = {}
        for kind in KINDS:
            if kind != "allowed":
                params |= draw_params(rng, kind, tokens)
        drawn = row(tokens, **params)
        logits = logits_of(1, number)
        expected = by_transformers(logits, drawn).log_softmax(-1)
        process(logits, [drawn])
        assert torch.allclose(logits.log_softmax(-1), expected, rtol=0, atol=1e-4)


def test_a_row_gets_in_a_batch_bit_for_bit_what_it_gets_alone_and_one_that_asks_nothing_is_untouched() -> None:
    rng = random.Random(2)
    for number in range(20):
        rows = []
        for kind in (*KINDS, "none", *KINDS):
            tokens = draw_tokens(rng)
            params = {} if kind == "none" else draw_params(rng, kind, tokens)
            rows.append(row(tokens, seed=number, temperature=rng.choice([0, 0.8]), **params))
        logits = logits_of(len(rows), number)
        together = logits.clone()
        process(together, rows)
        assert torch.equal(together[len(KINDS)], logits[len(KINDS)])
        for i, drawn in enumerate(rows):
            alone = logits[i : i + 1].clone()
            process(alone, [drawn])
            assert torch.equal(alone[0], together[i])
        tokens = [sample(logits[i : i + 1].clone(), [drawn]).token_ids[0] for i, drawn in enumerate(rows)]
        assert sample(logits.clone(), rows).token_ids == tokens


def test_a_bad_word_is_looked_for_in_the_output_alone() -> None:
    prompt = [1] * (NUM_PROMPT - 1) + [8]
    logits = logits_of(2, 0)
    params = {"bad_words_token_ids": ((8, 9),)}
    process(logits, [row(prompt, **params), row([*prompt, 8], **params)])
    assert (logits[:, 9] == -torch.inf).tolist() == [False, True]


def test_a_row_that_may_draw_nothing_fails_alone_and_ids_without_a_logit_have_no_effect() -> None:
    tokens = [1] * NUM_PROMPT
    logits = logits_of(3, 1)
    rows = [
        row(tokens, allowed_token_ids=[7], bad_words_token_ids=((7,),)),
        row(tokens, allowed_token_ids=[9, 5000], logit_bias={5000: 3.0, 9: 1.0}),
        row(tokens, allowed_token_ids=[5000]),
    ]
    samples = sample(logits, rows)
    assert samples.token_ids[1] == 9
    assert {i: cause.type for i, cause in samples.failed.items()} == {0: "NoTokenAllowed", 2: "NoTokenAllowed"}
