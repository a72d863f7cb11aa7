"""The steps between logits and a draw, each a pure function over rows.

Every function works row by row with operations whose result for a row does not depend on how many rows there are.
That rules out `torch.sum` over the vocabulary (split over threads when the row is alone); totals are running sums over
the sums of blocks.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from engine.outputs import GrammarMasks, Logprobs, TokenArray
from engine.sampling_params import MAX_LOGPROBS

SORTED_HEADS = (64, 1024)
"""Tokens sorted for top-p at first and then, of rows whose bulk is wider; if it still is, all are sorted."""

SEARCHED_BLOCK = 64
"""Tokens of which only the highest is looked at, where the likeliest few are searched."""

ROWS_AT_ONCE = 8
"""Rows of a batch that are gone through together: with 50k tokens, 1.5 MiB."""

SUMMED_BLOCK = 256
"""Tokens whose probabilities are added up at once, where all are added up."""

Places = tuple[torch.Tensor, torch.Tensor]
"""Rows and token ids, int64 `[m]` each: one pair a logit."""

_MOST_OF_BITS = torch.where(torch.arange(256)[:, None] >> torch.arange(8) & 1 == 1, torch.inf, -torch.inf)
"""What logits may be at most by eight bits of a mask: anything where a bit is set, `[256, 8]`."""

_MASK_64 = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15


def greatest(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the greatest of each row of `logits [n, vocab_size]`, NaN if one is, and the first token that has it."""
    if logits.device.type != "cpu":
        values, token_ids = logits.max(dim=-1)
        return values, token_ids
    token_ids = torch.from_numpy(np.argmax(logits.numpy(), axis=-1))  # six times as fast as torch; of none, the first
    return logits.gather(-1, token_ids[:, None])[:, 0], token_ids


def apply_grammar_masks(logits: torch.Tensor, rows: Sequence[int], masks: GrammarMasks) -> None:
    """Set what a grammar forbids to minus infinity, in place.

    Args:
        logits: `[n, vocab_size]`.
        rows: Which row of `logits` each mask is for.
        masks: Packed allowed bits, lowest bit first, `[len(rows), ceil(vocab_size / 32)]`.
    """
    allowed = torch.from_numpy(np.ascontiguousarray(masks).view(np.uint8)).to(logits.device, torch.int32)
    most = _MOST_OF_BITS.to(logits.device, logits.dtype)
    for row, eights in zip(rows, allowed, strict=True):  # of bounds for all rows at once, most leave the cache
        bounds = most.index_select(0, eights).view(-1)[: logits.shape[1]]
        torch.minimum(logits[row], bounds, out=logits[row])


def forbid(logits: torch.Tensor, places: Places) -> None:
    """Set the logits at `places` to minus infinity, in place."""
    logits[places] = -torch.inf


def allow_only(logits: torch.Tensor, rows: Sequence[int], places: Places) -> None:
    """Set the logits of `rows` to minus infinity but for those at `places`, in place."""
    kept = logits[places]
    logits[list(rows)] = -torch.inf
    logits[places] = kept


def add_bias(logits: torch.Tensor, places: Places, bias: torch.Tensor) -> None:
    """Add `bias` to the logits at `places`, each named once, in place."""
    logits[places] += bias


def completed_words(ends: TokenArray, words: TokenArray) -> npt.NDArray[np.bool_]:
    """Say for each word whether all but its last token stand at the end of its row's output, `[w]`.

    Args:
        ends: The last `m` output tokens of each word's row, right-aligned, -1 where there are fewer, `[w, m]`.
        words: All but the last token of each word, right-aligned, -2 where there are fewer than `m`, `[w, m]`.
    """
    matches: npt.NDArray[np.bool_] = ((words == ends) | (words == -2)).all(axis=1)
    return matches


def tokens_before(
    tokens: Sequence[TokenArray], outputs: Sequence[TokenArray], vocab_size: int
) -> tuple[Places, torch.Tensor]:
    """Return each row's distinct `tokens` and how often its output holds each, `[m]`; at least one row."""
    is_known = np.zeros(len(tokens) * vocab_size, dtype=bool)
    is_known[_flat_places(tokens, vocab_size)] = True
    known = np.flatnonzero(is_known)
    counts = np.bincount(_flat_places(outputs, vocab_size), minlength=len(is_known))[known]
    rows, token_ids = np.divmod(known, vocab_size)
    return (torch.from_numpy(rows), torch.from_numpy(token_ids)), torch.from_numpy(counts)


