"""A plan becomes flat tensors: no padding, no copies of what earlier steps knew."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from engine.attention.base import AttentionBatch, RequestRows
from engine.outputs import RequestId, ScheduledRequest, SchedulerOutput, TokenArray
from engine.sampling.sampler import SamplingRow


class PromptRows(NamedTuple):
    """Rows of a chunk whose logprobs of the prompt's next tokens are asked for.

    Attributes:
        request_id: Whose they are.
        first_row: Index of the first among the step's tokens.
        targets: The prompt token that follows each, `[n]`.
        num_top: How many of the likeliest tokens to tell.
    """

    request_id: RequestId
    first_row: int
    targets: TokenArray
    num_top: int


@dataclass(frozen=True, slots=True)
class InputBatch:
    """The inputs of one step.

    Attributes:
        token_ids: `[num_tokens]`, int64, row after row of the plan.
        positions: Of each token in its request, `[num_tokens]`, int64.
        attention: Where each token's K/V goes and whose it is.
        sampled: Indexes of the plan's rows that yield a token.
        last_rows: For each of those, the index of its last token.
        sampling: For each of those, what its draw needs.
        prompts: Those rows of prompts whose logprobs are asked for.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    attention: AttentionBatch
    sampled: Sequence[int]
    last_rows: Sequence[int]
    sampling: Sequence[SamplingRow]
    prompts: Sequence[PromptRows] = ()


class LateTokens:
    """The tokens sampled by steps that may be uncommitted, for plans made before they were known.

    A plan in flight names them only by number (`ScheduledRequest.num_late`). Kept for the last `max_steps` steps,
    the most that can be uncommitted when a plan is executed.
    """

    def __init__(self, max_steps: int) -> None:
        """Keep `max_steps` steps, at least 1."""
        self._steps: deque[tuple[int, dict[RequestId, int]]] = deque(maxlen=max_steps)

    def record(self, step: int, token_ids: dict[RequestId, int]) -> None:
        """Keep what `step` sampled; steps come in order. A failed row records any valid id: its rows are dropped."""
        self._steps.append((step, token_ids))

    def last(self, request_id: RequestId, num_late: int, before_step: int) -> list[int]:
        """Return the request's last `num_late` tokens sampled before `before_step`, in order.

        Raises:
            LookupError: They are not known: the plan refers to a step that was not sampled or is long committed.
        """
        known = [tokens[request_id] for step, tokens in self._steps if step < before_step and request_id in tokens]
        if len(known) < num_late:
            raise LookupError(
                f"step {before_step} needs {num_late} late tokens of {request_id}, {len(known)} are known"
            )
        return known[len(known) - num_late :]


def flatten(plan: SchedulerOutput, late_tokens: LateTokens, *, reads_tokens: bool = False) -> InputBatch:
    """Lay out a plan with at least one row.

    Late tokens are taken from `late_tokens`. Rows are given their tokens where their parameters read them, all of them
    if something else `reads_tokens`.

    Raises:
        LookupError: A late token is not known.
    """
    requests = plan.requests
    token_ids = [_inputs(request, late_tokens, plan.step) for request in requests]
    positions = [np.arange(request.start, request.start + request.num_tokens) for request in requests]
    rows, num_rows = [], 0
    for request in requests:
        rows.append(RequestRows(num_rows, request.num_tokens, request.start, request.block_tables))
        num_rows += request.num_tokens
    sampled = [i for i, request in enumerate(requests) if request.samples]
    return InputBatch(
        token_ids=torch.from_numpy(np.concatenate(token_ids, dtype=np.int64)),
        positions=torch.from_numpy(np.concatenate(positions)),
        attention=AttentionBatch(rows),
        sampled=sampled,
        last_rows=[rows[i].first_row + rows[i].num_rows - 1 for i in sampled],
        sampling=[_sampling_row(requests[i], late_tokens, plan.step, reads_tokens) for i in sampled],
        prompts=[
            _prompt_rows(request, rows[i].first_row, request.sampling_params.prompt_logprobs)
            for i, request in enumerate(requests)
            if request.sampling_params.prompt_logprobs is not None and request.start < request.num_prompt_tokens - 1
        ],
    )


def _prompt_rows(request: ScheduledRequest, first_row: int, num_top: int) -> PromptRows:
    end = min(request.start + request.num_tokens, request.num_prompt_tokens - 1)
    return PromptRows(request.request_id, first_row, request.tokens[request.start + 1 : end + 1], num_top)


def _inputs(request: ScheduledRequest, late_tokens: LateTokens, step: int) -> np.ndarray:
    known = request.tokens[request.start : request.start + request.num_tokens - request.num_late]
    if not request.num_late:
        return known
    return np.concatenate((known, late_tokens.last(request.request_id, request.num_late, step)))


def _sampling_row(request: ScheduledRequest, late_tokens: LateTokens, step: int, reads_tokens: bool) -> SamplingRow:
    position = request.start + request.num_tokens
    num_output_tokens = position - request.num_prompt_tokens
    if not (reads_tokens or request.sampling_params.reads_tokens):
        return SamplingRow(request.sampling_params, position, num_output_tokens)
    tokens = request.tokens
    if position > len(tokens):  # not `num_late`: a late token may stand before this step's inputs
        late = late_tokens.last(request.request_id, position - len(tokens), step)
        tokens = np.concatenate((tokens, np.array(late, dtype=np.int32)))
    return SamplingRow(request.sampling_params, position, num_output_tokens, tokens)
