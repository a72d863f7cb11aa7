from __future__ import annotations

import numpy as np
import pytest
import torch

from engine.sampling.sampler import SamplingRow, sample
from engine.sampling_params import SamplingParams

torch.set_num_threads(1)


def row(position: int = 5, num_output_tokens: int = 0, **params: object) -> SamplingRow:
    return SamplingRow(SamplingParams(**params), position, num_output_tokens)  # type: ignore[arg-type]


def logits_of(num_rows: int, vocab_size: int = 300, seed: int = 0) -> torch.Tensor:
    return torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * 3


def test_greedy_takes_the_lowest_of_the_highest() -> None:
    logits = torch.tensor([[1.0, 5.0, 5.0, 2.0], [0.0, -1.0, -2.0, -3.0]])
    assert sample(logits, [row(temperature=0), row(temperature=0)]).token_ids == [1, 0]


PARAMS = [
    {"temperature": 0},
    {"temperature": 0.7, "seed": 1},
    {"temperature": 1.3, "top_p": 0.9, "seed": 2},
    {"temperature": 1.0, "top_k": 20, "seed": 3},
    {"temperature": 2.0, "min_p": 0.05, "seed": 4},
    {"temperature": 1.5, "top_k": 40, "top_p": 0.8, "min_p": 0.01, "seed": -5},
    {"temperature": 1.9, "top_p": 0.999, "seed": 2**64 - 1},
]


@pytest.mark.parametrize("num_threads", [1, 2])
def test_a_row_draws_the_same_token_alone_and_in_any_company(num_threads: int) -> None:
    torch.set_num_threads(num_threads)
    try:
        rows = [row(position=10 + i, **PARAMS[i % len(PARAMS)]) for i in range(28)]
        logits = logits_of(28, 40_000)
        together = sample(logits.clone(), rows).token_ids
        alone = [sample(logits[i : i + 1].clone(), [rows[i]]).token_ids[0] for i in range(28)]
        backwards = sample(logits.flip(0), rows[::-1]).token_ids[::-1]
    finally:
        torch.set_num_threads(1)
    assert together == alone == backwards


def test_draws_follow_the_probabilities() -> None:
    num = 8000
    logits = torch.tensor([[0.0, 1.0, 2.0, -1.0, 0.5, -torch.inf]]).expand(num, 6).clone()
    rows = [row(position=i, temperature=0.8, seed=99) for i in range(num)]
    counts = np.bincount(sample(logits, rows).token_ids, minlength=6)
    expected = torch.softmax(logits[0].double() / 0.8, dim=-1).numpy() * num
    assert counts[5] == 0
    assert ((counts[:5] - expected[:5]) ** 2 / expected[:5]).sum() < 28.5  # chi-square, 4 degrees: p = 1e-5


def test_min_p_comes_before_top_k_and_that_before_top_p() -> None:
    """Of 0.4, 0.3, 0.2, 0.1: min_p 0.3 leaves three; top_k 2 leaves 4/7 and 3/7; top_p 0.55 then leaves the first."""
    logits = torch.tensor([[0.4, 0.3, 0.2, 0.1]]).log()
    num = 400

    def drawn(**params: object) -> set[int]:
        rows = [row(position=i, seed=1, **params) for i in range(num)]
        return set(sample(logits.expand(num, 4).clone(), rows).token_ids)

    assert drawn(min_p=0.3) == {0, 1, 2}
    assert drawn(min_p=0.3, top_k=2) == {0, 1}
    assert drawn(min_p=0.3, top_k=2, top_p=0.55) == {0}
    assert drawn(top_p=0.55) == {0, 1}
    assert drawn(top_k=-1) == {0, 1, 2, 3}


def test_temperature_comes_before_the_filters() -> None:
    logits = torch.tensor([[2.0, 1.0]]).expand(400, 2).clone()
    cold = [row(position=i, seed=1, temperature=0.2, min_p=0.1) for i in range(400)]
    hot = [row(position=i, seed=1, temperature=2.0, min_p=0.1) for i in range(400)]
    assert set(sample(logits.clone(), cold).token_ids) == {0}
    assert set(sample(logits.clone(), hot).token_ids) == {0, 1}


@pytest.mark.parametrize(
    ("value", "kind", "words"),
    [
        (torch.nan, "BadLogits", "NaN"),
        (torch.inf, "BadLogits", "infinite"),
        (-torch.inf, "NoTokenAllowed", "no token is allowed"),
    ],
)
def test_a_row_of_bad_numbers_fails_alone(value: float, kind: str, words: str) -> None:
    logits = logits_of(3)
    alone = sample(logits[[0, 2]].clone(), [row(temperature=0), row(seed=4)]).token_ids
    if value == -torch.inf:
        logits[1] = value
    else:
        logits[1, 17] = value
    samples = sample(logits, [row(temperature=0), row(seed=1), row(seed=4)])
    assert [samples.token_ids[0], samples.token_ids[2]] == alone
    assert list(samples.failed) == [1]
    assert samples.failed[1].type == kind
    assert words in samples.failed[1].message


def test_no_end_token_is_drawn_before_min_tokens() -> None:
    logits = torch.tensor([[9.0, 8.0, 7.0, 1.0]])
    params = {"temperature": 0, "min_tokens": 3, "eos_token_ids": (0,), "stop_token_ids": (1, 500)}

    def token(num_output_tokens: int, **more: object) -> int:
        return sample(logits.clone(), [row(num_output_tokens=num_output_tokens, **params, **more)]).token_ids[0]

    assert [token(0), token(2), token(3)] == [2, 2, 0]
    assert token(0, ignore_eos=True) == 0


def test_a_grammar_mask_binds_its_row_and_one_that_allows_nothing_fails_alone() -> None:
    logits = logits_of(3, 64)
    masks = np.zeros((2, 2), dtype=np.int32)
    masks[0, 1] = 1 << 5
    samples = sample(logits.clone(), [row(seed=1), row(seed=2), row(seed=3)], [0, 2], masks)
    assert samples.token_ids[0] == 37
    assert samples.token_ids[1] == sample(logits[1:2].clone(), [row(seed=2)]).token_ids[0]
    assert list(samples.failed) == [2]


def test_named_tokens_are_told_in_place_of_the_likeliest_beside_rows_that_name_none() -> None:
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(3))
    expected = logits.log_softmax(-1)
    asked = [{"logprob_token_ids": [4, 40, 9]}, {"logprobs": 2}, {"logprob_token_ids": [7]}]
    rows = [SamplingRow(SamplingParams(temperature=0, **fields), 5, 1) for fields in asked]  # type: ignore[arg-type]
    samples = sample(logits.clone(), rows)
    for i, ids in enumerate(([4, 40, 9], expected[1].topk(2).indices.tolist(), [7])):
        told = samples.logprobs[i]
        assert told.token_ids.tolist() == [[samples.token_ids[i], *ids]]
        np.testing.assert_allclose(told.logprobs, expected[i, told.token_ids[0]].numpy()[None], rtol=1e-6)
        assert told.ranks.tolist() == [1]
