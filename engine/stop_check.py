"""What a sampled token does to its request: it is appended, and may end it.

Facts about a request alone; stop strings are text and are found by the client's detokenizer.
"""

from __future__ import annotations

import numpy as np

from engine.outputs import TokenArray
from engine.request import Request, RequestStatus
from engine.sampling_params import RepetitionDetection


def append_sampled(request: Request, token_ids: list[int]) -> tuple[list[int], RequestStatus | None]:
    """Append sampled tokens up to and including the one that ends the request; drop those after it.

    Returns:
        The tokens appended, and the finished status that `request` must move to, or None.
    """
    for count, token_id in enumerate(token_ids, start=1):
        request.append(token_id)
        may_end = token_id in request.ending_token_ids or request.num_tokens >= request.max_num_tokens
        if may_end or request.sampling_params.repetition_detection is not None:
            status = check_stop(request, token_id)
            if status is not None:
                return token_ids[:count], status
    return token_ids, None


def check_stop(request: Request, token_id: int) -> RequestStatus | None:
    """Say how `token_id`, its newest token, ends `request`, or None; sets `stop_reason` where it says more.

    In this order: below min_tokens neither EOS nor stop tokens nor a repetition count; EOS unless ignored; stop
    tokens; then the length limits, which hold below min_tokens too; then a repetition. So a stop token in the last
    allowed position is a stop.
    """
    params = request.sampling_params
    is_long_enough = request.num_tokens - request.num_prompt_tokens >= params.min_tokens
    if is_long_enough:
        if token_id in params.eos_token_ids and not params.ignore_eos:
            return RequestStatus.FINISHED_STOPPED
        if token_id in params.stop_token_ids:
            request.stop_reason = token_id
            return RequestStatus.FINISHED_STOPPED
    if request.num_tokens >= request.max_num_tokens:
        return RequestStatus.FINISHED_LENGTH_CAPPED
    if params.repetition_detection is not None and is_long_enough:
        output = request.tokens.view()[request.num_prompt_tokens :]
        if ends_in_repetition(output, params.repetition_detection):
            request.stop_reason = "repetition_detected"
            return RequestStatus.FINISHED_REPETITION
    return None


def ends_in_repetition(token_ids: TokenArray, detection: RepetitionDetection) -> bool:
    """Whether the last tokens are one pattern, of a size that `detection` names, `min_count` times in a row."""
    for size in range(max(1, detection.min_pattern_size), detection.max_pattern_size + 1):
        num_repeated = size * detection.min_count
        if num_repeated > len(token_ids):
            return False
        if token_ids[-1] == token_ids[-1 - size]:
            tail = token_ids[-num_repeated:]
            if np.array_equal(tail[size:], tail[:-size]):
                return True
    return False
