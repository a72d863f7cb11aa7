"""Whatever bytes come, a message of the protocol decodes or raises `DecodeError`, and costs itself alone."""

from __future__ import annotations

import random
import sys
from types import UnionType
from typing import get_args

import msgspec
import numpy as np
import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from engine.config import EngineConfig
from engine.errors import Cause
from engine.metrics import SchedulerStats
from engine.outputs import FinishReason, Logprobs, RequestId
from engine.protocol import (
    AbortReason,
    AbortRequest,
    ClientMessage,
    Configure,
    EngineCoreEvent,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineDead,
    EngineHello,
    EngineMessage,
    EngineReady,
    SessionPart,
    StartProgress,
    StepsRead,
    UtilityCall,
    UtilityResult,
    Verb,
)
from engine.sampling_params import SamplingParams
from transport.channel import ReceiveChannel
from transport.codec import DecodeError, Decoder, Encoder
from transport.zmq_socket import SocketKind, ZmqSocket, open_context

NUM_MUTANTS = 100_000

CAUSE = Cause("RuntimeError", "no", "Traceback ...", "weights 3/30", -9)
REQUEST = RequestId("chat-1-0.1z")
PARAMS = SamplingParams(temperature=0.7, top_k=5, stop=["\n\n"], logit_bias={5: 1.5}, max_tokens=20, seed=1 << 63)
LOGPROBS = Logprobs(
    *(np.arange(40).reshape(2, 20).astype(dtype) for dtype in (np.int32, np.float32)), np.arange(2, dtype=np.int32)
)


def plain(union: UnionType) -> list[msgspec.Struct]:
    """One of each of its types that says something without arguments."""
    needs = {kind: [field for field in msgspec.structs.fields(kind) if field.required] for kind in get_args(union)}
    return [kind() for kind, fields in needs.items() if not fields]


CLIENT_MESSAGES = [
    Configure(EngineConfig.of(model="null")),
    EngineCoreRequest(REQUEST, "chat-1", list(range(300)), PARAMS, 1.5, -3, "me", "salt", 1, 2, {"a": "b"}, {"x": [1]}),
    EngineCoreRequest(REQUEST, "", [1], SamplingParams(), 0.0),
    SessionPart(REQUEST, [5, 6, 7], PARAMS),
    AbortRequest([REQUEST, RequestId("")], AbortReason.STOP_STRING),
    StepsRead(1 << 40),
    *(UtilityCall(number, verb) for number, verb in enumerate(plain(Verb))),
    *plain(ClientMessage),
]
ENGINE_MESSAGES = [
    EngineHello(3, 4711),
    StartProgress("weights", 3, 30),
    EngineReady(0, 1000, 16, 8192, 1, 49152, "digest", 4711),
    EngineCoreOutputs(
        1,
        77,
        [
            EngineCoreOutput(REQUEST, [1, 2, 49151], LOGPROBS, LOGPROBS, events=[EngineCoreEvent("queued", 1.25)]),
            EngineCoreOutput(REQUEST, finish_reason=FinishReason.ERROR, stop_reason="repetition_detected", error=CAUSE),
            EngineCoreOutput(REQUEST, [5], turn_reason=FinishReason.STOP, stop_reason=7, num_cached_tokens=32),
        ],
        [UtilityResult(1, {"any": ["value", 1.5, None, b"x"]}), UtilityResult(2, None, CAUSE)],
        SchedulerStats(),
        timestamp=12.5,
    ),
    EngineDead(CAUSE),
    *plain(EngineMessage),
]
MESSAGES: list[tuple[UnionType, list[msgspec.Struct]]] = [
    (ClientMessage, CLIENT_MESSAGES),
    (EngineMessage, ENGINE_MESSAGES),
]


def encoded(message: msgspec.Struct) -> list[bytes]:
    return [bytes(frame) for frame in Encoder().encode(message)]


