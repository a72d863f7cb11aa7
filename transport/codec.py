"""Typed msgpack: a message to frames and back, arrays included; `DecodeError` is the only way decoding fails.

Bytes from another process are data, never code: no pickle, no class names, only what the declared type allows. A
decoder survives any bytes; what it raises names the field, and costs that message alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import UnionType
from typing import Any, Generic, TypeVar, get_args, get_origin

import msgspec
import numpy as np

from transport.tensors import Frame, decode_array, encode_array

T = TypeVar("T")

_ARRAY_CODE = 1
"""The msgpack extension type of an array."""


class DecodeError(Exception):
    """These frames are not a message of the expected type; the sender is at fault.

    Attributes:
        payload: The first of them, for whoever can make out whose it is.
    """

    def __init__(self, message: str, payload: Frame = b"") -> None:
        """Say what is wrong."""
        super().__init__(message)
        self.payload = payload


class Encoder:
    """Turns messages into frames. Not for two threads at a time."""

    def __init__(self) -> None:
        self._frames: list[Frame] = []
        self._msgpack = msgspec.msgpack.Encoder(enc_hook=self._encode_unknown)

    def encode(self, message: Any, buffer: bytearray | None = None) -> list[Frame]:
        """Return `message` as frames: the msgpack payload, then one frame for each large array, not copied.

        The payload is written into `buffer`, over what it holds, and is that very buffer. The other frames view the
        arrays' memory: leave it, and the buffer, unchanged until the message was written.

        Raises:
            TypeError: The message holds something that cannot be sent; the caller is at fault.
        """
        payload = bytearray() if buffer is None else buffer
        self._frames = [payload]
        try:
            self._msgpack.encode_into(message, payload)
            return self._frames
        finally:
            self._frames = []

    def _encode_unknown(self, value: Any) -> msgspec.msgpack.Ext:
        if isinstance(value, np.ndarray):
            return msgspec.msgpack.Ext(_ARRAY_CODE, encode_array(value, self._frames))
        raise TypeError(f"cannot send a {type(value).__qualname__}: use a struct, a plain value or a numpy array")


class Decoder(Generic[T]):
    """Turns frames into messages of one type. Not for two threads at a time."""

    def __init__(self, message_type: type[T] | UnionType) -> None:
        """Expect `message_type`; write `Decoder[A | B](A | B)` for a union, whose type cannot be inferred.

        Raises:
            TypeError: msgspec cannot decode such a type.
        """
        self._frames: Sequence[Frame] = ()
        self._viewed: set[int] = set()
        self._msgpack: msgspec.msgpack.Decoder[T] = msgspec.msgpack.Decoder(
            message_type, ext_hook=self._decode_extension, dec_hook=_check_array
        )

    def decode(self, frames: Sequence[Frame]) -> T:
        """Return the message; its arrays are read-only views of `frames`.

        Raises:
            DecodeError: Whatever is wrong with the frames, including what the message's own validation refuses.
        """
        self._frames, self._viewed = frames, {0}
        try:
            message = self._msgpack.decode(frames[0])
        except (msgspec.MsgspecError, ValueError, TypeError, LookupError, ArithmeticError) as error:
            raise DecodeError(f"{type(error).__name__}: {error}", *frames[:1]) from error
        except (RecursionError, MemoryError) as error:
            raise DecodeError(f"{type(error).__name__}: a message too deep or too large", *frames[:1]) from error
        finally:
            self._frames = ()
        if len(self._viewed) != len(frames):
            raise DecodeError(f"a message of {len(frames)} frames used {len(self._viewed)} of them", frames[0])
        return message

    def _decode_extension(self, code: int, data: memoryview) -> Any:
        if code != _ARRAY_CODE:
            raise ValueError(f"unknown msgpack extension {code}")
        array, frame = decode_array(data, self._frames)
        self._viewed.add(frame)
        return array


def _check_array(expected: Any, value: Any) -> Any:
    """Accept `value` for a field annotated as an array, whose dtype may be part of the annotation."""
    if (get_origin(expected) or expected) is not np.ndarray or not isinstance(value, np.ndarray):
        raise ValueError(f"expected {expected}, got {type(value).__name__}")
    for annotated in get_args(expected)[1:]:
        wanted = get_args(annotated)[0]
        if isinstance(wanted, type) and not np.issubdtype(value.dtype, wanted):
            raise ValueError(f"expected an array of {wanted.__name__}, got {value.dtype}")
    return value