def _flat_places(rows: Sequence[TokenArray], vocab_size: int) -> npt.NDArray[np.int64]:
    starts = np.arange(len(rows), dtype=np.int64) * vocab_size
    flat: npt.NDArray[np.int64] = np.repeat(starts, [len(row) for row in rows]) + np.concatenate(rows)
    return flat


def penalise(
    logits: torch.Tensor,
    places: Places,
    num_generated: torch.Tensor,
    repetition: torch.Tensor,
    frequency: torch.Tensor,
    presence: torch.Tensor,
) -> None:
    """Take off the logits at `places` what the tokens there cost for having come before, in place.

    Args:
        logits: `[n, vocab_size]`.
        places: Tokens that came in prompt or output, each named once, `[m]`.
        num_generated: How often the output holds them, `[m]`.
        repetition: Divides positive logits and multiplies negative ones, `[m]`.
        frequency: Taken off for each time, `[m]`.
        presence: Taken off once, `[m]`.
    """
    values = logits[places]
    repeated = torch.where(values > 0, values / repetition, values * repetition)
    logits[places] = repeated - frequency * num_generated - presence * (num_generated > 0)


def scale_by_temperature(logits: torch.Tensor, temperatures: torch.Tensor) -> torch.Tensor:
    """Return `logits [n, vocab_size]` below their row's highest, divided by `temperatures [n]`, all above 0."""
    return (logits - logits.amax(dim=-1, keepdim=True)).div_(temperatures[:, None])


def keep_min_p(probabilities: torch.Tensor, min_p: torch.Tensor) -> torch.Tensor:
    """Zero what is less likely than `min_p [n]` times the most likely token."""
    least = probabilities.amax(dim=-1, keepdim=True) * min_p[:, None]
    return probabilities.masked_fill(probabilities < least, 0.0)


def keep_top_k(probabilities: torch.Tensor, top_k: torch.Tensor) -> torch.Tensor:
    """Zero all but the `top_k [n]` (at least 1) most likely tokens; those as likely as the last one stay too."""
    top_k = top_k.clamp(max=probabilities.shape[-1])
    sorted_head = _highest(probabilities, int(top_k.max()))
    least = sorted_head.gather(-1, top_k[:, None] - 1)
    return probabilities.masked_fill(probabilities < least, 0.0)


