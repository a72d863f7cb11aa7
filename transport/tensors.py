"""Arrays on the wire: `(dtype, shape, data)`, where data is the bytes themselves or the number of an extra frame.

::

    msgpack payload  [ ... ext 1: ["<i4", [2, 3], b"..."] ... ext 1: ["<f4", [64, 4096], 1] ... ]   frame 0
    array memory     [ 1 MiB ]                                                                      frame 1

Large arrays are referred to, never copied: whoever sends one leaves it unchanged from then on. What arrives is a
read-only view of the frame. Only plain numbers travel: an object dtype would need pickle, a void one its own schema.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

Frame = bytes | bytearray | memoryview
"""One part of a message; contiguous."""

MAX_INLINE_BYTES = 255
"""Larger arrays get a frame of their own; below, one costs more than the copy it saves."""

_DTYPES: dict[str, np.dtype[Any]] = {
    np.dtype(name).str: np.dtype(name)
    for name in (
        *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
        *("float16", "float32", "float64", "complex64", "complex128"),
    )
}


class _WireArray(msgspec.Struct, array_like=True):
    dtype: str
    shape: tuple[int, ...]
    data: int | bytes


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(_WireArray)


def encode_array(array: npt.NDArray[Any], frames: list[Frame]) -> bytes:
    """Return the wire form of `array`; append a view of its memory to `frames` where it is too large to inline.

    A non-contiguous array is copied once; its order becomes C.

    Raises:
        TypeError: The dtype is not one of the plain numbers in this machine's byte order.
    """
    dtype = array.dtype.str
    if dtype not in _DTYPES:
        raise TypeError(
            f"cannot send an array of dtype {array.dtype}: use one of {', '.join(map(str, _DTYPES.values()))}"
        )
    data: int | bytes
    if array.nbytes <= MAX_INLINE_BYTES:
        data = array.tobytes()
    else:
        frames.append(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
        data = len(frames) - 1
    return _encoder.encode(_WireArray(dtype, array.shape, data))


def decode_array(wire: Frame, frames: Sequence[Frame]) -> tuple[npt.NDArray[Any], int]:
    """Return the read-only array that `wire` describes and the number of the frame it views, 0 if inline.

    Raises:
        ValueError: dtype, shape, frame number and number of bytes do not describe an array.
    """
    described = _decoder.decode(wire)
    dtype = _DTYPES.get(described.dtype)
    if dtype is None:
        raise ValueError(f"dtype {described.dtype!r:.40} is not one that may be sent")
    if any(size < 0 for size in described.shape):
        raise ValueError(f"shape {described.shape} has a negative size")
    if isinstance(described.data, bytes):
        frame, data = 0, memoryview(described.data)
    else:
        frame = described.data
        if not 0 < frame < len(frames):
            raise ValueError(f"an array refers to frame {frame} of a message of {len(frames)}")
        data = memoryview(frames[frame])
    wanted_bytes = math.prod(described.shape) * dtype.itemsize
    if data.nbytes != wanted_bytes:
        raise ValueError(
            f"shape {described.shape} of {dtype} takes {wanted_bytes} bytes, not the {data.nbytes} that came"
        )
    array = np.ndarray(described.shape, dtype, buffer=data)
    array.flags.writeable = False
    return array, frame
