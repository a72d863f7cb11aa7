"""What must hold of what a request got, whatever else happened: it is what the request gets alone."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from engine.executor.null import Windows, continuation
from engine.outputs import FinishReason, RequestId
from engine.protocol import EngineCoreOutput, EngineCoreRequest
from engine.sampling_params import SamplingParams
from engine.stop_check import ends_in_repetition
from engine.structured_output.grammar import Grammar
from engine.testing import Completion

ORDERS: dict[str, Callable[[EngineCoreRequest, int], tuple[int, ...]]] = {
    "fcfs": lambda request, arrival: (arrival,),
    "priority": lambda request, arrival: (request.priority, arrival),
}
"""Who loses blocks last: a key for a request and its place in the order of arrival. Only orders that never change."""


class Alone(NamedTuple):
    """What a prompt gets alone: tokens, finish reason, stop reason."""

    token_ids: list[int]
    finish_reason: FinishReason
    stop_reason: int | str | None


class _Continuation:
    """What the integer model says to a prompt, computed once and only as far as somebody asked."""

    def __init__(self, token_ids: Iterator[int]) -> None:
        self._rest = token_ids
        self._known: list[int] = []

    def __iter__(self) -> Iterator[int]:
        for index in itertools.count():
            if index == len(self._known):
                self._known.append(next(self._rest))
            yield self._known[index]


@functools.lru_cache(maxsize=8192)
def _continuation(prompt: tuple[int, ...], seed: int | None, windows: Windows) -> _Continuation:
    params = SamplingParams(temperature=0.0) if seed is None else SamplingParams(temperature=1.0, seed=seed)
    return _Continuation(continuation(prompt, params, windows))


def run_alone(
    prompt: Sequence[int], params: SamplingParams, max_model_len: int, windows: Windows, grammar: Grammar | None = None
) -> Alone:
    """Return what `prompt` gets by definition; where its grammar allows nothing more and is not finished, an error."""
    room = max_model_len - len(prompt)
    limit = max(0, room if params.max_tokens is None else min(room, params.max_tokens))
    tokens: list[int] = []
    seed = None if params.is_greedy else params.seed or 0
    told = continuation(prompt, params, windows, grammar) if grammar else _continuation(tuple(prompt), seed, windows)
    for token in told:
        if len(tokens) >= limit:
            break
        tokens.append(token)
        is_long_enough = len(tokens) >= params.min_tokens
        if is_long_enough and token in params.eos_token_ids:
            return Alone(tokens, FinishReason.STOP, None)
        if is_long_enough and token in params.stop_token_ids:
            return Alone(tokens, FinishReason.STOP, token)
        if grammar is not None and grammar.is_finished:
            return Alone(tokens, FinishReason.STOP, None)
        detection = params.repetition_detection if len(tokens) < limit and is_long_enough else None
        if detection is not None and ends_in_repetition(np.array(tokens), detection):
            return Alone(tokens, FinishReason.REPETITION, "repetition_detected")
    is_whole = len(tokens) >= limit
    return Alone(tokens, FinishReason.LENGTH if is_whole else FinishReason.ERROR, None)


def check_completion(request: EngineCoreRequest, completion: Completion, max_model_len: int, windows: Windows) -> None:
    """Check what `request` got against its run alone, turn by turn; what was ended from outside may have got less.

    Raises:
        AssertionError: It differs, or did not end exactly once.
    """
    outputs = completion.outputs
    assert outputs, f"{request.request_id} never got its end"
    ends = [output.finish_reason for output in outputs if output.finish_reason is not None]
    assert len(ends) == 1, f"{request.request_id} ended {len(ends)} times"
    last = outputs[-1]
    assert (last.error is not None) == (last.finish_reason is FinishReason.ERROR), f"{request.request_id}: {last}"
    prompt, params, parts = list(request.prompt_token_ids), request.sampling_params, iter(completion.parts)
    grammars = iter(completion.grammars)
    grammar = None if request.extras else next(grammars, None)
    for turn in _turns(outputs):
        got = [token for output in turn for token in output.new_token_ids]
        if got or turn[-1].turn_reason is not None:
            _check_turn(turn, got, run_alone(prompt, params, max_model_len, windows, grammar))
        if turn[-1].turn_reason is not None and (part := next(parts, None)) is not None:
            prompt, params = [*prompt, *got[:-1], *part.prompt_token_ids], part.sampling_params
            grammar = next(grammars, None) if params.structured_outputs is not None else None


def _turns(outputs: Sequence[EngineCoreOutput]) -> Iterator[list[EngineCoreOutput]]:
    """Split outputs after each that ends a turn."""
    turn: list[EngineCoreOutput] = []
    for output in outputs:
        turn.append(output)
        if output.turn_reason is not None:
            yield turn
            turn = []
    if turn:
        yield turn


def _check_turn(turn: Sequence[EngineCoreOutput], got: list[int], alone: Alone) -> None:
    last = turn[-1]
    reason = last.turn_reason or last.finish_reason
    name = last.request_id
    assert got == alone.token_ids[: len(got)], f"{name} got {got}, alone it gets {alone.token_ids}"
    is_stop = reason is FinishReason.STOP and last.new_token_ids  # else a stop string, seen by the client, or a close
    has_ended = is_stop or reason in (FinishReason.LENGTH, FinishReason.REPETITION)
    if has_ended:
        assert got == alone.token_ids, f"{name} ended after {got}, alone it gets {alone.token_ids}"
    if has_ended or (got == alone.token_ids and alone.finish_reason is not FinishReason.ERROR):
        assert (reason, last.stop_reason) == alone[1:], f"{name} ends with its last token, and not later: {last}"


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
