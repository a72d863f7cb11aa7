"""Logits to token ids: one pure function a step.

The order, for each row: logprobs are taken of the logits as they come → grammar mask → allowed_token_ids → bad_words
→ no end token before `min_tokens` → logit_bias → repetition, frequency, presence penalty → processors of the program's
own, if any → greedy rows take the arg max of these logits (the lowest id among equals), the others go on: temperature
→ softmax → min_p → top_k → top_p → draw. It is vLLM's order. A processor touches only the rows that ask for it. A row's
draw uses one uniform number, a function of (seed, position); so a row's token depends on its logits, parameters, seed
and tokens, never on the other rows.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Sequence

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from engine.errors import Cause
from engine.outputs import GrammarMasks, Logprobs, TokenArray
from engine.sampling import processors
from engine.sampling.logits_processor import LogitsProcessor
from engine.sampling_params import SamplingParams

_NO_TOKENS: TokenArray = np.empty(0, dtype=np.int32)
_NUM_TABLES = 512
"""Requests whose lists of token ids are kept as arrays from step to step."""
Greatest = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""Does what `processors.greatest` does."""


class SamplingRow(msgspec.Struct, frozen=True):
    """What the draw of one row needs beside its logits; made by `model_runner.input_batch`.

    Attributes:
        params: The request's resolved parameters; a seed of None counts as 0, for only the client draws seeds.
        position: Position of the token to be drawn.
        num_output_tokens: Tokens the request has generated before it.
        tokens: All tokens before it, `[position]`, where the parameters read them; else empty.
    """

    params: SamplingParams
    position: int
    num_output_tokens: int
    tokens: TokenArray = _NO_TOKENS

    @property
    def output(self) -> TokenArray:
        """The tokens generated so far, where the parameters read them."""
        return self.tokens[self.position - self.num_output_tokens :]


class Samples(msgspec.Struct, frozen=True):
    """The result of `sample`.

    Attributes:
        token_ids: A token for each row; meaningless where the row failed.
        failed: Row → why it has no token.
        logprobs: Row → its token's logprobs by the logits as they came, where its parameters ask for them.
    """

    token_ids: list[int]
    failed: dict[int, Cause]
    logprobs: dict[int, Logprobs]


def sample(
    logits: torch.Tensor,
    rows: Sequence[SamplingRow],
    grammar_rows: Sequence[int] = (),
    grammar_masks: GrammarMasks | None = None,
    logits_processors: Sequence[LogitsProcessor] = (),
    greatest: Greatest = processors.greatest,
) -> Samples:
    """Draw a token for each row.

    Args:
        logits: float32 `[n, vocab_size]`, n at least 1; may be changed.
        rows: One for each row of `logits`.
        grammar_rows: Rows that have a mask.
        grammar_masks: Their packed masks, in that order.
        logits_processors: Those of the program, in their order; rows must then have all their tokens.
        greatest: Finds the greatest of each row, NaN if one is, and where it is.

    Returns:
        The tokens; a row whose logits hold NaN or plus infinity, or allow no token, fails alone.
    """
    values, token_ids = greatest(logits)
    failed = _number_failures(values)
    asking = [i for i, row in enumerate(rows) if row.params.logprobs is not None]
    changed = {i for i, row in enumerate(rows) if logits_processors or i in grammar_rows or _is_changed(row)}
    are_copied = asking and (len(asking) < len(rows) or not changed.isdisjoint(asking))
    unprocessed = logits[asking] if are_copied else logits
    if changed:
        if grammar_masks is not None:
            processors.apply_grammar_masks(logits, grammar_rows, grammar_masks)
        process(logits, rows)
        if logits_processors:
            failed |= _process_by(logits_processors, logits, rows, greatest)
        values, token_ids = greatest(logits)
    for row, value in enumerate(values.tolist()):
        if value == -math.inf:
            failed.setdefault(row, Cause("NoTokenAllowed", _nothing_allowed(rows[row], row in grammar_rows)))
    random = [i for i, row in enumerate(rows) if i not in failed and not row.params.is_greedy]
    if random:
        token_ids[random] = _draw(logits[random], [rows[i] for i in random])
    logprobs = _gather_logprobs(unprocessed, token_ids, rows, asking) if asking else {}
    return Samples(token_ids.tolist(), failed, logprobs)


