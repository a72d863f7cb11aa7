"""Whose a message is that cannot be decoded, read from whatever came."""

from __future__ import annotations

import random

import msgspec
import pytest

from engine.bad_messages import answer_bad_message, read_head, refuse_bad_message
from engine.errors import EngineDeadError
from engine.outputs import FinishReason, RequestId
from engine.protocol import (
    AbortReason,
    AbortRequest,
    EngineCoreOutputs,
    EngineCoreRequest,
    SessionPart,
    UtilityCall,
)
from engine.sampling_params import SamplingParams
from transport.codec import DecodeError


def answers_to(payload: bytes) -> list[EngineCoreOutputs]:
    answers: list[EngineCoreOutputs] = []
    answer_bad_message(DecodeError("no", payload), 3, answers.append)
    return answers


@pytest.mark.parametrize("request_id", ["r", "r" * 40, "r" * 300, "é" * 40_000])
def test_a_request_is_ended_with_the_reason_however_long_its_id_is(request_id: str) -> None:
    payload = msgspec.msgpack.encode(EngineCoreRequest(RequestId(request_id), "", [1], SamplingParams(), 0.0))
    for cut in (payload, payload[:-20]):
        (answer,) = answers_to(cut)
        (output,) = answer.outputs
        assert (answer.engine_index, output.request_id, output.finish_reason) == (3, request_id, FinishReason.ERROR)
        assert output.error is not None
        assert (output.error.type, output.error.message) == ("DecodeError", "no")


@pytest.mark.parametrize("call_id", [1, 127, 128, 300, 70_000, 1 << 40])
def test_a_call_fails_with_the_reason_whatever_its_number(call_id: int) -> None:
    (answer,) = answers_to(msgspec.msgpack.encode(UtilityCall(call_id, ["Nonsense"])))
    (result,) = answer.utility_results
    assert result.call_id == call_id
    assert result.failure is not None
    assert result.failure.message == "no"


def test_a_session_that_lost_a_part_is_aborted() -> None:
    payload = msgspec.msgpack.encode(SessionPart(RequestId("s"), [1, 2]))
    abort = answer_bad_message(DecodeError("no", payload), 0, lambda answer: pytest.fail("it is no answer"))
    assert abort == AbortRequest([RequestId("s")], AbortReason.CLIENT)


def test_of_an_engine_only_the_progress_of_its_start_may_be_missed() -> None:
    refuse_bad_message(DecodeError("no", msgspec.msgpack.encode(["StartProgress", 5])))
    for payload in (b"", b"\xc1", msgspec.msgpack.encode(EngineCoreOutputs(0, 1))):
        with pytest.raises(EngineDeadError, match="cannot be decoded: no"):
            refuse_bad_message(DecodeError("no", payload))


def test_a_longer_array_is_read_as_well() -> None:
    assert read_head(msgspec.msgpack.encode(["UtilityCall", 5, *range(40)])) == ("UtilityCall", 5)


def test_a_configuration_is_not_waited_for_any_more() -> None:
    with pytest.raises(DecodeError):
        answers_to(msgspec.msgpack.encode(["Configure", 5]))


def test_whatever_came_is_read_without_an_error_and_what_is_nobodys_is_not_answered() -> None:
    draw = random.Random(3)
    for payload in [b"", b"\x92", b"\xdc", b"\x92\xd9", *(draw.randbytes(draw.randrange(30)) for _ in range(5000))]:
        read_head(payload)
    assert answers_to(b"\x92\xabUtilityCall\xa1x") == answers_to(b"\x92\xa5Drain\x01") == []
