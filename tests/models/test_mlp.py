from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from engine.models.decoder_config import ExpertsConfig
from engine.models.decoder_traits import ExpertNames
from engine.models.linear import ROW_TILE, pad_rows, tiles_of
from engine.models.mlp import ACTIVATIONS, Experts, gated

NAMES = ExpertNames(router="gate", gate="experts.{}.w1", up="experts.{}.w3", down="experts.{}.w2")


@pytest.fixture(params=[1, 2])
def num_threads(request: pytest.FixtureRequest) -> Iterator[int]:
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(1)


@pytest.mark.parametrize("inner", [31, 1000, 40001])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_a_row_is_gated_alike_at_every_place_of_its_tile(num_threads: int, activation: str, inner: int) -> None:
    rows = torch.randn(2 * 10**5 // inner + 1, 2 * inner, generator=torch.Generator().manual_seed(0)) * 3
    for row in rows:
        tile = gated(row.expand(ROW_TILE, -1).contiguous(), ACTIVATIONS[activation])
        assert torch.equal(tile, tile[:1].expand(ROW_TILE, -1))


def make_experts(dtype: torch.dtype, **changes: Any) -> tuple[Experts, dict[str, torch.Tensor]]:
    """Return packed experts and what they were filled with."""
    settings = {"num_experts": 6, "num_chosen": 2, "intermediate_size": 20, "normalizes": True} | changes
    experts = Experts(ExpertsConfig(**settings), NAMES, 24, "silu", dtype)
    generator = torch.Generator().manual_seed(1)
    filled = {}
    for name, tensor in experts.destinations().items():
        filled[name] = tensor.copy_(torch.randn(tensor.shape, generator=generator) * 0.3).double()
    experts.pack()
    return experts, filled


def run(experts: Experts, rows: torch.Tensor) -> torch.Tensor:
    return torch.cat(list(experts(tiles_of(pad_rows(rows)), len(rows))))[: len(rows)]


def exact(filled: dict[str, torch.Tensor], rows: torch.Tensor, num_chosen: int, normalizes: bool) -> torch.Tensor:
    """Send each row through its experts in float64, one by one."""
    outputs = []
    for row in rows.double():
        shares, chosen = (filled["gate.weight"] @ row).softmax(-1).topk(num_chosen)
        total = torch.zeros(len(row), dtype=torch.float64)
        for share, i in zip(shares / shares.sum() if normalizes else shares, chosen.tolist(), strict=True):
            gate, up, down = (filled[f"experts.{i}.{name}.weight"] for name in ("w1", "w3", "w2"))
            total += share * (down @ (F.silu(gate @ row) * (up @ row)))
        outputs.append(total)
    return torch.stack(outputs)


@pytest.mark.parametrize(("num_chosen", "normalizes"), [(1, False), (2, True), (3, False), (6, True)])
def test_each_row_gets_the_weighted_sum_of_its_experts(num_chosen: int, normalizes: bool) -> None:
    experts, filled = make_experts(torch.float32, num_chosen=num_chosen, normalizes=normalizes)
    rows = torch.randn(45, 24, generator=torch.Generator().manual_seed(2))
    torch.testing.assert_close(
        run(experts, rows).double(), exact(filled, rows, num_chosen, normalizes), rtol=0, atol=1e-5
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_row_s_bits_do_not_depend_on_where_its_neighbours_are_sent(num_threads: int, dtype: torch.dtype) -> None:
    experts, _ = make_experts(dtype, num_chosen=3)
    rows = torch.randn(200, 24, generator=torch.Generator().manual_seed(3)).to(dtype)
    together = run(experts, rows)
    assert all(torch.equal(run(experts, row[None])[0], result) for row, result in zip(rows, together, strict=True))
    order = torch.randperm(200, generator=torch.Generator().manual_seed(4))
    assert torch.equal(run(experts, rows[order]), together[order])
    assert torch.equal(torch.cat([run(experts, part) for part in rows.split(7)]), together)


def test_rows_beyond_the_step_s_are_sent_nowhere() -> None:
    experts, _ = make_experts(torch.float32)
    rows = torch.randn(3, 24, generator=torch.Generator().manual_seed(5))
    padded = pad_rows(rows)
    padded[3:] = torch.nan
    (tile,) = experts(tiles_of(padded), 3)
    assert torch.equal(tile[:3], run(experts, rows))
    assert not tile[3:].any()
