"""The operations, as Python sees them: one struct a kind, mirrored in source/operations.h, and programs of them.

A `Program` is described once; each `run` is one call into C for all of it, during which the interpreter's lock is free.
Numbers travel as float32 between operations; products take rows in the form of their weight.
"""

from __future__ import annotations

import contextlib
import ctypes
import enum
import mmap
from collections.abc import Sequence
from ctypes import c_float, c_int32, c_int64, c_void_p
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

LANES = 16
"""Sizes of rows and heads must be multiples of it."""
PANEL = 2 * LANES
INPUT_MULTIPLE = 64
"""Inputs of a product are padded with zeros to a multiple of it."""
ROW_MULTIPLE = 32
"""Inputs of products have room for whole tiles of so many rows."""
MAX_HEAD = 256


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

    @property
    def of_inputs(self) -> Form:
        """What rows are brought into before a product with weights of this form."""
        return Form.INT8 if self is Form.INT4 else self

    def row_bytes(self, num_inputs: int) -> int:
        """Return the bytes of a row of inputs, with its scales and sums."""
        return {Form.FLOAT32: 4 * num_inputs, Form.BFLOAT16: 2 * num_inputs}.get(self, num_inputs + num_inputs // GROUP * 8)


    def query_bytes(self, head_size: int) -> int:
        """Return the bytes of a query beside keys of this form."""
        return self.row_bytes(head_size + (-head_size % GROUP if self is Form.INT8 else 0))

    def token_bytes(self, head_size: int) -> int:
        """Return the bytes that a token's key and value take in the pages of one head."""
        return 2 * {Form.FLOAT32: 4 * head_size, Form.BFLOAT16: 2 * head_size}.get(self, head_size + 4)


GROUP = 32
"""Inputs that share a scale."""
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


class Epilogue(enum.IntEnum):
    """What becomes of a product."""

    STORE = 0
    ADD = 1
    GATE = 2


ACTIVATIONS = {"silu": 0, "gelu_tanh": 1}


class Step(ctypes.Structure):
    """The rows of a step; see operations.h."""

    _fields_ = [
        ("num_rows", c_int64),
        ("num_requests", c_int64),
        ("max_blocks", c_int64),
        ("num_groups", c_int64),
        ("token_ids", c_void_p),
        ("positions", c_void_p),
        ("requests", c_void_p),
        ("block_tables", c_void_p),
        ("times", c_void_p),
    ]


class Embed(ctypes.Structure):
    """Rows of a table, scaled."""

    _fields_ = [("kind", c_int32), ("form", c_int32), ("size", c_int32), ("scale", c_float)] + [
        ("table", c_void_p),
        ("out", c_void_p),
    ]


class Norm(ctypes.Structure):
    """RMS norm of each part of a row, or only a change of form."""

    _fields_ = [(name, c_int32) for name in ("kind", "form", "size", "num_parts", "adds")] + [
        ("epsilon", c_float),
        ("multiplier", c_float),
        ("weight", c_void_p),
        ("in_", c_void_p),
        ("in_stride", c_int64),
        ("out", c_void_p),
        ("out_stride", c_int64),
    ]


class Product(ctypes.Structure):
    """Rows times a packed weight."""

    _fields_ = [
        (name, c_int32) for name in ("kind", "form", "num_outputs", "num_inputs", "epilogue", "activation")
    ] + [
        ("multiplier", c_float),
        ("weight", c_void_p),
        ("scales", c_void_p),
        ("bias", c_void_p),
        ("in_", c_void_p),
        ("out", c_void_p),
        ("out_stride", c_int64),
    ]


class Rotate(ctypes.Structure):
    """Rotation of queries and keys; keys and values go to the pages."""

    _fields_ = [
        (name, c_int32)
        for name in ("kind", "form", "num_heads", "num_kv_heads", "head_size", "rotary_size", "group", "block_size")
    ] + [(name, c_void_p) for name in ("cosines", "sines", "qkv", "queries", "pages")]


class Attend(ctypes.Structure):
    """Rows over the keys up to their own."""

    _fields_ = [
        (name, c_int32)
        for name in ("kind", "form", "num_heads", "num_kv_heads", "head_size", "window", "group", "block_size")
    ] + [("scale", c_float), ("cap", c_float)] + [(name, c_void_p) for name in ("sinks", "queries", "pages", "out")]


class Cap(ctypes.Structure):
    """Division and a bound by tanh."""

    _fields_ = [("kind", c_int32), ("size", c_int32), ("divisor", c_float), ("cap", c_float), ("rows", c_void_p)]


class Program:
    """A list of operations, and whatever memory they refer to."""

    def __init__(self, structs: Sequence[ctypes.Structure], memory: Sequence[object]) -> None:
        """Keep `structs` and `memory` alive for as long as the program."""
        self._operations = (c_void_p * len(structs))(*map(ctypes.addressof, structs))
        self._kept = (structs, memory)

    def run(self, step: Step, team: Team) -> None:
        """Run all on the rows of `step`; raises MemoryError."""
        count = len(self._operations)
        if team.library.run(team.num_threads, team.spin_ns, self._operations, count, ctypes.addressof(step)):
            raise MemoryError("there is no memory for the threads' partial sums")


class Team(NamedTuple):
    """The code that a call runs, by how many threads, and how long they spin before they sleep."""

    library: ctypes.CDLL
    num_threads: int
    spin_ns: int


class PackedWeight:
    """A weight `[num_outputs, num_inputs]` in panels of 32 outputs, padded with zeros; see operations.h."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, form: Form) -> None:
        """Pack `weight`, and `bias [num_outputs]` beside it."""
        self.form = form
        self.num_outputs, num_inputs = weight.shape
        missing = -self.num_outputs % PANEL
        rows = F.pad(weight, (0, -num_inputs % INPUT_MULTIPLE, 0, missing))
        self.num_inputs = rows.shape[1]
        self.scales: torch.Tensor | None = None
        if form is Form.INT4:
            self.data = aligned(_int4(rows))
        elif form is Form.INT8:
            scales = rows.float().abs().amax(dim=1).div(127).clamp(min=torch.finfo(torch.float32).tiny)
            whole = (rows.float() / scales[:, None]).round() + 128
            self.scales = aligned(scales)
            self.data = aligned(_panels(whole.to(torch.uint8), 4))
        else:
            self.data = aligned(_panels(rows.to(DTYPES[form]), 1 if form is Form.FLOAT32 else 2))
        self.bias = None if bias is None else aligned(F.pad(bias.float(), (0, missing)))


def _panels(rows: torch.Tensor, num_together: int) -> torch.Tensor:
    """`[panels * 32, inputs]` → `[panels, inputs / num_together, 32, num_together]`."""
    return rows.view(-1, PANEL, rows.shape[1] // num_together, num_together).transpose(1, 2)


def _int4(rows: torch.Tensor) -> torch.Tensor:
    """Return `rows [panels * 32, inputs]` as bytes `[panels, inputs / 32, 640]`, each group between its extremes."""
    groups = rows.float().view(len(rows), -1, GROUP)
    least = groups.amin(dim=2, keepdim=True).half()
    factor = ((groups.amax(dim=2, keepdim=True) - least.float()) / 15).half()
    whole = ((groups - least.float()) / factor.float().clamp(min=torch.finfo(torch.float16).tiny)).round().clamp(0, 15)
    return _int4_panels(whole.to(torch.uint8), factor, least)


def _int4_panels(numbers: torch.Tensor, factor: torch.Tensor, least: torch.Tensor) -> torch.Tensor:
    """Pack numbers of 0 to 15 `[rows, groups, 32]` with float16 `[rows, groups, 1]`."""
    num_groups = numbers.shape[1]
    halves = numbers.view(-1, PANEL, num_groups, 2, 4, 4)
    both = halves[:, :, :, 0] | halves[:, :, :, 1] << 4
    panels = both.permute(0, 2, 3, 1, 4).reshape(-1, num_groups, GROUP // 2 * PANEL)
    parts = [part.view(-1, PANEL, num_groups).transpose(1, 2).contiguous().view(torch.uint8) for part in (factor, least)]
    return torch.cat((panels, *parts), dim=2)


def interleaved(gate_up: torch.Tensor) -> torch.Tensor:
    """Return gate and up, one above the other in `[2 · inner, ...]`, in turns of 16 rows."""
    halves = gate_up.view(2, -1, LANES, *gate_up.shape[1:])
    return halves.transpose(0, 1).reshape(gate_up.shape)


def aligned(values: torch.Tensor) -> torch.Tensor:
    """Return a contiguous copy that begins at a multiple of 64 bytes."""
    room = zeros(values.numel(), values.dtype).view(values.shape)
    return room.copy_(values)


def zeros(count: int, dtype: torch.dtype) -> torch.Tensor:
    """Return `count` zeros that begin at a multiple of 64 bytes, in huge pages where the system has them.

    Memory is taken when it is first written. Huge pages make a step a third faster: it reads each weight once.
    """
    room = mmap.mmap(-1, max(1, count * dtype.itemsize))
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without them
            room.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(room, dtype=dtype, count=count)


def pointer(values: torch.Tensor | np.ndarray | None) -> int | None:
    """Return the address of the first number, for a struct; whoever builds the program keeps `values` alive."""
    if values is None:
        return None
    return values.data_ptr() if isinstance(values, torch.Tensor) else values.ctypes.data
