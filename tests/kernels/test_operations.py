"""Each operation in C against the same in torch, in every form and for every set of instructions that this CPU has."""

from __future__ import annotations

import ctypes
import re
from typing import Any

import pytest
import torch

from engine.config import MAX_THREADS, EngineConfig
from engine.errors import ConfigError
from engine.kernels.library import SOURCE, load, supported_variants
from engine.kernels.memory import Arena, pointer, zeros
from engine.kernels.operations import (
    ACTIVATIONS,
    DTYPES,
    GROUP,
    INPUT_MULTIPLE,
    WIDE_GROUP,
    Cap,
    Embed,
    Epilogue,
    Form,
    Kind,
    Norm,
    Product,
    Program,
    Step,
    Team,
    greatest,
)
from engine.kernels.weights import Int4, PackedWeight, interleaved

torch.set_num_threads(1)
MAX_ROWS = 64


@pytest.fixture(params=supported_variants())
def team(request: pytest.FixtureRequest) -> Team:
    return Team(load(request.param), num_threads=2, spin_ns=20_000)


def run(team: Team, num_rows: int, operations: list[ctypes.Structure], *memory: Any) -> None:
    Program(operations, memory).run(Step(num_rows=num_rows), team)


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def prepare(rows: torch.Tensor, form: Form, weight: torch.Tensor | None = None) -> tuple[Norm, torch.Tensor]:
    """Describe the change of `rows` into inputs of `form`, and return the room they go to."""
    size = rows.shape[1]
    padded = size + -size % INPUT_MULTIPLE
    room = zeros(MAX_ROWS * form.row_bytes(padded), torch.uint8)
    norm = Norm(Kind.NORM, form, size, 1, 0, 1e-5, 1.0)
    norm.weight, norm.in_, norm.in_stride = pointer(weight), pointer(rows), size
    norm.out, norm.out_stride = pointer(room), padded
    return norm, room


def inputs_of(rows: torch.Tensor, form: Form) -> torch.Tensor:
    """Return what a product of `form` takes `rows` for, in float64."""
    if form in DTYPES:
        return rows.to(DTYPES[form]).double()
    group = WIDE_GROUP if form is Form.INT8 else GROUP
    padded = torch.nn.functional.pad(rows, (0, -rows.shape[1] % group)).view(len(rows), -1, group)
    most = padded.abs().amax(dim=2, keepdim=True)
    whole = (padded * (127 / most).nan_to_num(posinf=0.0)).round()
    return (whole.double() * (most / 127).double()).flatten(1)[:, : rows.shape[1]]


def weight_of(weight: torch.Tensor, form: Form) -> torch.Tensor:
    """Return what `weight` is once stored as `form`, in float64."""
    if form in DTYPES:
        return weight.to(DTYPES[form]).double()
    if form is Form.INT8:
        scales = weight.abs().amax(dim=1, keepdim=True) / 127
        return (weight / scales).round().double() * scales.double()
    groups = torch.nn.functional.pad(weight, (0, -weight.shape[1] % GROUP)).view(len(weight), -1, GROUP)
    least = groups.amin(dim=2, keepdim=True).half().float()
    factor = ((groups.amax(dim=2, keepdim=True) - least) / 15).half().float()
    whole = ((groups - least) / factor).round().clamp(0, 15)
    return (whole.double() * factor.double() + least.double()).flatten(1)[:, : weight.shape[1]]


