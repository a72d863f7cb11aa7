"""The steps between logits and a draw, each a pure function over rows.

Every function works row by row with operations whose result for a row does not depend on how many rows there are.
That rules out `torch.sum` over the vocabulary (split over threads when the row is alone); totals come from running
sums, which go through a row in order.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from engine.outputs import GrammarMasks

SORTED_HEAD = 1024
"""Tokens sorted at first for top-p; rows whose bulk is wider are sorted whole."""

_MASK_64 = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15


def apply_grammar_masks(logits: torch.Tensor, rows: Sequence[int], masks: GrammarMasks) -> None:
    """Set what a grammar forbids to minus infinity, in place.

    Args:
        logits: `[n, vocab_size]`.
        rows: Which row of `logits` each mask is for.
        masks: Packed allowed bits, lowest bit first, `[len(rows), ceil(vocab_size / 32)]`.
    """
    bits = np.unpackbits(np.ascontiguousarray(masks).view(np.uint8), axis=1, bitorder="little")
    forbidden = torch.from_numpy(bits[:, : logits.shape[1]] == 0).to(logits.device)
    for row, mask in zip(rows, forbidden, strict=True):
        logits[row].masked_fill_(mask, -torch.inf)


def scale_by_temperature(logits: torch.Tensor, temperatures: torch.Tensor) -> torch.Tensor:
    """Return `logits [n, vocab_size]` below their row's highest, divided by `temperatures [n]`, all above 0."""
    return (logits - logits.amax(dim=-1, keepdim=True)) / temperatures[:, None]


def keep_min_p(probabilities: torch.Tensor, min_p: torch.Tensor) -> torch.Tensor:
    """Zero what is less likely than `min_p [n]` times the most likely token."""
    least = probabilities.amax(dim=-1, keepdim=True) * min_p[:, None]
    return probabilities.masked_fill(probabilities < least, 0.0)


def keep_top_k(probabilities: torch.Tensor, top_k: torch.Tensor) -> torch.Tensor:
    """Zero all but the `top_k [n]` (at least 1) most likely tokens; those as likely as the last one stay too."""
    top_k = top_k.clamp(max=probabilities.shape[-1])
    sorted_head = probabilities.topk(int(top_k.max()), dim=-1).values
    least = sorted_head.gather(-1, top_k[:, None] - 1)
    return probabilities.masked_fill(probabilities < least, 0.0)


def keep_top_p(probabilities: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Zero all but the most likely tokens that together reach `top_p [n]` of the row's total.

    The token that crosses the border stays, and so do those as likely as it. `top_p` is float64.
    """
    wanted = running_sums(probabilities)[:, -1] * top_p
    head = probabilities.topk(min(SORTED_HEAD, probabilities.shape[-1]), dim=-1).values
    least, is_reached = _border(head, wanted)
    wide = torch.nonzero(~is_reached).flatten()
    if len(wide):
        ordered = probabilities[wide].sort(dim=-1, descending=True).values
        least[wide] = _border(ordered, wanted[wide])[0]
    return probabilities.masked_fill(probabilities < least, 0.0)


def _border(descending: torch.Tensor, wanted: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the least likely token to keep, `[n, 1]`, and whether `wanted` is reached within the sorted part."""
    sums = running_sums(descending)
    num_before = (sums < wanted[:, None]).sum(dim=-1, keepdim=True)
    last = descending.shape[-1] - 1
    return descending.gather(-1, num_before.clamp(max=last)), num_before[:, 0] <= last


def running_sums(probabilities: torch.Tensor) -> torch.Tensor:
    """Return the sums of each row up to and including each place, float64 of the same shape."""
    return probabilities.cumsum(dim=-1, dtype=torch.float64)


def uniforms(seeds: Sequence[int], positions: Sequence[int]) -> npt.NDArray[np.float64]:
    """Return a number in [0, 1) for each (seed, position), `[n]`; the same pair always gives the same number.

    Counter-based: the finaliser of SplitMix64 (Steele, Lea, Flood 2014; Stafford's variant 13) is applied to the seed
    and again to the result plus a multiple of the golden ratio a position.
    """
    keys = np.array([seed & _MASK_64 for seed in seeds], dtype=np.uint64)
    counters = np.array(positions, dtype=np.uint64) + np.uint64(1)
    bits = _mix(_mix(keys + np.uint64(_GOLDEN)) + counters * np.uint64(_GOLDEN))
    return (bits >> np.uint64(12)).astype(np.float64) * 2.0**-52


def _mix(bits: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return bits ^ (bits >> np.uint64(31))


def draw(probabilities: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """Return for each row the token whose share of the running sum holds `uniform [n]` of the total; int64 `[n]`.

    Rows need not sum to 1. A token of probability 0 is never drawn.
    """
    sums = running_sums(probabilities)
    targets = sums[:, -1:] * uniform[:, None]
    return torch.searchsorted(sums, targets, right=True).flatten()
