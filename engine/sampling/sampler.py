"""Logits to token ids: one pure function a step.

The order, for each row: grammar mask → no end token before `min_tokens` → greedy rows take the arg max of these
logits (the lowest id among equals), the others go on: temperature → softmax → min_p → top_k → top_p → draw. It is
vLLM's order. A row's draw uses one uniform number, a function of (seed, position); so a row's token depends on its
logits, parameters, seed and position, never on the other rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import torch

from engine.errors import Cause
from engine.outputs import GrammarMasks
from engine.sampling import processors
from engine.sampling_params import SamplingParams


class SamplingRow(msgspec.Struct, frozen=True):
    """What the draw of one row needs beside its logits; made by `model_runner.input_batch`.

    Attributes:
        params: The request's resolved parameters; a seed of None counts as 0, for only the client draws seeds.
        position: Position of the token to be drawn.
        num_output_tokens: Tokens the request has generated before it.
    """

    params: SamplingParams
    position: int
    num_output_tokens: int


class Samples(msgspec.Struct, frozen=True):
    """The result of `sample`.

    Attributes:
        token_ids: A token for each row; meaningless where the row failed.
        failed: Row → why it has no token.
    """

    token_ids: list[int]
    failed: dict[int, Cause]


def sample(
    logits: torch.Tensor,
    rows: Sequence[SamplingRow],
    grammar_rows: Sequence[int] = (),
    grammar_masks: GrammarMasks | None = None,
) -> Samples:
    """Draw a token for each row.

    Args:
        logits: float32 `[n, vocab_size]`, n at least 1; may be changed.
        rows: One for each row of `logits`.
        grammar_rows: Rows that have a mask.
        grammar_masks: Their packed masks, in that order.

    Returns:
        The tokens; a row whose logits hold NaN or plus infinity, or allow no token, fails alone.
    """
    failed = _number_failures(logits)
    if grammar_masks is not None:
        processors.apply_grammar_masks(logits, grammar_rows, grammar_masks)
    _forbid_early_ends(logits, rows)
    best = logits.max(dim=-1)
    for row in torch.nonzero(best.values == -torch.inf).flatten().tolist():
        failed.setdefault(row, Cause("NoTokenAllowed", "no token is allowed: all logits are minus infinity"))
    token_ids = best.indices
    random = [i for i, row in enumerate(rows) if i not in failed and not row.params.is_greedy]
    if random:
        token_ids[random] = _draw(logits[random], [rows[i] for i in random])
    return Samples(token_ids.tolist(), failed)


def _number_failures(logits: torch.Tensor) -> dict[int, Cause]:
    """Find rows with NaN or plus infinity: `amax` passes on both."""
    highest = logits.amax(dim=-1)
    failed = {}
    for row in torch.nonzero(highest.isnan() | (highest == torch.inf)).flatten().tolist():
        kind = "NaN" if highest[row].isnan() else "infinite"
        failed[row] = Cause("BadLogits", f"the model gave {kind} logits for this request; others are not affected")
    return failed


def _forbid_early_ends(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> None:
    for i, row in enumerate(rows):
        params = row.params
        if row.num_output_tokens < params.min_tokens:
            ends = params.stop_token_ids + (() if params.ignore_eos else params.eos_token_ids)
            logits[i, [token for token in ends if token < logits.shape[1]]] = -torch.inf


def _draw(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> torch.Tensor:
    """Draw for rows that are neither greedy nor failed; each filter sees only the rows that ask for it."""
    params = [row.params for row in rows]
    scaled = processors.scale_by_temperature(logits, torch.tensor([p.temperature for p in params]))
    probabilities = torch.softmax(scaled, dim=-1)
    min_p = torch.tensor([p.min_p for p in params])
    top_k = torch.tensor([p.top_k if 0 < p.top_k < logits.shape[1] else 0 for p in params])
    top_p = torch.tensor([p.top_p for p in params], dtype=torch.float64)
    for keep, values, is_asked in (
        (processors.keep_min_p, min_p, min_p > 0),
        (processors.keep_top_k, top_k, top_k > 0),
        (processors.keep_top_p, top_p, top_p < 1),
    ):
        asking = torch.nonzero(is_asked).flatten()
        if len(asking):
            probabilities[asking] = keep(probabilities[asking], values[asking])
    uniform = processors.uniforms([p.seed or 0 for p in params], [row.position for row in rows])
    return processors.draw(probabilities, torch.from_numpy(uniform))
