from __future__ import annotations

import numpy as np
import pytest

from engine.append_only_array import AppendOnlyArray
from engine.outputs import FinishReason, RequestId
from engine.protocol import EngineCoreRequest
from engine.request import (
    TRANSITIONS,
    IllegalTransition,
    Request,
    RequestStatus,
    draw_transitions,
)
from engine.sampling_params import SamplingParams
from engine.stop_check import append_sampled

EOS = 9


def make_request(prompt: tuple[int, ...] = (1, 2, 3), max_model_len: int = 100, **params: object) -> Request:
    sampling_params = SamplingParams(eos_token_ids=(EOS,), **params)
    request = EngineCoreRequest(RequestId("r"), "r", list(prompt), sampling_params, arrival_time=0.0)
    return Request(request, 1, max_model_len)


def test_a_status_is_finished_exactly_if_it_comes_after_preempted_and_has_no_way_on() -> None:
    for status in RequestStatus:
        assert status.is_finished == (status > RequestStatus.PREEMPTED)
        assert status.is_finished == (status not in TRANSITIONS)


def test_every_finished_status_and_the_end_of_a_session_part_has_a_finish_reason() -> None:
    for status in RequestStatus:
        has_reason = status.is_finished or status is RequestStatus.WAITING_FOR_STREAMING_REQ
        assert (status.finish_reason is not None) == has_reason
    assert RequestStatus.FINISHED_IGNORED.finish_reason is FinishReason.LENGTH
    assert {status.finish_reason for status in RequestStatus} == {*FinishReason, None}


def test_a_status_prints_as_its_bare_name() -> None:
    assert f"{RequestStatus.WAITING} {RequestStatus.RUNNING:>8}" == "WAITING  RUNNING"


def test_every_status_is_reached_by_the_table_and_drawn() -> None:
    reached = {RequestStatus.WAITING}
    for after in TRANSITIONS.values():
        reached |= after
    assert reached == set(RequestStatus) - {RequestStatus.FINISHED_IGNORED}
    assert all(status.name in draw_transitions() for status in reached)


@pytest.mark.parametrize("start", RequestStatus)
@pytest.mark.parametrize("end", RequestStatus)
def test_a_request_moves_only_along_the_table(start: RequestStatus, end: RequestStatus) -> None:
    request = make_request()
    request.status = start
    if end in TRANSITIONS.get(start, ()):
        request.move_to(end)
        assert request.status is end
    else:
        with pytest.raises(IllegalTransition, match=f"{start} cannot become {end}"):
            request.move_to(end)


def test_views_are_read_only_and_stay_as_they_were_while_the_array_grows() -> None:
    array = AppendOnlyArray([7])
    views = [array.view()]
    for value in range(200):
        array.append(value)
        views.append(array.view())
    assert len(array) == 201
    for length, view in enumerate(views, start=1):
        assert view.tolist() == [7, *range(length - 1)]
        with pytest.raises(ValueError, match="read-only"):
            view[0] = 1
    assert views[0].dtype == np.int32


@pytest.mark.parametrize(
    ("params", "sampled", "kept", "status", "stop_reason"),
    [
        ({}, [10, EOS, 11], [10, EOS], RequestStatus.FINISHED_STOPPED, None),
        ({"stop_token_ids": (42,)}, [10, 42, 12], [10, 42], RequestStatus.FINISHED_STOPPED, 42),
        ({"max_tokens": 2}, [10, 11, 12], [10, 11], RequestStatus.FINISHED_LENGTH_CAPPED, None),
        ({"ignore_eos": True}, [EOS, 10, 11], [EOS, 10, 11], None, None),
        ({"ignore_eos": True, "stop_token_ids": (EOS,)}, [EOS, 10], [EOS], RequestStatus.FINISHED_STOPPED, EOS),
        ({"stop_token_ids": (EOS,)}, [EOS], [EOS], RequestStatus.FINISHED_STOPPED, None),
        ({"min_tokens": 3}, [10, EOS], [10, EOS], None, None),
        ({"min_tokens": 3}, [10, EOS, EOS, 4], [10, EOS, EOS], RequestStatus.FINISHED_STOPPED, None),
        ({"min_tokens": 2, "stop_token_ids": (42,)}, [42, 42], [42, 42], RequestStatus.FINISHED_STOPPED, 42),
        ({"max_tokens": 2}, [10, EOS], [10, EOS], RequestStatus.FINISHED_STOPPED, None),
        ({"max_tokens": 2, "min_tokens": 2}, [EOS, 10], [EOS, 10], RequestStatus.FINISHED_LENGTH_CAPPED, None),
    ],
)
def test_the_stop_check_keeps_its_order(
    params: dict[str, object],
    sampled: list[int],
    kept: list[int],
    status: RequestStatus | None,
    stop_reason: int | None,
) -> None:
    request = make_request(**params)
    assert append_sampled(request, sampled) == (kept, status)
    assert request.stop_reason == stop_reason
    assert request.tokens.view().tolist() == [1, 2, 3, *kept]
    assert request.num_output_tokens == len(kept)


def test_the_context_ends_a_request_even_below_min_tokens_and_without_max_tokens() -> None:
    request = make_request(max_model_len=5, max_tokens=None, min_tokens=50)
    assert append_sampled(request, [EOS, EOS, EOS]) == ([EOS, EOS], RequestStatus.FINISHED_LENGTH_CAPPED)


def test_a_rewound_request_counts_only_what_is_left_of_it() -> None:
    request = make_request()
    request.num_computed_tokens, request.num_placeholders = 4, 2
    request.rewind(1)
    assert (request.num_computed_tokens, request.num_placeholders, request.generation) == (1, 0, 1)