def _gather_logprobs(
    logits: torch.Tensor, token_ids: torch.Tensor, rows: Sequence[SamplingRow], asking: Sequence[int]
) -> dict[int, Logprobs]:
    """Return what each row of `asking` wants to be told by its row of `logits`: the likeliest tokens, or named ones."""
    token_ids = token_ids[asking]
    naming = [j for j, i in enumerate(asking) if rows[i].params.logprob_token_ids is not None]
    told = {}
    if len(naming) < len(asking):
        gathered = processors.gather_logprobs(logits, token_ids)
        told = {i: gathered.part(j, j + 1, rows[i].params.logprobs) for j, i in enumerate(asking)}
    if naming:
        lists = [torch.tensor(rows[asking[j]].params.logprob_token_ids) for j in naming]
        named = torch.nn.utils.rnn.pad_sequence(lists, batch_first=True)
        gathered = processors.gather_logprobs(logits[naming], token_ids[naming], named)
        told |= {asking[j]: gathered.part(k, k + 1, len(lists[k])) for k, j in enumerate(naming)}
    return told


def _nothing_allowed(row: SamplingRow, has_grammar: bool) -> str:
    """Say what leaves a row empty, for who asked for it."""
    restricting = [name for name in ("allowed_token_ids", "bad_words", "min_tokens") if getattr(row.params, name)]
    names = ["structured_outputs"] * has_grammar + restricting
    together = f", {', '.join(names)} leave none" if names else ""
    return f"no token is allowed: all logits are minus infinity{together}"


def _number_failures(highest: torch.Tensor) -> dict[int, Cause]:
    """Find rows whose greatest logit is NaN, as it is if one of them is, or plus infinity."""
    failed = {}
    for row, value in enumerate(highest.tolist()):
        if not value < math.inf:
            kind = "NaN" if math.isnan(value) else "infinite"
            failed[row] = Cause("BadLogits", f"the model gave {kind} logits for this request; others are not affected")
    return failed


def _process_by(
    logits_processors: Sequence[LogitsProcessor], logits: torch.Tensor, rows: Sequence[SamplingRow], greatest: Greatest
) -> dict[int, Cause]:
    """Let the program's processors change `logits`, in place; return the rows that they spoilt."""
    had_failed = _number_failures(greatest(logits)[0]).keys()
    forbidden = logits == -torch.inf
    for processor in logits_processors:
        processor(logits, rows)
    logits.masked_fill_(forbidden, -torch.inf)
    message = "a logits processor gave NaN or infinity for this request"
    return {row: Cause("BadLogits", message) for row in _number_failures(greatest(logits)[0]).keys() - had_failed}


