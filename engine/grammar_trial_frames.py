"""What the engine and a process in which grammars are tried say to each other, each with its length before it."""

from __future__ import annotations

import struct

import msgspec

from engine.structured_output.params import StructuredOutputsParams

_LENGTH = struct.Struct("<I")
HEADER_SIZE = _LENGTH.size
"""How many bytes of a frame say how many follow."""


class Trial(msgspec.Struct, frozen=True):
    """What is to be tried, and the processor time, in seconds, that it may take."""

    asked: StructuredOutputsParams
    share_s: float


class Answer(msgspec.Struct, frozen=True):
    """What a trial found: the grammar, or why it is refused, be it only for the time that this trial had.

    Attributes:
        lark: The grammar as text.
        refusal: Why there is none.
        takes_longer: Whether that is the time.
        within_s: The time that the trial had.
    """

    lark: str = ""
    refusal: str | None = None
    takes_longer: bool = False
    within_s: float = 0.0


def encode_frame(message: Trial | Answer) -> bytes:
    """Return `message` with its length before it."""
    body = msgspec.msgpack.encode(message)
    return _LENGTH.pack(len(body)) + body


def frame_size(header: bytes) -> int:
    """Return how many bytes follow a frame's header."""
    size: int = _LENGTH.unpack(header)[0]
    return size
