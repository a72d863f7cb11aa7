"""The guard's own attention, held against the textbook's."""

from __future__ import annotations

import pytest
import torch

from engine.models.transformers_backend import AttentionCall
from engine.models.whole_attention import WholeAttention

NUM_ROWS, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 9, 4, 2, 8


def draw(window: int | None, softcap: float | None, has_sinks: bool) -> AttentionCall:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(NUM_ROWS, heads, HEAD_DIM, generator=generator) for heads in (NUM_HEADS, NUM_KV_HEADS, NUM_KV_HEADS)
    )
    sinks = torch.randn(NUM_HEADS, generator=generator) if has_sinks else None
    return AttentionCall(0, q, k, v, scale=0.7, window=window, softcap=softcap, sinks=sinks)


def textbook(call: AttentionCall, window: int | None) -> torch.Tensor:
    """One row and head after the other."""
    results = torch.zeros_like(call.q)
    for row in range(NUM_ROWS):
        first = 0 if window is None else max(0, row + 1 - window)
        for head in range(NUM_HEADS):
            keys, values = (part[first : row + 1, head // (NUM_HEADS // NUM_KV_HEADS)] for part in (call.k, call.v))
            scores = keys @ call.q[row, head] * call.scale
            if call.softcap is not None:
                scores = call.softcap * torch.tanh(scores / call.softcap)
            weights = scores.exp()
            sink = 0.0 if call.sinks is None else call.sinks[head].exp()
            results[row, head] = weights @ values / (weights.sum() + sink)
    return results


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("softcap", [None, 0.5])
@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("cut", [NUM_ROWS, 4])
def test_it_is_the_textbook_s_however_a_sequence_is_cut(
    window: int | None, softcap: float | None, has_sinks: bool, cut: int
) -> None:
    call = draw(window, softcap, has_sinks)
    memory, parts = WholeAttention(None), []
    for rows in (slice(0, cut), slice(cut, NUM_ROWS)):
        q, k, v = call.q[rows], call.k[rows], call.v[rows]
        if len(q):
            part = AttentionCall(0, q, k, v, call.scale, call.window, call.softcap, call.sinks)
            parts.append(memory.bind([(0, len(q))])(part))
    torch.testing.assert_close(torch.cat(parts), textbook(call, window))


@pytest.mark.parametrize(("window", "narrowed", "expected"), [(5, 3, 3), (3, 5, 3), (None, 3, None), (5, None, 5)])
def test_windows_are_narrowed_and_nothing_else(window: int | None, narrowed: int | None, expected: int | None) -> None:
    call = draw(window, None, False)
    result = WholeAttention(narrowed).bind([(0, NUM_ROWS)])(call)
    torch.testing.assert_close(result, textbook(call, expected))


def test_sequences_side_by_side_do_not_see_each_other() -> None:
    call = draw(None, None, False)
    both = AttentionCall(0, *(torch.cat((part, part)) for part in (call.q, call.k, call.v)), 0.7, None, None, None)
    result = WholeAttention(None).bind([(0, NUM_ROWS), (1, NUM_ROWS)])(both)
    torch.testing.assert_close(result, textbook(call, None).repeat(2, 1, 1))
