"""What must hold of what a request got, whatever else happened: it is what the request gets alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from engine.executor.null import Windows, continuation
from engine.outputs import FinishReason, RequestId
from engine.protocol import EngineCoreRequest
from engine.testing import Completion

ORDERS: dict[str, Callable[[EngineCoreRequest, int], tuple[int, ...]]] = {
    "fcfs": lambda request, arrival: (arrival,),
    "priority": lambda request, arrival: (request.priority, arrival),
}
"""Who loses blocks last: a key for a request and its place in the order of arrival. Only orders that never change."""


def run_alone(
    request: EngineCoreRequest, max_model_len: int, windows: Windows
) -> tuple[list[int], FinishReason, int | None]:
    """Return the tokens, finish reason and stop reason of `request` by definition."""
    params = request.sampling_params
    room = max_model_len - len(request.prompt_token_ids)
    limit = max(0, room if params.max_tokens is None else min(room, params.max_tokens))
    tokens: list[int] = []
    for token in continuation(request.prompt_token_ids, params, windows):
        if len(tokens) >= limit:
            break
        tokens.append(token)
        if len(tokens) >= params.min_tokens:
            if token in params.eos_token_ids:
                return tokens, FinishReason.STOP, None
            if token in params.stop_token_ids:
                return tokens, FinishReason.STOP, token
    return tokens, FinishReason.LENGTH, None


def check_completion(request: EngineCoreRequest, completion: Completion, max_model_len: int, windows: Windows) -> None:
    """Check what `request` got against its run alone; one that was ended from outside may have got less.

    Raises:
        AssertionError: It differs, or did not end exactly once.
    """
    outputs, got = completion.outputs, completion.token_ids
    assert outputs, f"{request.request_id} never got its end"
    ends = [output.finish_reason for output in outputs if output.finish_reason is not None]
    assert len(ends) == 1, f"{request.request_id} ended {len(ends)} times"
    last = outputs[-1]
    tokens, reason, stop_reason = run_alone(request, max_model_len, windows)
    assert got == tokens[: len(got)], f"{request.request_id} got {got}, alone it gets {tokens}"
    assert (last.error is not None) == (last.finish_reason is FinishReason.ERROR), f"{request.request_id}: {last}"
    is_stop = last.finish_reason is FinishReason.STOP and last.new_token_ids  # else a stop string, seen by the client
    if is_stop or last.finish_reason is FinishReason.LENGTH:
        assert got == tokens, f"{request.request_id} ended after {got}, alone it gets {tokens}"
        assert (last.finish_reason, last.stop_reason) == (reason, stop_reason), f"{request.request_id}: {last}"


def check_victims(
    policy: str,
    arrivals: dict[RequestId, tuple[EngineCoreRequest, int]],
    victims: Iterable[RequestId],
    served: Iterable[RequestId],
) -> None:
    """Check that a plan took blocks back from nobody it serves and, among those in `arrivals`, in the policy's order.

    Raises:
        AssertionError: It did.
    """
    both = set(victims) & set(served)
    assert not both, f"{both} lost their blocks in a plan with a row of theirs"
    order = ORDERS.get(policy)
    if order is None:
        return
    last_served = max((order(*arrivals[name]) for name in served if name in arrivals), default=())
    for victim in arrivals.keys() & set(victims):
        assert order(*arrivals[victim]) > last_served, f"{victim} lost its blocks before somebody who comes after it"
