"""Weights in the forms and the order that the operations in C take; see source/operations.h."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
import torch.nn.functional as F

from engine.kernels.memory import Arena
from engine.kernels.operations import DTYPES, GROUP, INPUT_MULTIPLE, LANES, PANEL, Form

PANELS_AT_ONCE = 8
"""Panels that are packed together: what is held beside a weight meanwhile is little."""


class Int4(NamedTuple):
    """A weight in 4 bits: each group of 32 inputs is number times factor plus least.

    Attributes:
        numbers: `[outputs, groups, 16]` uint8; byte i has input i in its low half and input 16 + i in its high one.
        factor: `[outputs, groups]` float16.
        least: As `factor`.
    """

    numbers: torch.Tensor
    factor: torch.Tensor
    least: torch.Tensor

    @classmethod
    def of(cls, weight: torch.Tensor) -> Int4:
        """Quantize `weight [outputs, inputs]`, inputs a multiple of 32, each group between its extremes."""
        return cls.joined(map(cls._of_few, torch.split(weight, PANELS_AT_ONCE * PANEL)))

    @classmethod
    def joined(cls, parts: Iterable[Int4]) -> Int4:
        """Return `parts`, of as many inputs each, one above the other."""
        return cls(*map(torch.cat, zip(*parts, strict=True)))

    @classmethod
    def _of_few(cls, weight: torch.Tensor) -> Int4:
        groups = weight.float().view(len(weight), -1, GROUP)
        least = groups.amin(dim=2, keepdim=True).half()
        factor = ((groups.amax(dim=2, keepdim=True) - least.float()) / 15).half()
        step = torch.where(factor > 0, factor.float(), 1.0)  # as it is stored, however small
        whole = ((groups - least.float()) / step).round().clamp(0, 15).to(torch.uint8)
        return cls(whole[..., : GROUP // 2] | whole[..., GROUP // 2 :] << 4, factor[..., 0], least[..., 0])

    def padded(self, num_outputs: int, num_groups: int) -> Int4:
        """Return it with zeros up to so many outputs and groups."""
        rows, groups = num_outputs - len(self.factor), num_groups - self.factor.shape[1]
        return Int4(
            F.pad(self.numbers, (0, 0, 0, groups, 0, rows)), *(F.pad(x, (0, groups, 0, rows)) for x in self[1:])
        )


class PackedWeight:
    """A weight `[num_outputs, num_inputs]` in panels of 32 outputs, padded with zeros; see operations.h."""

    def __init__(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        form: Form,
        int4: Int4 | None = None,
        arena: Arena | None = None,
    ) -> None:
        """Pack `weight`, and `bias [num_outputs]` beside it, into `arena`; as INT4 `int4` in its place, if given."""
        arena = arena or Arena()
        self.form = form
        self.num_outputs, num_inputs = weight.shape
        missing = -self.num_outputs % PANEL
        self.num_inputs = num_inputs + -num_inputs % INPUT_MULTIPLE
        self.scales: torch.Tensor | None = None
        self.bias = None if bias is None else arena.copy(F.pad(bias.float(), (0, missing)))
        if form is Form.INT4 and int4 is not None:
            self.data = arena.copy(_int4_panels(int4.padded(self.num_outputs + missing, self.num_inputs // GROUP)))
            return
        num_panels = (self.num_outputs + missing) // PANEL
        if form is Form.INT8:
            self.scales = arena.zeros(num_panels * PANEL, torch.float32)
        self.data = arena.zeros(num_panels * form.panel_bytes(self.num_inputs), torch.uint8).view(num_panels, -1)
        for first in range(0, num_panels, PANELS_AT_ONCE):
            rows = weight[first * PANEL : (first + PANELS_AT_ONCE) * PANEL]
            rows = F.pad(rows, (0, self.num_inputs - num_inputs, 0, -len(rows) % PANEL))
            packed = self._packed(rows, first * PANEL).contiguous().view(len(rows) // PANEL, -1)
            self.data[first : first + len(packed)] = packed.view(torch.uint8)

    def _packed(self, rows: torch.Tensor, first_output: int) -> torch.Tensor:
        """Return whole panels of `rows [panels * 32, inputs]` in order, and note the scales they have."""
        if self.form is Form.INT4:
            return _int4_panels(Int4.of(rows))
        if self.scales is None:
            return _panels(rows.to(DTYPES[self.form]), 1 if self.form is Form.FLOAT32 else 2)
        scales = rows.float().abs().amax(dim=1).div(127).clamp(min=torch.finfo(torch.float32).tiny)
        self.scales[first_output : first_output + len(rows)] = scales
        return _panels(((rows.float() / scales[:, None]).round() + 128).to(torch.uint8), 4)


def _panels(rows: torch.Tensor, num_together: int) -> torch.Tensor:
    """`[panels * 32, inputs]` → `[panels, inputs / num_together, 32, num_together]`."""
    return rows.view(-1, PANEL, rows.shape[1] // num_together, num_together).transpose(1, 2)


def _int4_panels(weight: Int4) -> torch.Tensor:
    """Return the bytes of `weight`, whole panels of it, `[panels, groups, 640]`."""
    num_groups = weight.factor.shape[1]
    numbers = weight.numbers.view(-1, PANEL, num_groups, GROUP // 8, 4).permute(0, 2, 3, 1, 4)
    scales = [x.view(-1, PANEL, num_groups).transpose(1, 2).contiguous().view(torch.uint8) for x in weight[1:]]
    return torch.cat((numbers.reshape(-1, num_groups, GROUP // 2 * PANEL), *scales), dim=2)


def interleaved(gate_up: torch.Tensor) -> torch.Tensor:
    """Return gate and up, one above the other in `[2 · inner, ...]`, in turns of 16 rows."""
    halves = gate_up.view(2, -1, LANES, *gate_up.shape[1:])
    return halves.transpose(0, 1).reshape(gate_up.shape)
