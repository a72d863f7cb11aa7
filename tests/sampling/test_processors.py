from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.sampling import processors

torch.set_num_threads(1)


def probabilities_of(seed: int, num_rows: int = 3, vocab_size: int = 50) -> torch.Tensor:
    logits = torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * 2
    return torch.softmax(logits, dim=-1)


def kept(probabilities: torch.Tensor) -> list[set[int]]:
    return [set(torch.nonzero(row).flatten().tolist()) for row in probabilities]


@given(st.integers(0, 10_000), st.integers(1, 60))
@settings(max_examples=40, deadline=None)
def test_top_k_keeps_the_k_most_likely(seed: int, top_k: int) -> None:
    probabilities = probabilities_of(seed)
    best = [set(row.argsort(descending=True)[:top_k].tolist()) for row in probabilities]
    assert kept(processors.keep_top_k(probabilities, torch.tensor([top_k] * 3))) == best


def test_top_k_keeps_all_that_tie_with_the_last() -> None:
    probabilities = torch.tensor([[0.1, 0.3, 0.1, 0.4, 0.1]])
    assert kept(processors.keep_top_k(probabilities, torch.tensor([3]))) == [{0, 1, 2, 3, 4}]
    assert kept(processors.keep_top_k(probabilities, torch.tensor([2]))) == [{1, 3}]


@given(st.integers(0, 10_000), st.floats(0.01, 0.999))
@settings(max_examples=40, deadline=None)
def test_top_p_keeps_the_smallest_set_that_reaches_p(seed: int, top_p: float) -> None:
    probabilities = probabilities_of(seed)
    share = torch.tensor([top_p] * 3, dtype=torch.float64)
    for row, indexes in zip(probabilities.double(), kept(processors.keep_top_p(probabilities, share)), strict=True):
        order = row.argsort(descending=True).tolist()
        assert indexes == set(order[: len(indexes)])
        wanted = row.sum().item() * top_p
        assert row[order[: len(indexes)]].sum().item() >= wanted - 1e-9
        assert row[order[: len(indexes) - 1]].sum().item() <= wanted + 1e-9


def test_top_p_of_a_wide_row_equals_that_of_a_sort(monkeypatch: pytest.MonkeyPatch) -> None:
    probabilities = torch.cat((probabilities_of(1, 2, 400), torch.full((1, 400), 1 / 400)))
    share = torch.tensor([0.2, 0.9999, 0.7], dtype=torch.float64)
    whole = processors.keep_top_p(probabilities, share)
    monkeypatch.setattr(processors, "SORTED_HEADS", (4, 8))
    assert torch.equal(processors.keep_top_p(probabilities, share), whole)


@given(st.integers(0, 10_000), st.floats(0, 1))
@settings(max_examples=40, deadline=None)
def test_min_p_drops_what_is_less_likely_than_a_share_of_the_best(seed: int, min_p: float) -> None:
    probabilities = probabilities_of(seed)
    expected = [
        {i for i, p in enumerate(row.tolist()) if p >= (row.max() * torch.tensor(min_p)).item()}
        for row in probabilities
    ]
    assert kept(processors.keep_min_p(probabilities, torch.tensor([min_p] * 3))) == expected


def test_temperature_scales_below_the_highest() -> None:
    logits = torch.tensor([[1.0, 3.0, -torch.inf], [1e38, -1e38, 0.0]])
    scaled = processors.scale_by_temperature(logits, torch.tensor([2.0, 1e-5]))
    assert scaled[0].tolist() == [-1.0, 0.0, -torch.inf]
    assert torch.softmax(scaled, -1)[1].tolist() == [1.0, 0.0, 0.0]


def test_a_grammar_mask_forbids_all_but_its_bits() -> None:
    allowed = np.zeros((1, 64), dtype=np.uint8)
    allowed[0, [0, 31, 32, 39]] = 1
    masks = np.packbits(allowed, axis=1, bitorder="little").view(np.int32)
    logits = torch.zeros(3, 40)
    processors.apply_grammar_masks(logits, [1], masks)
    assert torch.nonzero(logits[1] == 0).flatten().tolist() == [0, 31, 32, 39]
    assert (logits[[0, 2]] == 0).all()


