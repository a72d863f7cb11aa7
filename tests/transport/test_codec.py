from __future__ import annotations

import contextlib
import enum
from typing import Any

import hypothesis.extra.numpy as hnp
import msgspec
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from transport.codec import DecodeError, Decoder, Encoder
from transport.tensors import MAX_INLINE_BYTES

NUMBERS = ("bool", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8", "c8", "c16")


class Kind(enum.StrEnum):
    LEFT = "left"
    RIGHT = "right"


class Leaf(msgspec.Struct, array_like=True, tag=True, frozen=True):
    token_ids: npt.NDArray[np.int32]
    anything: Any = None


class Branch(msgspec.Struct, array_like=True, tag=True, frozen=True):
    name: str
    kind: Kind
    leaves: list[Leaf]
    arrays: dict[str, np.ndarray]
    weight: float = 0.0

    def __post_init__(self) -> None:
        if self.weight > 100:
            raise ValueError(f"weight {self.weight} is above 100")


Tree = Leaf | Branch
encoder = Encoder()
decoder = Decoder[Tree](Tree)


def arrays(*dtypes: str) -> st.SearchStrategy[np.ndarray]:
    shapes = hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=9)
    return st.sampled_from(dtypes or NUMBERS).flatmap(lambda dtype: hnp.arrays(np.dtype(dtype), shapes))


leaves = st.builds(Leaf, arrays("i4"), st.none() | st.integers(-5, 5) | st.binary(max_size=9) | arrays())
branches = st.builds(
    Branch,
    st.text(max_size=9),
    st.sampled_from(Kind),
    st.lists(leaves, max_size=3),
    st.dictionaries(st.text(max_size=3), arrays(), max_size=3),
    st.floats(-100, 100),
)
trees = leaves | branches


def plain(value: Any) -> Any:
    """The same value with arrays as comparable tuples."""
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.shape, value.tobytes()
    if isinstance(value, msgspec.Struct):
        return type(value), [plain(field) for field in msgspec.structs.astuple(value)]
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, list) else value


@pytest.mark.slow
@given(trees)
def test_nested_structs_with_arrays_survive_the_round_trip(tree):
    frames = [bytes(frame) for frame in encoder.encode(tree)]
    decoded = decoder.decode(frames)
    assert plain(decoded) == plain(tree)


@pytest.mark.parametrize("dtype", NUMBERS)
@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (5,), (40, 7)])
def test_every_number_type_and_shape_survives(dtype, shape):
    array = np.arange(int(np.prod(shape))).reshape(shape).astype(dtype)
    decoded = Decoder(np.ndarray).decode(encoder.encode(array))
    assert plain(decoded) == plain(array)


def test_small_arrays_travel_inline_and_large_ones_as_views_of_their_memory():
    small, large = np.zeros(MAX_INLINE_BYTES, np.uint8), np.zeros(MAX_INLINE_BYTES + 1, np.uint8)
    frames = encoder.encode([small, large])
    assert len(frames) == 2
    assert np.shares_memory(np.frombuffer(frames[1], np.uint8), large)
    decoded = Decoder(list[np.ndarray]).decode(frames)
    assert np.shares_memory(decoded[1], large)
    for array in decoded:
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 1


def test_a_strided_array_arrives_in_c_order():
    array = np.arange(600, dtype=np.int32).reshape(20, 30).T[::2]
    decoded = Decoder(np.ndarray).decode(encoder.encode(array))
    assert np.array_equal(decoded, array)
    assert decoded.flags.c_contiguous


@pytest.mark.parametrize(
    "value",
    [
        np.array([object()]),
        np.zeros(2, "V8"),
        np.zeros(2, "i4,f4"),
        np.array(["text"]),
        np.zeros(2, "M8[s]"),
        np.zeros(2, np.dtype("i4").newbyteorder()),
        np.int64(3),
        object(),
        lambda: None,
    ],
    ids=repr,
)
def test_what_cannot_be_sent_is_refused_by_name_and_the_encoder_goes_on(value):
    with pytest.raises(TypeError, match="cannot send a"):
        encoder.encode({"value": value})
    assert Decoder(int).decode(encoder.encode(3)) == 3


