"""The table of verbs: what is in it survives the wire, what is not in it does not exist."""

from __future__ import annotations

from typing import Any, get_args

import msgspec
import pytest

from engine.errors import Cause, UtilityError, UtilityTimeout
from engine.metrics import SchedulerStats
from engine.protocol import UtilityCall
from engine.verbs import (
    AddLora,
    CollectiveRpc,
    GetStats,
    Pause,
    PauseMode,
    PinLora,
    RemoveLora,
    SaveShardedState,
    Sleep,
    SleepTag,
    Verb,
    WakeUp,
    plain_value,
    read_verb,
    value_of,
)
from transport.codec import Decoder, Encoder

ARGUMENTS: dict[type, tuple[Any, ...]] = {
    AddLora: ("a", "/folder"),
    RemoveLora: (1,),
    PinLora: (1,),
    SaveShardedState: ("/folder", 7),
    CollectiveRpc: ("ping", [1, {"a": None}]),
    Pause: (PauseMode.KEEP, False),
    Sleep: (2, PauseMode.WAIT),
    WakeUp: ([SleepTag.WEIGHTS],),
}


@pytest.mark.parametrize("kind", get_args(Verb), ids=lambda kind: kind.__name__)
def test_every_verb_is_read_as_it_was_sent_with_and_without_a_wire(kind: type) -> None:
    verb = kind(*ARGUMENTS.get(kind, ()))
    call = UtilityCall(7, verb)
    received = Decoder(UtilityCall).decode(Encoder().encode(call))
    assert received.call_id == 7
    assert read_verb(received.verb) == read_verb(call.verb) == verb
    assert type(read_verb(received.verb)) is kind
    assert kind.timeout_s > 0


@pytest.mark.parametrize("sent", [["Shutdown"], ["shutdown"], ["__class__"], ["Verb"], [], "Pause", 5, None, {}, [[]]])
def test_what_is_not_in_the_table_is_no_verb_whatever_its_name(sent: Any) -> None:
    with pytest.raises(ValueError, match=r"there is no verb .*; known are AddLora, CollectiveRpc"):
        read_verb(sent)


@pytest.mark.parametrize(
    ("sent", "fault"),
    [
        (["Pause", "abrupt"], "Invalid enum value 'abrupt'"),
        (Pause("abrupt"), "Invalid enum value 'abrupt'"),  # type: ignore[arg-type]
        (["Pause", 1], "Expected `str`, got `int`"),
        (["Sleep", 3], "Expected `int` <= 2"),
        (["Sleep", True], "Expected `int`, got `bool`"),
        (["WakeUp", ["everything"]], "Invalid enum value 'everything'"),
        (["RemoveLora"], "Expected `array` of at least length 2"),
    ],
)
def test_a_wrong_argument_is_named(sent: Any, fault: str) -> None:
    with pytest.raises(ValueError, match=f"wrong argument: {fault}"):
        read_verb(sent)


def test_an_answer_comes_in_the_verbs_own_type_and_a_failure_as_one_sentence() -> None:
    stats = SchedulerStats(num_running=3)
    assert value_of(GetStats(), plain_value(stats), None) == stats
    with pytest.raises(UtilityError) as failure:
        value_of(Pause(), None, Cause("ValueError", "help!"))
    assert str(failure.value) == "Call to Pause failed: ValueError: help!"
    assert (failure.value.cause.type, failure.value.status_hint) == ("ValueError", 400)


@pytest.mark.parametrize("value", [object(), {1: object()}, 2**70, 1j, "\ud800"])
def test_what_cannot_be_sent_is_refused_before_it_is(value: Any) -> None:
    with pytest.raises((TypeError, ValueError, OverflowError)):
        plain_value(value)


def test_a_timeout_is_a_utility_error_too() -> None:
    timeout = UtilityTimeout("Pause", 2.0)
    assert isinstance(timeout, TimeoutError)
    assert isinstance(timeout, UtilityError)
    assert str(timeout) == "Call to Pause failed: UtilityTimeout: no answer within 2 seconds; it may still come"


def test_plain_values_equal_those_that_crossed_a_wire() -> None:
    value = {"a": [1, 2.5, None, "x"], "b": {"c": (1, 2)}}
    assert plain_value(value) == msgspec.msgpack.decode(msgspec.msgpack.encode(value))