@pytest.mark.parametrize("form", Form)
def test_an_embedding_is_what_is_stored_of_its_token(team: Team, form: Form) -> None:
    table, tokens, size = draw(70, 48), torch.tensor([0, 31, 32, 69, 5, 31]), 48
    packed, out = PackedWeight(table, None, form), torch.zeros(len(tokens), size)
    embed = Embed(Kind.EMBED, form, size, packed.num_inputs, 1.5)
    embed.weight, embed.scales, embed.out = pointer(packed.data), pointer(packed.scales), pointer(out)
    Program([embed], [packed]).run(Step(num_rows=len(tokens), token_ids=pointer(tokens)), team)
    torch.testing.assert_close(out.double(), weight_of(table, form)[tokens] * 1.5, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("num_rows", [1, 2, 5, 13, 40])
@pytest.mark.parametrize(("num_outputs", "num_inputs"), [(64, 64), (70, 48), (33, 160)])
@pytest.mark.parametrize("form", Form)
def test_products_are_those_of_what_is_stored(
    team: Team, form: Form, num_outputs: int, num_inputs: int, num_rows: int
) -> None:
    weight, bias, rows = draw(num_outputs, num_inputs), draw(num_outputs, seed=1), draw(num_rows, num_inputs, seed=2)
    norm, room = prepare(rows, form)
    packed = PackedWeight(weight, bias, form)
    out = torch.zeros(num_rows, num_outputs)
    product = Product(Kind.LINEAR, form, num_outputs, packed.num_inputs, Epilogue.STORE, 0, 0, 1.0)
    product.weight, product.scales, product.bias = pointer(packed.data), pointer(packed.scales), pointer(packed.bias)
    product.in_, product.out, product.out_stride = pointer(room), pointer(out), num_outputs
    run(team, num_rows, [norm, product], room, packed)
    expected = inputs_of(rows, form) @ weight_of(weight, form).T + bias.double()
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=2e-5 * num_inputs**0.5)


@pytest.mark.parametrize("form", Form)
def test_a_product_may_be_added_times_a_factor_or_gated(team: Team, form: Form) -> None:
    weight, rows, before = draw(64, 64), draw(3, 64, seed=1), draw(3, 64, seed=2)
    norm, room = prepare(rows, form)
    expected = inputs_of(rows, form) @ weight_of(weight, form).T
    for epilogue, packed in ((Epilogue.ADD, weight), (Epilogue.GATE, interleaved(weight))):
        for activation, function in ((0, torch.nn.functional.silu), (1, _gelu)):
            of = PackedWeight(packed, None, form)
            out = before.clone()
            product = Product(Kind.LINEAR, form, 64, of.num_inputs, epilogue, activation, 0, 0.7)
            product.weight, product.scales, product.in_ = pointer(of.data), pointer(of.scales), pointer(room)
            product.out, product.out_stride = pointer(out), 64
            run(team, 3, [norm, product], room, of)
            if epilogue is Epilogue.ADD:
                torch.testing.assert_close(out.double(), before + 0.7 * expected, rtol=0, atol=3e-4)
                continue
            gate, up = expected.chunk(2, dim=1)
            rtol = 1e-5 if form is Form.FLOAT32 else 3e-4
            torch.testing.assert_close(out[:, :32].double(), function(gate) * up, rtol=rtol, atol=1e-3)
            assert torch.equal(out[:, 32:], before[:, 32:])
            narrow = before.bfloat16()
            product.out, product.out_form = pointer(narrow), Form.BFLOAT16
            run(team, 3, [norm, product], room, of)
            assert torch.equal(narrow[:, :32], out[:, :32].bfloat16())


