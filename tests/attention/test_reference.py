from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from engine.attention import reference
from engine.attention.base import AttentionBatch, RequestRows
from engine.attention.reference import KEY_TILE, ReferenceAttention
from engine.errors import UnsupportedModel
from engine.kv_cache.spec import KVCacheSpec

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
    block_size: int = 4,
) -> list[torch.Tensor]:
    """Attend with (sequence, start, end) rows of each in one step."""
    rows, slots, first = [], [], 0
    for sequence, start, end in parts:
        rows.append(RequestRows(first, end - start, start, [sequence.blocks]))
        span = np.arange(start, end)
        slots.append(sequence.blocks[span // block_size].astype(np.int64) * block_size + span % block_size)
        first += end - start
    batch = backend.prepare(AttentionBatch([torch.from_numpy(np.concatenate(slots))], rows))
    q, k, v = (torch.cat([getattr(s, name)[a:b] for s, a, b in parts]) for name in "qkv")
    out = backend.attend(0, q, k, v, HEAD_DIM**-0.5, window, None, None, batch)
    return list(out.split([end - start for _, start, end in parts]))


def expected(sequence: Sequence, window: int | None = None) -> torch.Tensor:
    length = len(sequence.q)
    distance = torch.arange(length)[:, None] - torch.arange(length)
    visible = (distance >= 0) & (distance < (window or length))
    q, k, v = (part.transpose(0, 1)[None] for part in (sequence.q, sequence.k, sequence.v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=visible, enable_gqa=True)[0].transpose(0, 1)


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


def test_what_the_reference_lacks_is_refused_by_name() -> None:
    sequence = Sequence(3, 4, 2, np.array([1], dtype=np.int32), seed=8)
    backend = make_backend(4, 2)
    batch = backend.prepare(AttentionBatch(torch.arange(4, 7), [RequestRows(0, 3, 0, sequence.blocks)]))
    with pytest.raises(UnsupportedModel, match=r"soft cap .*30\.0"):
        backend.attend(0, sequence.q, sequence.k, sequence.v, 1.0, None, 30.0, None, batch)
    with pytest.raises(UnsupportedModel, match="sinks"):
        backend.attend(0, sequence.q, sequence.k, sequence.v, 1.0, None, None, torch.zeros(4), batch)


def test_key_tiles_hold_whole_vectors() -> None:
    assert KEY_TILE % 16 == 0  # masked keys then add zeros to lanes of the softmax that others fill