def keep_top_p(probabilities: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Zero all but the most likely tokens that together reach `top_p [n]` of the row's total.

    The token that crosses the border stays, and so do those as likely as it. `top_p` is float64.
    """
    wanted = _sums_up_to_block(probabilities)[:, -1] * top_p
    least = torch.empty_like(wanted, dtype=probabilities.dtype)[:, None]
    wide, its_rows = torch.arange(len(wanted)), probabilities
    for size in (*SORTED_HEADS, probabilities.shape[-1]):
        least[wide], is_reached = _border(_highest(its_rows, size), wanted[wide])
        wide = wide[~is_reached]
        if not len(wide):
            break
        its_rows = probabilities[wide]
    return probabilities.masked_fill(probabilities < least, 0.0)


def _highest(values: torch.Tensor, num: int) -> torch.Tensor:
    """Return the `num` highest values of each row, or all, in descending order."""
    if num >= values.shape[-1]:
        return values.sort(dim=-1, descending=True).values
    return values.gather(-1, likeliest(values, num))


def _border(descending: torch.Tensor, wanted: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the least likely token to keep, `[n, 1]`, and whether `wanted` is reached within the sorted part."""
    sums = running_sums(descending)
    num_before = (sums < wanted[:, None]).sum(dim=-1, keepdim=True)
    last = descending.shape[-1] - 1
    return descending.gather(-1, num_before.clamp(max=last)), num_before[:, 0] <= last


def gather_logprobs(logits: torch.Tensor, token_ids: torch.Tensor, named: torch.Tensor | None = None) -> Logprobs:
    """Return the logprobs and ranks of `token_ids [n]`, and the logprobs of the tokens `named [n, k]` beside them.

    `logits` is `[n, vocab_size]`. Without `named` the `MAX_LOGPROBS` likeliest are told: always as many, so that a
    row's choice among equals does not depend on what its neighbours ask for.
    """
    others = likeliest(logits, MAX_LOGPROBS) if named is None else named
    told = torch.cat((token_ids[:, None], others), dim=-1)
    values = logits.gather(-1, told)
    if named is None:
        ranks = (values[:, 1:] > values[:, :1]).sum(dim=-1)
        uncounted = torch.nonzero(ranks == others.shape[-1]).flatten()  # less likely than all that were found
    else:
        ranks, uncounted = torch.empty_like(token_ids), torch.arange(len(token_ids))
    for some in torch.split(uncounted, ROWS_AT_ONCE):
        is_above = logits[some].numpy(force=True) > values[some, :1].numpy(force=True)  # numpy counts twice as fast
        ranks[some] = torch.from_numpy(np.count_nonzero(is_above, axis=-1))
    pieces = zip(torch.split(logits, ROWS_AT_ONCE), torch.split(told, ROWS_AT_ONCE), strict=True)
    logprobs = torch.cat([some.log_softmax(dim=-1).gather(-1, ids) for some, ids in pieces])
    return Logprobs(
        told.to(torch.int32).numpy(force=True),
        logprobs.numpy(force=True),
        (ranks + 1).to(torch.int32).numpy(force=True),
    )


def likeliest(values: torch.Tensor, num: int) -> torch.Tensor:
    """Return the places of the `num` highest of each row of `values [n, width]`, or of all, highest first.

    They are looked for in the `num` blocks whose highest are highest: what lies in another block is not above `num`
    others. A block is every so many places of a row, so that all maxima are taken in one pass through memory.
    """
    width = values.shape[-1]
    num_blocks = width // SEARCHED_BLOCK
    if num_blocks <= num:
        return values.topk(min(num, width), dim=-1).indices
    num_whole = num_blocks * SEARCHED_BLOCK
    highest = values[:, :num_whole].view(-1, SEARCHED_BLOCK, num_blocks).amax(dim=1)
    blocks = highest.topk(num, dim=-1).indices
    places = (blocks[:, None, :] + torch.arange(0, num_whole, num_blocks)[:, None]).flatten(1)
    places = torch.cat((places, torch.arange(num_whole, width).expand(len(values), -1)), dim=-1)
    return places.gather(-1, values.gather(-1, places).topk(num, dim=-1).indices)


def running_sums(probabilities: torch.Tensor) -> torch.Tensor:
    """Return the sums of each row up to and including each place, float64 of the same shape."""
    return probabilities.cumsum(dim=-1, dtype=torch.float64)


def _sums_up_to_block(probabilities: torch.Tensor) -> torch.Tensor:
    """Return the sums of each row up to and including each block of `SUMMED_BLOCK` places, float64."""
    num_rows, width = probabilities.shape
    rest = width % SUMMED_BLOCK
    blocks = probabilities[:, : width - rest].view(num_rows, -1, SUMMED_BLOCK).sum(dim=-1)
    if rest:
        blocks = torch.cat((blocks, probabilities[:, width - rest :].sum(dim=-1, keepdim=True)), dim=-1)
    return running_sums(blocks)


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

    Rows need not sum to 1. A token of probability 0 is never drawn. The block that holds it is found first.
    """
    sums = _sums_up_to_block(probabilities)
    targets = sums[:, -1:] * uniform[:, None]
    block = torch.searchsorted(sums, targets, right=True)
    before = torch.where(block > 0, sums.gather(-1, (block - 1).clamp(min=0)), 0.0)
    places = block * SUMMED_BLOCK + torch.arange(SUMMED_BLOCK)
    last = probabilities.shape[-1] - 1
    inside = running_sums(probabilities.gather(-1, places.clamp(max=last)).masked_fill_(places > last, 0.0))
    found = torch.searchsorted(inside, targets - before, right=True)
    last_possible = torch.searchsorted(inside, inside[:, -1:].contiguous())
    return (block * SUMMED_BLOCK + torch.minimum(found, last_possible)).flatten()