def _gelu(rows: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.gelu(rows, approximate="tanh")


@pytest.mark.parametrize("form", [Form.FLOAT32, Form.BFLOAT16])
@pytest.mark.parametrize("size", [16, 48, 576])
def test_a_norm_divides_by_the_root_mean_square(team: Team, size: int, form: Form) -> None:
    rows, weight = draw(5, size) * 3, Arena().copy(draw(size, seed=1))
    norm, room = prepare(rows, form, weight)
    run(team, 5, [norm], room)
    expected = torch.nn.functional.rms_norm(rows, (size,), weight, 1e-5)
    padded = size + -size % INPUT_MULTIPLE
    found = room.view(DTYPES[form])[: 5 * padded].view(5, padded)
    torch.testing.assert_close(found[:, :size].float(), expected.to(DTYPES[form]).float(), rtol=8e-3, atol=1e-5)
    assert not found[:, size:].any()


@pytest.mark.parametrize("cap", [0.0, 3.0])
def test_rows_are_divided_and_bounded(team: Team, cap: float) -> None:
    rows = draw(4, 37) * 9
    found = rows.clone()
    run(team, 4, [Cap(Kind.CAP, 37, 1.7, cap, pointer(found))], found)
    expected = rows / 1.7
    torch.testing.assert_close(found, cap * torch.tanh(expected / cap) if cap else expected, rtol=1e-5, atol=1e-5)


def test_what_is_no_number_is_not_bounded_to_one(team: Team) -> None:
    found = torch.tensor([[torch.nan, 1.0, torch.inf, -torch.inf]])
    run(team, 1, [Cap(Kind.CAP, 4, 1.0, 30.0, pointer(found))], found)
    assert found[0, 0].isnan()
    assert found[0, 1:].tolist() == pytest.approx([0.99963, 30.0, -30.0], rel=1e-4)


@pytest.mark.parametrize("size", [3e-4, 1e-4, 1e-5])
def test_small_weights_are_quantized_as_well_as_large_ones(size: float) -> None:
    weight = draw(64, 256) * size
    found = weight_of_int4(Int4.of(weight))
    assert (found - weight).norm() / weight.norm() < 0.11


def weight_of_int4(weight: Int4) -> torch.Tensor:
    numbers = torch.cat((weight.numbers & 15, weight.numbers >> 4), dim=2).float()
    return (numbers * weight.factor.float()[..., None] + weight.least.float()[..., None]).flatten(1)


@pytest.mark.parametrize("form", [Form.INT8, Form.INT4])
@pytest.mark.parametrize("tiny", [1e-30, 3.6e-37, 1e-40, 0.0])
def test_a_group_of_tiny_inputs_harms_nothing(team: Team, form: Form, tiny: float) -> None:
    weight, rows = draw(64, 64), draw(1, 64, seed=1)
    rows[0, :32] = tiny
    norm, room = prepare(rows, form)
    packed, out = PackedWeight(weight, None, form), torch.zeros(1, 64)
    product = Product(Kind.LINEAR, form, 64, packed.num_inputs, Epilogue.STORE, 0, 0, 1.0)
    product.weight, product.scales, product.in_ = pointer(packed.data), pointer(packed.scales), pointer(room)
    product.out, product.out_stride = pointer(out), 64
    run(team, 1, [norm, product], room, packed)
    expected = inputs_of(rows, form) @ weight_of(weight, form).T
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=2e-4)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("form", Form)
def test_what_is_no_number_does_not_become_one(team: Team, form: Form, bad: float) -> None:
    weight, rows = draw(64, 64), draw(2, 64, seed=1)
    rows[1, 40] = bad
    norm, room = prepare(rows, form)
    packed = PackedWeight(weight, None, form)
    out = torch.zeros(2, 64)
    product = Product(Kind.LINEAR, form, 64, packed.num_inputs, Epilogue.STORE, 0, 0, 1.0)
    product.weight, product.scales, product.in_ = pointer(packed.data), pointer(packed.scales), pointer(room)
    product.out, product.out_stride = pointer(out), 64
    run(team, 2, [norm, product], room, packed)
    assert out[0].isfinite().all()
    assert not out[1].isfinite().any()


def test_there_is_an_operation_for_every_activation_of_our_decoder() -> None:
    from engine.models.mlp import ACTIVATIONS as KNOWN

    assert ACTIVATIONS.keys() == KNOWN.keys()


@pytest.mark.parametrize("size", [3, 16, 37, 1000])
def test_the_greatest_of_each_row_is_the_first_of_its_equals(team: Team, size: int) -> None:
    rows = draw(7, size)
    rows[1, [size // 3, size - 1]] = 9
    rows[2] = -torch.inf
    rows[3, size // 2] = torch.nan
    rows[4, size - 1] = torch.inf
    rows[5, 0] = -0.0
    values, places = greatest(team, rows)
    expected = rows.max(dim=1)
    torch.testing.assert_close(values, expected.values, rtol=0, atol=0, equal_nan=True)
    sound = [row for row in range(7) if row != 3]
    assert places[sound].tolist() == expected.indices[sound].tolist()


def test_a_team_has_as_many_threads_as_may_be_asked_for() -> None:
    (most,) = re.findall(r"MAX_THREADS = (\d+)", SOURCE.joinpath("team.h").read_text())
    assert EngineConfig(num_threads=int(most)).num_threads == MAX_THREADS
    with pytest.raises(ConfigError, match=f"--num-threads must be at most {most}, got {MAX_THREADS + 1}"):
        EngineConfig(num_threads=MAX_THREADS + 1)
