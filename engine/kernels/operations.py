"""The operations, as Python sees them: one struct a kind, mirrored in source/operations.h, and programs of them.

A `Program` is described once; each `run` is one call into C for all of it, during which the interpreter's lock is free.
Numbers travel as float32 between operations; products take rows in the form of their weight.
"""

from __future__ import annotations

import ctypes
import enum
from collections.abc import Sequence
from ctypes import c_float, c_int32, c_int64, c_void_p

import numpy as np
import torch
import torch.nn.functional as F

from engine.kernels.library import load

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

    @property
    def dtype(self) -> torch.dtype:
        """Torch's name for it."""
        return torch.float32 if self is Form.FLOAT32 else torch.bfloat16


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


class Team:
    """Threads that run programs, the caller's among them; `close` ends and joins the others."""

    def __init__(self, num_threads: int, spin: int, variant: str | None = None) -> None:
        """Start `num_threads` - 1 threads that spin for `spin` turns before they sleep.

        Raises:
            NoKernels: The operations cannot be had here.
            OSError: The system has no more threads.
        """
        self._library = load(variant)
        self._team = self._library.team_open(num_threads, spin)
        if not self._team:
            raise OSError(f"the system has no {num_threads} threads")

    def run(self, program: Program, step: Step) -> None:
        """Run `program` on the rows of `step`."""
        self._library.run(self._team, program.operations, len(program.operations), ctypes.addressof(step))

    def close(self) -> None:
        """End the threads and wait for them; idempotent."""
        team, self._team = self._team, None
        if team:
            self._library.team_close(team)


class Program:
    """A list of operations, and whatever memory they refer to."""

    def __init__(self, structs: Sequence[ctypes.Structure], memory: Sequence[object]) -> None:
        """Keep `structs` and `memory` alive for as long as the program."""
        self.operations = (c_void_p * len(structs))(*map(ctypes.addressof, structs))
        self._kept = (structs, memory)


class PackedWeight:
    """A weight `[num_outputs, num_inputs]` in panels of 32 outputs, padded with zeros."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, form: Form) -> None:
        """Pack `weight`, and `bias [num_outputs]` beside it."""
        self.form = form
        self.num_outputs, num_inputs = weight.shape
        rows = F.pad(weight.to(form.dtype), (0, -num_inputs % INPUT_MULTIPLE, 0, -self.num_outputs % PANEL))
        self.num_inputs = rows.shape[1]
        pair = 1 if form is Form.FLOAT32 else 2
        panels = rows.view(-1, PANEL, self.num_inputs // pair, pair)
        self.data = aligned(panels.transpose(1, 2))
        self.bias = None if bias is None else aligned(F.pad(bias.float(), (0, -self.num_outputs % PANEL)))


def interleaved(gate_up: torch.Tensor) -> torch.Tensor:
    """Return gate and up, one above the other in `[2 · inner, ...]`, in turns of 16 rows."""
    halves = gate_up.view(2, -1, LANES, *gate_up.shape[1:])
    return halves.transpose(0, 1).reshape(gate_up.shape)


def aligned(values: torch.Tensor) -> torch.Tensor:
    """Return a contiguous copy that begins at a multiple of 64 bytes."""
    room = zeros(values.numel(), values.dtype).view(values.shape)
    return room.copy_(values)


def zeros(count: int, dtype: torch.dtype) -> torch.Tensor:
    """Return `count` zeros that begin at a multiple of 64 bytes."""
    room = torch.zeros(count * dtype.itemsize + 64, dtype=torch.uint8)
    first = -room.data_ptr() % 64
    return room[first : first + count * dtype.itemsize].view(dtype)


def pointer(values: torch.Tensor | np.ndarray | None) -> int | None:
    """Return the address of the first number, for a struct; whoever builds the program keeps `values` alive."""
    if values is None:
        return None
    return values.data_ptr() if isinstance(values, torch.Tensor) else values.ctypes.data