def mutate(draw: random.Random, frames: list[bytes], others: list[bytes]) -> list[bytes]:
    """Damage frames in one to three of many ways."""
    frames = list(frames)
    for _ in range(draw.randint(1, 3)):
        if not frames:
            return frames
        number = draw.randrange(len(frames))
        data = bytearray(frames[number])
        begin, end = sorted(draw.choices(range(len(data) + 1), k=2))
        way = draw.randrange(9)
        if way == 0 and data:
            data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
        elif way == 1 and data:  # what begins a length, an extension, a map, ...
            data[draw.randrange(len(data))] = draw.randrange(0x80, 0x100)
        elif way == 2:
            del data[begin:end]
        elif way == 3:
            data[begin:begin] = draw.randbytes(draw.randrange(9))
        elif way == 4:
            data[begin:begin] = data[begin:end]
        elif way == 5:
            other = draw.choice(others)
            data[begin:end] = other[begin:end]
        elif way == 6:
            del data[begin:]
        elif way == 7:
            frames.insert(draw.randrange(len(frames) + 1), bytes(data))
        else:
            del frames[number]
            continue
        frames[number] = bytes(data)
    return frames


@pytest.mark.parametrize("number", [0, 1], ids=["to the engine", "from the engine"])
def test_real_messages_cross_unchanged(number):
    message_type, messages = MESSAGES[number]
    assert {type(message) for message in messages} == set(get_args(message_type))
    decoder = Decoder(message_type)
    for message in messages:
        again = decoder.decode(encoded(message))
        assert type(again) is type(message)
        assert encoded(again) == encoded(message)


@pytest.mark.slow
@pytest.mark.parametrize("number", [0, 1], ids=["to the engine", "from the engine"])
def test_damaged_messages_decode_or_raise_decode_error(number):
    draw = random.Random(number)
    message_type, messages = MESSAGES[number]
    decoder = Decoder(message_type)
    originals = [encoded(message) for message in messages]
    payloads = [frames[0] for frames in originals]
    num_refused = 0
    for _ in range(NUM_MUTANTS // len(MESSAGES)):
        frames = mutate(draw, draw.choice(originals), payloads)
        try:
            decoded = decoder.decode(frames)
        except DecodeError:
            num_refused += 1
        else:
            assert isinstance(decoded, message_type)
    assert num_refused > NUM_MUTANTS // len(MESSAGES) // 10
    for message, frames in zip(messages, originals, strict=True):
        assert type(decoder.decode(frames)) is type(message)


@given(st.lists(st.binary(), max_size=3), st.sampled_from([ClientMessage, EngineMessage]))
def test_any_bytes_decode_or_raise_decode_error(frames, message_type):
    try:
        decoded = Decoder(message_type).decode(frames)
    except DecodeError:
        return
    assert isinstance(decoded, message_type)


@pytest.mark.parametrize("begin", [b"\xdd", b"\xdf", b"\xc6", b"\xdb", b"\xc9"])
def test_a_length_that_is_a_lie_takes_no_memory(begin):
    resource = pytest.importorskip("resource")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for message_type in (ClientMessage, EngineMessage):
        for head in (b"", b"\x92\xacAbortRequest", b"\x9c\xb1EngineCoreRequest\xa1x\xa0"):
            with pytest.raises(DecodeError):
                Decoder(message_type).decode([head + begin + b"\x7f\xff\xff\xff"])
    if sys.platform == "linux":
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10  # KiB


async def test_bad_messages_between_good_ones_cost_themselves_alone(tmp_path):
    draw = random.Random(5)
    originals = [encoded(message) for message in CLIENT_MESSAGES]
    payloads = [frames[0] for frames in originals]
    num_bad, num_good = 0, 50

    def count(error: DecodeError) -> None:
        nonlocal num_bad
        num_bad += 1

    async with (
        open_context() as context,
        ZmqSocket(context, SocketKind.PULL) as pull,
        ZmqSocket(context, SocketKind.PUSH) as push,
    ):
        push.connect(pull.bind(f"ipc://{tmp_path}/s"))
        receiver = ReceiveChannel[ClientMessage](pull, ClientMessage, on_bad_message=count)
        received: list[ClientMessage] = []
        with trio.fail_after(10):
            for number in range(num_good):
                await push.send([b"", *mutate(draw, draw.choice(originals), payloads)])
                await push.send(encoded(AbortRequest([RequestId(f"good {number}")])))
            while AbortRequest([RequestId(f"good {num_good - 1}")]) not in received:
                received += await receiver.receive_many()
    good = [f"good {number}" for number in range(num_good)]
    assert [m.request_ids[0] for m in received if isinstance(m, AbortRequest)] == good
    assert num_bad == num_good
