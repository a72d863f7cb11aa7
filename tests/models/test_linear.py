from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F

from engine.models.linear import ROW_TILE, Linear, pad_rows, tiles_of

# SmolLM2-135M's: qkv, output, gate and up, down; a slice of its head (the whole, 49152, costs memory); odd ones.
SHAPES = [(576, 960), (576, 576), (576, 3072), (1536, 576), (576, 4096), (100, 37), (64, 192)]


@pytest.fixture(params=[1, 2])
def num_threads(request: pytest.FixtureRequest) -> Iterator[int]:
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(1)


def make_linear(in_features: int, out_features: int, dtype: torch.dtype, *, bias: bool = False) -> Linear:
    generator = torch.Generator().manual_seed(in_features)
    linear = Linear.empty(in_features, out_features, bias=bias, dtype=dtype)
    linear.weight.copy_(torch.randn(out_features, in_features, generator=generator) / in_features**0.5)
    if linear.bias is not None:
        linear.bias.copy_(torch.randn(out_features, generator=generator))
    return linear


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("in_features", "out_features"), SHAPES)
@pytest.mark.usefixtures("num_threads")
def test_a_row_gives_the_same_bits_for_every_number_of_rows_and_at_every_place(
    in_features: int, out_features: int, dtype: torch.dtype
) -> None:
    linear = make_linear(in_features, out_features, dtype)
    linear.pack()
    rows = torch.randn(64, in_features, generator=torch.Generator().manual_seed(1)).to(dtype)
    whole = torch.cat([linear(tile) for tile in tiles_of(rows)])
    for num_rows in (*range(1, 20), 31, 33, 47, 63):
        some = torch.cat([linear(tile) for tile in tiles_of(pad_rows(rows[:num_rows]))])[:num_rows]
        assert torch.equal(some, whole[:num_rows]), f"{num_rows} rows"
    for shift in range(1, ROW_TILE):
        shifted = torch.cat([linear(tile) for tile in tiles_of(rows.roll(shift, dims=0))])
        assert torch.equal(shifted, whole.roll(shift, dims=0)), f"moved by {shift}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_packing_changes_the_order_and_not_the_product(dtype: torch.dtype) -> None:
    linear = make_linear(96, 80, dtype, bias=True)
    rows = torch.randn(ROW_TILE, 96, generator=torch.Generator().manual_seed(2)).to(dtype)
    expected = F.linear(rows.double(), linear.weight.double(), linear.bias.double())
    plain = linear(rows)
    linear.pack()
    for product in (plain, linear(rows)):
        # Sums of 96 products of about 0.1, rounded once to the type.
        torch.testing.assert_close(product.double(), expected, rtol=2 * torch.finfo(dtype).eps, atol=1e-5)


def test_padding_appends_zero_rows_up_to_a_whole_tile() -> None:
    padded = pad_rows(torch.ones(17, 3))
    assert padded.shape == (32, 3)
    assert padded.sum() == 51
    assert pad_rows(padded) is padded
    assert pad_rows(torch.ones(5, dtype=torch.int64)).tolist() == [1] * 5 + [0] * 11
