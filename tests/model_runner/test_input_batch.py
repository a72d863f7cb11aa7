from __future__ import annotations

import numpy as np
import pytest

from engine.model_runner.input_batch import LateTokens, flatten
from engine.outputs import RequestId, ScheduledRequest, SchedulerOutput
from engine.sampling_params import SamplingParams

A, B = RequestId("a"), RequestId("b")


def request(
    request_id: RequestId, tokens: list[int], start: int, num_tokens: int, **fields: object
) -> ScheduledRequest:
    return ScheduledRequest(
        request_id=request_id,
        tokens=np.array(tokens, dtype=np.int32),
        start=start,
        num_tokens=num_tokens,
        block_tables=(np.array([5, 9, 2], dtype=np.int32),),
        **({"samples": True, "sampling_params": SamplingParams(seed=1)} | fields),  # type: ignore[arg-type]
    )


def test_a_plan_becomes_flat_tensors_in_row_order() -> None:
    rows = (
        request(A, [10, 11, 12, 13, 14, 15], 2, 3, samples=False),
        request(B, [20, 21], 1, 1, num_prompt_tokens=1),
    )
    batch = flatten(SchedulerOutput(step=1, requests=rows), LateTokens(1))
    assert batch.token_ids.tolist() == [12, 13, 14, 21]
    assert batch.positions.tolist() == [2, 3, 4, 1]
    assert [slots.tolist() for slots in batch.attention.slot_mappings(4)] == [[22, 23, 36, 21]]
    assert [(r.first_row, r.num_rows, r.start) for r in batch.attention.requests] == [(0, 3, 2), (3, 1, 1)]
    assert (batch.sampled, batch.last_rows) == ([1], [3])
    assert (batch.sampling[0].position, batch.sampling[0].num_output_tokens) == (2, 1)


def test_late_tokens_follow_the_known_ones_in_the_order_of_their_steps() -> None:
    late = LateTokens(2)
    late.record(1, {A: 7, B: 1})
    late.record(2, {A: 8})
    rows = (request(A, [10, 11], 1, 3, num_late=2), request(B, [20], 1, 1, num_late=1))
    batch = flatten(SchedulerOutput(step=3, requests=rows), late)
    assert batch.token_ids.tolist() == [11, 7, 8, 1]


def test_a_late_token_that_is_not_known_is_named() -> None:
    late = LateTokens(1)
    late.record(1, {A: 7})
    late.record(2, {B: 8})
    with pytest.raises(LookupError, match="step 3 needs 1 late tokens of a, 0 are known"):
        flatten(SchedulerOutput(step=3, requests=(request(A, [1], 1, 1, num_late=1),)), late)


def test_who_reads_the_tokens_before_gets_the_late_ones_too_wherever_they_stand() -> None:
    late = LateTokens(2)
    late.record(1, {A: 7, B: 1})
    late.record(2, {A: 8})
    params = SamplingParams(repetition_penalty=1.5)
    rows = (
        request(A, [10, 11], 3, 1, num_late=1, num_prompt_tokens=1, sampling_params=params),
        request(B, [20], 1, 1, num_late=1),
    )
    batch = flatten(SchedulerOutput(step=3, requests=rows), late)
    assert batch.token_ids.tolist() == [8, 1]
    assert batch.sampling[0].tokens.tolist() == [10, 11, 7, 8]
    assert batch.sampling[0].output.tolist() == [11, 7, 8]
    assert batch.sampling[1].tokens.tolist() == []
