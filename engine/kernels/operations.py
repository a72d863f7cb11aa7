"""The operations, as Python sees them: one struct a kind, mirrored in source/operations.h, and programs of them.

A `Program` is described once; each `run` is one call into C for all of it, during which the interpreter's lock is free.
Numbers travel as float32 between operations, or in the form that the next product takes: that of its weight.
"""

from __future__ import annotations

import ctypes
import enum
from collections.abc import Sequence
from ctypes import c_float, c_int32, c_int64, c_void_p
from functools import partial
from typing import Any

import torch

from engine.kernels.memory import pointer, zeros

LANES = 16
"""Sizes of rows and heads must be multiples of it."""
PANEL = 2 * LANES
INPUT_MULTIPLE = 64
"""Inputs of a product are padded with zeros to a multiple of it."""
ROW_MULTIPLE = 32
"""Inputs of products have room for whole tiles of so many rows."""
MAX_HEAD = 256
STACK_BYTES = 1 << 20
"""Of a thread: more than twice what the largest operation takes."""


class Form(enum.IntEnum):
    """What weights, the inputs of products, and K/V pages are stored as."""

    FLOAT32 = 0
    BFLOAT16 = 1
    INT8 = 2
    INT4 = 3

    @classmethod
    def of(cls, quantization: str, dtype: torch.dtype) -> Form:
        """Return what numbers of `dtype` are stored as where `quantization` is asked for, or "none"."""
        if quantization != "none":
            return cls[quantization.upper()]
        return cls.FLOAT32 if dtype == torch.float32 else cls.BFLOAT16

    @classmethod
    def of_pages(cls, dtype: torch.dtype) -> Form:
        """Return what keys and values of `dtype` are stored as."""
        return cls.INT8 if dtype == torch.int8 else cls.of("none", dtype)

    def row_bytes(self, num_inputs: int) -> int:
        """Return the bytes of a row of inputs beside weights of this form, with its scales and sums."""
        if self is Form.INT8:
            return num_inputs + 4 * (num_inputs // WIDE_GROUP + 1)
        if self is Form.INT4:
            return num_inputs + 8 * (num_inputs // GROUP)
        return DTYPES[self].itemsize * num_inputs

    def panel_bytes(self, num_inputs: int) -> int:
        """Return the bytes of a panel of weights of this form."""
        if self is Form.INT4:
            return num_inputs // GROUP * (GROUP // 2 * PANEL + 4 * PANEL)
        return PANEL * num_inputs * (1 if self is Form.INT8 else DTYPES[self].itemsize)

    def query_bytes(self, head_size: int) -> int:
        """Return the bytes of a query beside keys of this form."""
        quantized = -(-head_size // GROUP) * (GROUP + 8)
        return {Form.FLOAT32: 4 * head_size, Form.BFLOAT16: 2 * head_size}.get(self, quantized)

    def token_bytes(self, head_size: int) -> int:
        """Return the bytes that a token's key and value take in the pages of one head."""
        return 2 * {Form.FLOAT32: 4 * head_size, Form.BFLOAT16: 2 * head_size}.get(self, head_size + 4)


GROUP = 32
"""Inputs that share a scale beside INT4 weights; beside INT8 it is `WIDE_GROUP`."""
WIDE_GROUP = 64
DTYPES = {Form.FLOAT32: torch.float32, Form.BFLOAT16: torch.bfloat16}
"""Torch's names for what is not quantized."""


class Kind(enum.IntEnum):
    """Which operation a struct is."""

    EMBED = 0
    NORM = 1
    LINEAR = 2
    ROTATE = 3
    ATTEND = 4
    CAP = 5
    GREATEST = 6


class Epilogue(enum.IntEnum):
    """What becomes of a product."""

    STORE = 0
    ADD = 1
    GATE = 2


ACTIVATIONS = {"silu": 0, "gelu_tanh": 1}


def _fields(*kinds: tuple[type[ctypes._SimpleCData[Any]], str]) -> list[tuple[str, Any]]:
    """Return the fields of a struct: of each kind those named."""
    return [(name, kind) for kind, names in kinds for name in names.split()]


class Step(ctypes.Structure):
    """The rows of a step; see operations.h."""

    _fields_ = _fields(
        (c_int64, "num_rows num_requests max_blocks num_groups head"),
        (c_void_p, "token_ids positions requests block_tables times"),
    )


class Embed(ctypes.Structure):
    """Rows of a packed weight, scaled."""

    _fields_ = _fields((c_int32, "kind form size num_inputs"), (c_float, "scale"), (c_void_p, "weight scales out"))


class Norm(ctypes.Structure):
    """RMS norm of each part of a row, or only a change of form."""

    _fields_ = _fields(
        (c_int32, "kind form size num_parts adds"),
        (c_float, "epsilon multiplier"),
        (c_void_p, "weight in_"),
        (c_int64, "in_stride"),
        (c_void_p, "out"),
        (c_int64, "out_stride"),
    )


class Product(ctypes.Structure):
    """Rows times a packed weight."""

    _fields_ = _fields(
        (c_int32, "kind form num_outputs num_inputs epilogue activation out_form"),
        (c_float, "multiplier"),
        (c_void_p, "weight scales bias in_ out"),
        (c_int64, "out_stride"),
    )


class PagePlaces(ctypes.Structure):
    """Where the pages of a layer lie."""

    _fields_ = _fields((c_void_p, "first"), (c_int64, "block_bytes"), (c_int32, "block_size"))


class Rotate(ctypes.Structure):
    """Rotation of queries and keys; keys and values go to the pages."""

    _fields_ = [
        *_fields((c_int32, "kind form num_heads num_kv_heads head_size rotary_size group")),
        ("places", PagePlaces),
        *_fields((c_void_p, "cosines sines qkv queries")),
    ]


class Attend(ctypes.Structure):
    """Rows over the keys up to their own."""

    _fields_ = [
        *_fields((c_int32, "kind form num_heads num_kv_heads head_size window group out_form")),
        ("places", PagePlaces),
        *_fields((c_float, "scale cap"), (c_void_p, "sinks queries out"), (c_int64, "out_stride")),
    ]


class Cap(ctypes.Structure):
    """Division and a bound by tanh."""

    _fields_ = _fields((c_int32, "kind size"), (c_float, "divisor cap"), (c_void_p, "rows"))


class Greatest(ctypes.Structure):
    """Of each row the greatest number and where it is."""

    _fields_ = _fields((c_int32, "kind size"), (c_void_p, "rows values places"))


class Program:
    """A list of operations, and whatever memory they refer to."""

    def __init__(self, structs: Sequence[ctypes.Structure], memory: Sequence[object]) -> None:
        """Keep `structs` and `memory` alive for as long as the program."""
        self._operations = (c_void_p * len(structs))(*map(ctypes.addressof, structs))
        self._kept = (structs, memory)

    def run(self, step: Step, team: Team, most_threads: int | None = None) -> None:
        """Run all on the rows of `step`, by as many threads at most; raises MemoryError."""
        num_threads = min(team.num_threads, most_threads or team.num_threads)
        if team.run(num_threads, self._operations, len(self._operations), ctypes.addressof(step)):
            raise MemoryError("there is no memory for the threads' partial sums")


class Team:
    """The code that a call runs, and what the threads of a call need; one call at a time.

    Attributes:
        num_threads: The caller and those that it starts.
        run: `run` of source/kernels.c, but for what is the team's.
    """

    def __init__(self, library: ctypes.CDLL, num_threads: int, spin_ns: int) -> None:
        """Run `library` by `num_threads`, which spin for `spin_ns` before they sleep.

        Raises:
            MemoryError: A page below a stack cannot be guarded.
            OSError: There is no memory for the stacks.
        """
        self.num_threads = num_threads
        self._library = library
        self._stacks = zeros(num_threads * STACK_BYTES, torch.uint8, is_huge=False)  # taken as far as it is used
        if not library.guard(pointer(self._stacks), STACK_BYTES, num_threads):
            raise MemoryError("a page below a stack cannot be guarded")
        self.run = partial(library.run, spin_ns, pointer(self._stacks), STACK_BYTES)


def greatest(team: Team, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the greatest number of each row of `rows [n, size]`, float32, NaN if one is, and the first index of it."""
    rows = rows.contiguous()
    values, places = torch.empty(len(rows)), torch.empty(len(rows), dtype=torch.int64)
    operation = Greatest(Kind.GREATEST, rows.shape[1], pointer(rows), pointer(values), pointer(places))
    most_threads = 1 + len(rows) // 16  # a thread takes its time to start
    Program([operation], ()).run(Step(num_rows=len(rows)), team, most_threads)
    return values, places