@pytest.mark.parametrize("dtype", ["|O", "|V8", "<U4", "i4,i4", ">i4", "float32", "", "(2,)i4", "<f16"])
def test_a_dtype_that_is_not_a_plain_number_is_not_decoded(dtype):
    assert_refused(dtype, (1,), b"\0" * 8)


@pytest.mark.parametrize(
    ("shape", "data"),
    [
        ((-1,), b"\0" * 4),
        ((-1, -1), b"\0" * 4),
        ((2,), b"\0" * 4),
        ((0,), b"\0"),
        ((2**62, 4), b""),
        ((0, 2**63), b""),
        ((1,) * 65, b"\0" * 4),
        ((1,), 0),
        ((1,), -1),
        ((1,), 1),
        ((1,), 2**70),
        (("1",), b"\0" * 4),
        ((1.0,), b"\0" * 4),
        (1, b"\0" * 4),
        ((1,), "text"),
        ((1,), None),
    ],
)
def test_shapes_and_frames_that_do_not_fit_are_not_decoded(shape, data):
    assert_refused("<i4", shape, data)


def assert_refused(dtype: object, shape: object, data: object) -> None:
    try:
        described = msgspec.msgpack.encode([dtype, shape, data])
    except OverflowError:
        described = b"\xc1"
    payload = msgspec.msgpack.encode(msgspec.msgpack.Ext(1, described))
    for expected in (np.ndarray, Any):
        with pytest.raises(DecodeError):
            Decoder(expected).decode([payload])


def test_the_annotated_dtype_is_checked():
    typed = Decoder[npt.NDArray[np.int32]](npt.NDArray[np.int32])
    assert typed.decode(encoder.encode(np.arange(3, dtype=np.int32))).tolist() == [0, 1, 2]
    with pytest.raises(DecodeError, match="int32, got float32"):
        typed.decode(encoder.encode(np.zeros(3, np.float32)))
    with pytest.raises(DecodeError, match="got list"):
        typed.decode(encoder.encode([1, 2]))
    floating = Decoder[npt.NDArray[np.floating]](npt.NDArray[np.floating])
    assert floating.decode(encoder.encode(np.zeros(3, np.float16))).dtype == np.float16


def test_the_number_of_frames_is_checked():
    frames = encoder.encode(np.zeros(300, np.uint8))
    for wrong in ([], frames[:1], [*frames, b"more"], [b""], [frames[1], frames[0]]):
        with pytest.raises(DecodeError):
            Decoder(np.ndarray).decode(wrong)


def test_a_messages_own_validation_is_the_senders_fault():
    payload = encoder.encode(["Branch", "name", "left", [], {}, 101.0])
    with pytest.raises(DecodeError, match=r"weight 101.0 is above 100"):
        decoder.decode(payload)


@pytest.mark.parametrize(
    "payload",
    [b"\x91" * 100_000, b"\xdd\xff\xff\xff\xff", b"\xdb\xff\xff\xff\xff", b"\xc9\xff\xff\xff\xff\x01", b"\xc1", b""],
    ids=lambda payload: f"{payload[:6].hex()}…{len(payload)}",
)
def test_depth_and_size_bombs_are_refused(payload):
    for expected in (Any, Tree):
        with pytest.raises(DecodeError):
            Decoder[Any](expected).decode([payload])


@given(st.lists(st.binary(max_size=400), max_size=4), st.sampled_from([Any, np.ndarray, Tree]))
def test_any_bytes_decode_or_raise_decode_error(frames, expected):
    try_to_decode(expected, frames)


@pytest.mark.slow
@settings(max_examples=200)
@given(st.data())
def test_damaged_messages_decode_or_raise_decode_error(data):
    frames = [bytearray(frame) for frame in encoder.encode(data.draw(trees))]
    for _ in range(data.draw(st.integers(1, 4))):
        frame = data.draw(st.sampled_from(frames))
        if frame:
            at = data.draw(st.integers(0, len(frame) - 1))
            frame[at : at + data.draw(st.integers(0, 2))] = data.draw(st.binary(max_size=2))
    try_to_decode(Tree, frames)
    try_to_decode(Tree, data.draw(st.permutations(frames)))


def try_to_decode(expected: Any, frames: list[Any]) -> None:
    with contextlib.suppress(DecodeError):
        Decoder[Any](expected).decode(frames)