def process(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> None:
    """Apply everything between the grammar mask and the temperature to `logits [n, vocab_size]`, in place."""
    _allow_only_listed(logits, rows)
    _forbid_bad_words(logits, rows)
    _forbid_early_ends(logits, rows)
    _add_bias(logits, rows)
    _penalise(logits, rows)


def _is_changed(row: SamplingRow) -> bool:
    """Whether `process` changes the logits of this row, as far as its parameters tell."""
    params = row.params
    asked = params.allowed_token_ids is not None or params.bad_words_token_ids or params.logit_bias
    return bool(asked or params.penalises or row.num_output_tokens < params.min_tokens)


def _allow_only_listed(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> None:
    asking = {i: row.params.allowed_token_ids for i, row in enumerate(rows) if row.params.allowed_token_ids is not None}
    if asking:
        listed = [(i, _as_array(token_ids)) for i, token_ids in asking.items()]
        processors.allow_only(logits, list(asking), _places(listed, logits.shape[1]))


def _forbid_bad_words(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> None:
    """Forbid the last token of each bad word whose other tokens were just generated."""
    asking = [i for i, row in enumerate(rows) if row.params.bad_words_token_ids]
    if not asking:
        return
    starts, lasts = zip(*[_word_table(rows[i].params.bad_words_token_ids) for i in asking], strict=True)
    width = max(table.shape[1] for table in starts)
    aligned = [np.pad(table, ((0, 0), (width - table.shape[1], 0)), constant_values=-2) for table in starts]
    ends = np.stack([_right_aligned(rows[i].output[-width:] if width else (), width, -1) for i in asking])
    owners = np.repeat(np.arange(len(asking)), [len(table) for table in starts])
    last = np.concatenate(lasts)
    due = np.flatnonzero(processors.completed_words(ends[owners], np.concatenate(aligned)))
    due = due[last[due] < logits.shape[1]]
    processors.forbid(logits, (torch.tensor(asking)[owners[due]], torch.from_numpy(last[due])))


def _forbid_early_ends(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> None:
    early = [
        (i, row.params.stop_token_ids + (() if row.params.ignore_eos else row.params.eos_token_ids))
        for i, row in enumerate(rows)
        if row.num_output_tokens < row.params.min_tokens
    ]
    if early:
        processors.forbid(logits, _places(early, logits.shape[1]))


def _add_bias(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> None:
    asking = {i: row.params.logit_bias for i, row in enumerate(rows) if row.params.logit_bias}
    if asking:
        places = _places([(i, tuple(bias)) for i, bias in asking.items()], logits.shape[1])
        inside = [b for bias in asking.values() for token_id, b in bias.items() if token_id < logits.shape[1]]
        processors.add_bias(logits, places, torch.tensor(inside))


def _penalise(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> None:
    asking = [i for i, row in enumerate(rows) if row.params.penalises]
    if not asking:
        return
    params = [rows[i].params for i in asking]
    (owners, token_ids), num_generated = processors.tokens_before(
        [rows[i].tokens for i in asking], [rows[i].output for i in asking], logits.shape[1]
    )
    processors.penalise(
        logits,
        (torch.tensor(asking)[owners], token_ids),
        num_generated,
        torch.tensor([p.repetition_penalty for p in params])[owners],
        torch.tensor([p.frequency_penalty for p in params])[owners],
        torch.tensor([p.presence_penalty for p in params])[owners],
    )


def _places(token_ids: Iterable[tuple[int, npt.ArrayLike]], vocab_size: int) -> processors.Places:
    """Lay out each row's token ids pair by pair; an id outside of the vocabulary has no logit."""
    pairs = [(row, np.asarray(ids, dtype=np.int64)) for row, ids in token_ids]
    rows = np.repeat(np.array([row for row, _ in pairs], dtype=np.int64), [len(ids) for _, ids in pairs])
    columns = np.concatenate([ids for _, ids in pairs])
    inside = columns < vocab_size
    return torch.from_numpy(rows[inside]), torch.from_numpy(columns[inside])


@functools.lru_cache(maxsize=_NUM_TABLES)
def _as_array(token_ids: tuple[int, ...]) -> npt.NDArray[np.int64]:
    """Return `token_ids` as an array, shared and not to be changed."""
    return np.array(token_ids, dtype=np.int64)


@functools.lru_cache(maxsize=_NUM_TABLES)
def _word_table(words: tuple[tuple[int, ...], ...]) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int64]]:
    """Return all but the last token of each word, right-aligned, and the last ones; shared, not to be changed."""
    width = max(map(len, words)) - 1
    starts = np.stack([_right_aligned(word[:-1], width, -2) for word in words])
    return starts, np.array([word[-1] for word in words], dtype=np.int64)


def _right_aligned(values: Sequence[int] | TokenArray, width: int, filling: int) -> npt.NDArray[np.int32]:
    aligned = np.full(width, filling, dtype=np.int32)
    aligned[width - len(values) :] = values
    return aligned


def _draw(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> torch.Tensor:
    """Draw for rows that are neither greedy nor failed."""
    params = [row.params for row in rows]
    uniform = torch.from_numpy(processors.uniforms([p.seed or 0 for p in params], [row.position for row in rows]))
    pieces = [slice(i, i + processors.ROWS_AT_ONCE) for i in range(0, len(rows), processors.ROWS_AT_ONCE)]
    return torch.cat([processors.draw(restricted_probabilities(logits[i], params[i]), uniform[i]) for i in pieces])


def restricted_probabilities(logits: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    """Return what each row of `logits [n, vocab_size]` is drawn from; none is greedy, and rows need not sum to 1."""
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
        if len(asking) == len(params):
            probabilities = keep(probabilities, values)
        elif len(asking):
            probabilities[asking] = keep(probabilities[asking], values[asking])
    return probabilities