@pytest.mark.parametrize("rows", [[0, 1, 2], [3, 1], []])
def test_a_grammar_mask_leaves_every_other_bit_as_it_was(rows: list[int]) -> None:
    draw = np.random.default_rng(5)
    masks = draw.integers(-(2**31), 2**31, (len(rows), 4), dtype=np.int32)
    logits = torch.from_numpy(draw.standard_normal((4, 101), dtype=np.float32))
    logits[:, :40] = torch.tensor([-0.0, 0.0, torch.inf, -torch.inf, 1e-45] * 8)
    expected = logits.clone()
    for row, mask in zip(rows, masks, strict=True):
        for token in range(101):
            if not int(mask[token // 32]) >> token % 32 & 1:
                expected[row, token] = -torch.inf
    processors.apply_grammar_masks(logits, rows, masks)
    assert torch.equal(logits.view(torch.int32), expected.view(torch.int32))


def test_a_number_that_is_none_stays_one_under_a_mask_that_allows_it() -> None:
    logits = torch.full((1, 32), torch.nan)
    processors.apply_grammar_masks(logits, [0], np.full((1, 1), -1, dtype=np.int32))
    assert logits.isnan().all()


def test_uniforms_are_a_function_of_seed_and_position() -> None:
    seeds, positions = [3, -1, 2**64 - 1, 3, 0], [7, 5, 5, 8, 0]
    together = processors.uniforms(seeds, positions)
    apart = [processors.uniforms([s], [p])[0] for s, p in zip(seeds, positions, strict=True)]
    assert together.tolist() == apart
    assert together[1] == together[2]
    assert len(set(together.tolist())) == 4
    # The generator is part of the promise that a seed gives the same text: these values must never change.
    assert processors.uniforms([0, 1], [0, 1]).tolist() == [0.6524484863740321, 0.9435642308648544]


def test_uniforms_are_even_and_unrelated_over_positions_and_seeds() -> None:
    num = 4096
    by_position = processors.uniforms([12345] * num, range(num))
    by_seed = processors.uniforms(range(num), [17] * num)
    for numbers in (by_position, by_seed):
        assert ((numbers >= 0) & (numbers < 1)).all()
        counts = np.bincount((numbers * 64).astype(int), minlength=64)
        assert ((counts - num / 64) ** 2 / (num / 64)).sum() < 120  # chi-square, 63 degrees: p = 1e-5
        assert abs(np.corrcoef(numbers[:-1], numbers[1:])[0, 1]) < 0.07  # 4.4 standard deviations
    assert abs(np.corrcoef(by_position, by_seed)[0, 1]) < 0.07


def test_a_draw_never_takes_what_has_no_probability() -> None:
    probabilities = torch.tensor([[0.0, 2.0, 0.0, 6.0, 0.0]]).expand(5, 5)
    uniform = torch.tensor([0.0, 0.2, 0.25, 0.9, 1 - 2.0**-52], dtype=torch.float64)
    assert processors.draw(probabilities, uniform).tolist() == [1, 1, 3, 3, 3]


@pytest.mark.parametrize("width", [5, 64, 1300, 1400, 4999])
def test_the_likeliest_are_found_without_sorting_all(width: int) -> None:
    drawn = torch.randn(7, width, generator=torch.Generator().manual_seed(width))
    drawn[1] = drawn[1].round()  # many equals
    drawn[2, ::3] = -torch.inf
    drawn[3] = 0.0
    drawn[4] = drawn[4].sort().values  # all of them in few blocks, or one in each
    drawn[5] = drawn[5].sort(descending=True).values
    places = processors.likeliest(drawn, 20)
    assert torch.equal(drawn.gather(-1, places), drawn.topk(min(20, width), dim=-1).values)
    assert all(len(set(row)) == len(row) for row in places.tolist())
    for i in range(7):
        assert torch.equal(processors.likeliest(drawn[i : i + 1], 20)[0], places[i])


def test_ranks_are_told_of_tokens_among_the_likeliest_and_beyond() -> None:
    logprobs = torch.randn(40, 3000, generator=torch.Generator().manual_seed(1)).log_softmax(-1)
    order = logprobs.argsort(dim=-1, descending=True)
    wanted = [*range(35), 100, 500, 1000, 2000, 2999]
    told = processors.gather_logprobs(logprobs, order[range(40), wanted])
    assert told.ranks.tolist() == [rank + 1 for rank in wanted]
    assert told.token_ids[:, 1:].tolist() == order[:, :20].tolist()
    alone = [processors.gather_logprobs(logprobs[i : i + 1], order[i, wanted[i], None]) for i in range(40)]
    assert (np.concatenate([row.logprobs for row in alone]) == told.logprobs).all()
    np.testing.assert_allclose(told.logprobs, logprobs.gather(-1, torch.tensor(told.token_ids).long()), rtol=1e-6)
    named = processors.gather_logprobs(logprobs, order[range(40), wanted], torch.arange(80).view(40, 2))
    assert (named.ranks == told.ranks).all()
    assert named.token_ids[:, 1:].tolist() == torch.arange(80).view(40, 2).tolist()


@pytest.mark.parametrize("width", [5, 256, 49_152, 49_159])
def test_a_draw_by_blocks_is_one_by_running_sums_the_same_alone_and_in_any_number_of_threads(width: int) -> None:
    probabilities = torch.softmax(torch.randn(9, width, generator=torch.Generator().manual_seed(width)) * 4, dim=-1)
    probabilities[3, 1:] = 0.0
    probabilities[4, : width - 1] = 0.0
    probabilities[5] = probabilities[5].masked_fill(probabilities[5] < probabilities[5].amax() / 9, 0.0)
    draw = torch.Generator().manual_seed(1)
    uniforms = [torch.zeros(9), torch.full((9,), 1 - 2.0**-52, dtype=torch.float64)]
    uniforms += [torch.rand(9, generator=draw, dtype=torch.float64) for _ in range(10)]
    for uniform in uniforms:
        uniform = uniform.double()
        token_ids = processors.draw(probabilities, uniform)
        assert (probabilities.gather(-1, token_ids[:, None]) > 0).all()
        sums = processors.running_sums(probabilities)
        target = sums[:, -1] * uniform
        upper = sums.gather(-1, token_ids[:, None])[:, 0]
        lower = upper - probabilities.gather(-1, token_ids[:, None])[:, 0]
        assert ((lower <= target + 1e-6) & (target - 1e-6 <= upper)).all()
        alone = [processors.draw(probabilities[i : i + 1], uniform[i : i + 1]) for i in range(9)]
        assert torch.equal(torch.cat(alone), token_ids)
        torch.set_num_threads(2)
        assert torch.equal(processors.draw(probabilities, uniform), token_ids)
        assert torch.equal(processors.draw(probabilities[:1], uniform[:1]), token_ids[:1])
        torch.set_num_threads(1)
