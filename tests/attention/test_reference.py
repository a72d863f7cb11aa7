from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from engine.attention import reference
from engine.attention.base import AttentionBatch, RequestRows
from engine.attention.reference import KEY_TILE, ReferenceAttention
from engine.kv_cache.spec import NULL_BLOCK, KVCacheSpec

torch.set_num_threads(1)
HEAD_DIM = 32


class Sequence:
    """One request's whole q, k, v and its blocks."""

    def __init__(self, length: int, num_heads: int, num_kv_heads: int, blocks: np.ndarray, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.q = torch.randn(length, num_heads, HEAD_DIM, generator=generator)
        self.k = torch.randn(length, num_kv_heads, HEAD_DIM, generator=generator)
        self.v = torch.randn(length, num_kv_heads, HEAD_DIM, generator=generator)
        self.blocks = blocks


def make_backend(num_heads: int, num_kv_heads: int, num_blocks: int = 200, block_size: int = 4) -> ReferenceAttention:
    spec = KVCacheSpec(num_layers=1, num_kv_heads=num_kv_heads, head_dim=HEAD_DIM, item_size_bytes=4)
    return ReferenceAttention(spec, spec.groups(10**6), num_heads, num_blocks, block_size, torch.float32)


def run(
    backend: ReferenceAttention,
    parts: list[tuple[Sequence, int, int]],
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> list[torch.Tensor]:
    """Attend with (sequence, start, end) rows of each in one step."""
    rows, first = [], 0
    for sequence, start, end in parts:
        rows.append(RequestRows(first, end - start, start, [sequence.blocks]))
        first += end - start
    batch = backend.prepare(AttentionBatch(rows))
    q, k, v = (torch.cat([getattr(s, name)[a:b] for s, a, b in parts]) for name in "qkv")
    out = backend.attend(0, q, k, v, HEAD_DIM**-0.5, window, softcap, sinks, batch)
    return list(out.split([end - start for _, start, end in parts]))


def expected(sequence: Sequence, window: int | None = None) -> torch.Tensor:
    length = len(sequence.q)
    distance = torch.arange(length)[:, None] - torch.arange(length)
    visible = (distance >= 0) & (distance < (window or length))
    q, k, v = (part.transpose(0, 1)[None] for part in (sequence.q, sequence.k, sequence.v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=visible, enable_gqa=True)[0].transpose(0, 1)


def exact_attention(
    sequence: Sequence, window: int | None, softcap: float | None, sinks: torch.Tensor | None
) -> torch.Tensor:
    """Attend in float64, every step written out."""
    length, num_heads, _ = sequence.q.shape
    group = num_heads // sequence.k.shape[1]
    q, k, v = sequence.q.double(), sequence.k.double(), sequence.v.double()
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    scores = torch.einsum("qhd,khd->hqk", q, k) * HEAD_DIM**-0.5
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    distance = torch.arange(length)[:, None] - torch.arange(length)
    weights = scores.masked_fill((distance < 0) | (distance >= (window or length)), -torch.inf).exp()
    total = weights.sum(-1, keepdim=True)
    if sinks is not None:
        total = total + sinks.double().exp()[:, None, None]
    return torch.einsum("hqk,khd->qhd", weights / total, v)


def shuffled_blocks(num_blocks: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).permutation(np.arange(1, num_blocks)).astype(np.int32)


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(4, 4), (6, 2), (8, 1), (40, 1)])
@pytest.mark.parametrize("window", [None, 7, 150])
def test_a_whole_prompt_attends_as_scaled_dot_product_attention_does(
    num_heads: int, num_kv_heads: int, window: int | None
) -> None:
    sequence = Sequence(200, num_heads, num_kv_heads, shuffled_blocks(60), seed=1)
    (out,) = run(make_backend(num_heads, num_kv_heads), [(sequence, 0, 200)], window)
    torch.testing.assert_close(out, expected(sequence, window), rtol=0, atol=2e-6)


def test_rows_are_bitwise_the_same_in_chunks_token_by_token_and_among_others() -> None:
    blocks = shuffled_blocks(200)
    lengths = (300, 5, 131, 40)
    edges = np.cumsum([0, *(-(-length // 4) for length in lengths)])
    sequences = [Sequence(length, 6, 2, blocks[edges[i] : edges[i + 1]], seed=i) for i, length in enumerate(lengths)]
    alone = [run(make_backend(6, 2), [(s, 0, len(s.q))])[0] for s in sequences]

    together = run(make_backend(6, 2), [(s, 0, len(s.q)) for s in sequences])
    assert all(torch.equal(a, b) for a, b in zip(alone, together, strict=True))

    backend, target = make_backend(6, 2), sequences[0]
    run(backend, [(s, 0, len(s.q) - 3) for s in sequences[1:]])
    ends = [1, 2, 30, 128, 129, 257, 260, 293]
    pieces = [run(backend, [(target, a, b)])[0] for a, b in zip([0, *ends], ends, strict=False)]
    for i in range(7):
        mates = [(s, len(s.q) - 3 + i, len(s.q) - 2 + i) for s in sequences[1:] if i < 3]
        pieces.append(run(backend, [*mates, (target, 293 + i, 294 + i)])[-1])
    assert torch.equal(torch.cat(pieces), alone[0])


def test_many_decoding_requests_get_bitwise_what_each_gets_alone() -> None:
    lengths = [2 + 7 * i for i in range(40)]
    edges = np.cumsum([1, *(-(-length // 4) for length in lengths)])
    tables = [np.arange(edges[i], edges[i + 1], dtype=np.int32) for i in range(40)]
    sequences = [Sequence(length, 4, 2, tables[i], seed=i) for i, length in enumerate(lengths)]
    backend = make_backend(4, 2, int(edges[-1]))
    for sequence in sequences:
        run(backend, [(sequence, 0, len(sequence.q) - 1)])
    last_rows = [(sequence, len(sequence.q) - 1, len(sequence.q)) for sequence in sequences]
    together = run(backend, last_rows)
    alone = [run(backend, [last_row])[0] for last_row in last_rows]
    assert all(torch.equal(a, b) for a, b in zip(alone, together, strict=True))


def test_work_larger_than_a_group_may_be_is_cut_without_changing_a_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    sequence = Sequence(150, 4, 2, shuffled_blocks(60), seed=3)
    (whole,) = run(make_backend(4, 2), [(sequence, 0, 150)])
    monkeypatch.setattr(reference, "MAX_GROUP_SIZE", 1)
    (cut,) = run(make_backend(4, 2), [(sequence, 0, 150)])
    assert torch.equal(whole, cut)


def test_a_row_sees_blocks_that_another_row_of_the_same_step_fills() -> None:
    blocks = np.arange(1, 11, dtype=np.int32)
    first = Sequence(40, 4, 2, blocks, seed=4)
    second = Sequence(40, 4, 2, np.concatenate((blocks[:5], np.array([20, 21, 22, 23, 24], dtype=np.int32))), seed=5)
    second.k[:20], second.v[:20] = first.k[:20], first.v[:20]
    _, out = run(make_backend(4, 2), [(first, 0, 40), (second, 20, 40)])
    torch.testing.assert_close(out, expected(second)[20:], rtol=0, atol=2e-6)


def test_bad_numbers_of_one_request_do_not_reach_another() -> None:
    good = Sequence(9, 4, 2, np.array([1, 2, 3], dtype=np.int32), seed=6)
    bad = Sequence(9, 4, 2, np.array([4, 5, 6], dtype=np.int32), seed=7)
    bad.k[:], bad.v[:] = torch.nan, torch.inf
    (alone,) = run(make_backend(4, 2), [(good, 0, 9)])
    beside, spoilt = run(make_backend(4, 2), [(good, 0, 9), (bad, 0, 9)])
    assert torch.equal(alone, beside)
    assert spoilt.isnan().all()


def test_a_cap_bounds_the_scores_and_sinks_take_their_share() -> None:
    sequence = Sequence(200, 6, 2, shuffled_blocks(60), seed=8)
    sinks = torch.randn(6, generator=torch.Generator().manual_seed(8)) * 3
    for window in (None, 7, 150):
        for softcap, some_sinks in ((1.5, None), (None, sinks), (0.7, sinks)):
            (out,) = run(make_backend(6, 2), [(sequence, 0, 200)], window, softcap=softcap, sinks=some_sinks)
            exact = exact_attention(sequence, window, softcap, some_sinks)
            torch.testing.assert_close(out.double(), exact, rtol=0, atol=2e-6)


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize(("window", "softcap", "has_sinks"), [(None, 2.0, False), (40, None, True), (None, 0.5, True)])
def test_capped_rows_and_rows_with_sinks_are_bitwise_the_same_however_they_are_cut(
    num_threads: int, window: int | None, softcap: float | None, has_sinks: bool
) -> None:
    options: Any = {"window": window, "softcap": softcap, "sinks": torch.linspace(-2, 4, 6) if has_sinks else None}
    blocks = shuffled_blocks(200)
    sequences = [Sequence(length, 6, 2, blocks[i * 80 : i * 80 + 80], seed=i) for i, length in enumerate((310, 150))]
    torch.set_num_threads(num_threads)
    try:
        alone = [run(make_backend(6, 2), [(s, 0, len(s.q))], **options)[0] for s in sequences]
        together = run(make_backend(6, 2), [(s, 0, len(s.q)) for s in sequences], **options)
        backend, pieces = make_backend(6, 2), []
        for first in [*range(0, 300, 60), *range(300, 310)]:
            last = first + (60 if first < 300 else 1)
            pieces.append(run(backend, [(sequences[0], first, last)], **options)[0])
    finally:
        torch.set_num_threads(1)
    assert all(torch.equal(a, b) for a, b in zip(alone, together, strict=True))
    assert torch.equal(torch.cat(pieces), alone[0])


def test_layers_of_a_group_share_its_table_and_each_group_s_layers_the_page_tensors() -> None:
    spec = KVCacheSpec(
        num_layers=5, num_kv_heads=2, head_dim=HEAD_DIM, item_size_bytes=4, windows=(7, None, 7, 7, None)
    )
    groups = spec.groups(1000)
    assert [group.layers for group in groups] == [(1, 4), (0, 2), (3,)]
    backend = ReferenceAttention(spec, groups, 4, 40, 4, torch.float32)
    assert len(backend.key_pages) == len(backend.value_pages) == 2
    tables = [np.arange(1 + 10 * i, 11 + 10 * i, dtype=np.int32) for i in range(3)]
    layers = [Sequence(40, 4, 2, tables[0], seed=i) for i in range(5)]
    outs: list[list[torch.Tensor]] = [[] for _ in range(5)]
    for start, end in ((0, 17), (17, 30), *((i, i + 1) for i in range(30, 40))):
        seen = [table.copy() for table in tables]
        for table in seen[1:]:
            table[: max(0, start - 6) // 4] = NULL_BLOCK
        batch = backend.prepare(AttentionBatch([RequestRows(0, end - start, start, seen)]))
        for layer, sequence in enumerate(layers):
            q, k, v = (getattr(sequence, name)[start:end] for name in "qkv")
            outs[layer].append(backend.attend(layer, q, k, v, HEAD_DIM**-0.5, spec.windows[layer], None, None, batch))
    for layer, sequence in enumerate(layers):
        torch.testing.assert_close(torch.cat(outs[layer]), expected(sequence, spec.windows[layer]), rtol=0, atol=2e-6)


def test_what_a_step_left_in_the_null_block_is_cleared() -> None:
    backend = make_backend(4, 2)
    ghost = Sequence(3, 4, 2, np.array([NULL_BLOCK], dtype=np.int32), seed=9)
    ghost.k[:], ghost.v[:] = torch.inf, torch.nan
    run(backend, [(ghost, 0, 3)])
    backend.clear_null_block()
    sequence = Sequence(30, 4, 2, np.array([1, 2, 3, 4, 5, 6, 7, 8], dtype=np.int32), seed=10)
    run(backend, [(sequence, 0, 29)], window=5)
    sequence.blocks[:6] = NULL_BLOCK
    (out,) = run(backend, [(sequence, 29, 30)], window=5)
    torch.testing.assert_close(out, expected(sequence, 5)[29:], rtol=0, atol=2e-6)


def test_key_tiles_hold_whole_vectors() -> None:
    assert KEY_TILE % 16 == 0  # masked keys then add zeros to lanes of the softmax that others fill
