"""Attention in C against the readable attention, with windows, caps, sinks, long contexts and split keys."""

from __future__ import annotations

import ctypes
import itertools
import mmap

import numpy as np
import pytest
import torch

from engine.attention.base import AttentionBatch, RequestRows
from engine.attention.compiled import CompiledPages
from engine.attention.reference import ReferenceAttention
from engine.kernels.library import load, supported_variants
from engine.kernels.memory import pointer, zeros
from engine.kernels.operations import DTYPES, MAX_HEAD, STACK_BYTES, Attend, Form, Kind, Program, Rotate, Team
from engine.kv_cache.spec import KVCacheSpec

torch.set_num_threads(1)
BLOCK_SIZE = 16
NUM_BLOCKS = 400


class Attention:
    """Both kinds of pages, with the same requests."""

    def __init__(self, form: Form, num_heads: int, num_kv_heads: int, head_dim: int, variant: str) -> None:
        dtype = {Form.FLOAT32: torch.float32, Form.BFLOAT16: torch.bfloat16, Form.INT8: torch.int8}[form]
        spec = KVCacheSpec(num_layers=1, num_kv_heads=num_kv_heads, head_dim=head_dim, item_size_bytes=4)
        groups = spec.groups(10**6)
        self.form, self.sizes = form, (num_heads, num_kv_heads, head_dim)
        self.library = load(variant)
        self.pages = CompiledPages(spec, groups, num_heads, NUM_BLOCKS, BLOCK_SIZE, dtype)
        self.reference = ReferenceAttention(spec, groups, num_heads, NUM_BLOCKS, BLOCK_SIZE, torch.float32)

    def run(
        self,
        qkv: torch.Tensor,
        rows: list[RequestRows],
        window: int | None = None,
        cap: float | None = None,
        sinks: torch.Tensor | None = None,
        num_threads: int = 1,
        out_form: Form = Form.FLOAT32,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what the operations in C and the readable attention give for `qkv [rows, heads + 2 K/V heads, d]`."""
        num_heads, num_kv_heads, head_dim = self.sizes
        sizes = (num_heads, num_kv_heads, head_dim)
        batch = AttentionBatch(rows)
        q, k, v = torch.split(qkv, [num_heads, num_kv_heads, num_kv_heads], dim=1)
        prepared = self.reference.prepare(batch)
        expected = self.reference.attend(0, q, k, v, head_dim**-0.5, window, cap, sinks, prepared)
        step = self.pages.prepare(batch)
        positions = np.concatenate([np.arange(row.start, row.start + row.num_rows) for row in rows])
        step.positions = pointer(positions)
        queries = zeros(len(qkv) * num_heads * self.form.query_bytes(head_dim), torch.uint8)
        out = torch.zeros(len(qkv), num_heads + 1, head_dim, dtype=DTYPES[out_form])  # rows are a head apart
        group, places = self.pages.places(0)
        rotate = Rotate(Kind.ROTATE, self.form, *sizes, 0, group, places)
        attend = Attend(Kind.ATTEND, self.form, *sizes, window or 0, group, out_form, places)
        attend.scale, attend.cap, attend.out_stride = head_dim**-0.5, cap or 0.0, (num_heads + 1) * head_dim
        rotate.qkv, rotate.queries = pointer(qkv), pointer(queries)
        attend.queries, attend.out = pointer(queries), pointer(out)
        attend.sinks = pointer(sinks)
        self.team = Team(self.library, num_threads, 20_000)
        Program([rotate, attend], []).run(step, self.team)
        assert not out[:, num_heads].any()
        return out[:, :num_heads], expected


def rows_of(*parts: tuple[int, int]) -> list[RequestRows]:
    """Return (start, number of rows) of requests that have 20 blocks each, in no order."""
    blocks = np.random.default_rng(0).permutation(np.arange(1, NUM_BLOCKS, dtype=np.int32))
    firsts = itertools.accumulate((count for _, count in parts), initial=0)
    tables = np.array_split(blocks, len(parts))
    return [
        RequestRows(first, count, start, [table])
        for first, (start, count), table in zip(firsts, parts, tables, strict=False)
    ]


def draw(num_rows: int, num_heads: int, head_dim: int) -> torch.Tensor:
    return torch.randn(num_rows, num_heads, head_dim, generator=torch.Generator().manual_seed(0))


TOLERANCE = {Form.FLOAT32: 2e-6, Form.BFLOAT16: 0.02, Form.INT8: 0.04}


@pytest.mark.parametrize("variant", supported_variants())
@pytest.mark.parametrize("form", TOLERANCE)
def test_it_is_written_in_bfloat16_where_that_is_asked_for(form: Form, variant: str) -> None:
    attention = Attention(form, 6, 2, 64, variant)
    qkv = draw(43, 10, 64)
    wide, _ = attention.run(qkv, rows_of((0, 40), (3, 3)))
    narrow, _ = attention.run(qkv, rows_of((0, 40), (3, 3)), out_form=Form.BFLOAT16)
    assert torch.equal(narrow, wide.bfloat16())


@pytest.mark.parametrize("variant", supported_variants())
@pytest.mark.parametrize("form", TOLERANCE)
@pytest.mark.parametrize(
    ("heads", "window", "cap", "has_sinks"),
    [
        ((6, 2, 64), None, None, False),
        ((4, 4, 16), 9, None, False),
        ((8, 1, 80), None, 2.0, True),
        ((16, 1, 32), 33, 2.0, True),
        ((2, 2, 64), None, 50.0, False),
    ],
)
def test_it_is_what_the_readable_attention_gives(
    variant: str, form: Form, heads: tuple[int, int, int], window: int | None, cap: float | None, has_sinks: bool
) -> None:
    attention = Attention(form, *heads, variant)
    sinks = torch.linspace(-1, 2, heads[0]) if has_sinks else None
    for parts in ([(0, 40), (0, 3), (0, 270)], [(40, 1), (3, 7), (270, 1)]):
        rows = rows_of(*parts)
        qkv = draw(sum(count for _, count in parts), heads[0] + 2 * heads[1], heads[2])
        found, expected = attention.run(qkv, rows, window, cap, sinks)
        torch.testing.assert_close(found, expected, rtol=0, atol=TOLERANCE[form])


@pytest.mark.parametrize("variant", supported_variants())
@pytest.mark.parametrize("form", TOLERANCE)
@pytest.mark.parametrize(
    ("heads", "window"), [((3, 1, 32), None), ((8, 2, 64), 40), ((2, 2, 48), None), ((17, 1, 32), 300)]
)
def test_chunks_of_any_size_change_no_bit(
    variant: str, form: Form, heads: tuple[int, int, int], window: int | None
) -> None:
    attention = Attention(form, *heads, variant)
    qkv = draw(540, heads[0] + 2 * heads[1], heads[2])
    whole, _ = attention.run(qkv, rows_of((0, 540)), window)
    again = Attention(form, *heads, variant)
    for start, end in itertools.pairwise((0, 1, 2, 35, 250, 255, 256, 257, 258, 300, 511, 512, 513, 540)):
        found, _ = again.run(qkv[start:end].contiguous(), rows_of((start, end - start)), window, num_threads=2)
        assert torch.equal(found, whole[start:end]), (start, end)


@pytest.mark.parametrize("form", TOLERANCE)
@pytest.mark.parametrize("window", [None, 700])
def test_threads_that_share_the_keys_of_one_long_request_change_no_bit(form: Form, window: int | None) -> None:
    attention = Attention(form, 3, 1, 32, supported_variants()[-1])
    attention.run(draw(1800, 5, 32), rows_of((0, 1800)), window)
    one = draw(1, 5, 32)
    found, expected = attention.run(one, rows_of((1800, 1)), window)
    torch.testing.assert_close(found, expected, rtol=0, atol=TOLERANCE[form])
    for num_threads in (2, 3, 5):
        assert torch.equal(attention.run(one, rows_of((1800, 1)), window, num_threads=num_threads)[0], found)


@pytest.mark.parametrize("variant", supported_variants())
@pytest.mark.parametrize("form", TOLERANCE)
@pytest.mark.parametrize(("size", "head_dim"), [(14, 128), (20, 64), (1000, 64)])
def test_however_large_scores_are_a_row_gets_an_average_of_values(
    variant: str, form: Form, size: int, head_dim: int
) -> None:
    qkv = draw(300, 8, head_dim)
    qkv[:, :6] *= size
    qkv[:, 6:] = 1 + 0.05 * qkv[:, 6:].clamp(-2, 2)
    found, _ = Attention(form, 4, 2, head_dim, variant).run(qkv, rows_of((0, 300)))
    assert (found - 1).abs().max() < 0.11


@pytest.mark.parametrize("variant", supported_variants())
@pytest.mark.parametrize("form", TOLERANCE)
def test_a_thread_leaves_half_of_its_stack_untouched(variant: str, form: Form) -> None:
    attention = Attention(form, 2, 1, MAX_HEAD, variant)
    half, started = STACK_BYTES // 2, 32 << 10  # where a thread begins there is what the C library keeps of it
    for _ in range(100):  # a caller may take all tasks
        attention.run(draw(600, 4, MAX_HEAD), rows_of((0, 600)), cap=2.0, num_threads=2)
        stack = attention.team._stacks[STACK_BYTES:]
        assert not stack[mmap.PAGESIZE : half].any()
        if stack[half:-started].any():
            return
    raise AssertionError("no thread has had a task")


@pytest.mark.parametrize("variant", supported_variants())
@pytest.mark.parametrize("form", TOLERANCE)
@pytest.mark.parametrize("head_dim", [16, 64])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_no_number_in_a_key_or_a_value_reaches_all_that_see_it_and_nobody_else(
    variant: str, form: Form, bad: float, head_dim: int
) -> None:
    for head, cap in ((2, None), (3, None), (2, 5.0)):
        attention = Attention(form, 2, 1, head_dim, variant)
        qkv = draw(40, 4, head_dim)
        qkv[22, head, 3] = bad  # its unit has rows before it
        qkv[:, :2, 3] = qkv[:, :2, 3].abs() + 0.1
        found, reference = attention.run(qkv, rows_of((0, 40)), cap=cap)
        for attended in (found, reference):
            assert attended[:22].isfinite().all()
            if cap is None or bad != torch.inf:  # an infinite score is capped
                assert not attended[22:].isfinite().flatten(1).all(dim=1).any()


@pytest.mark.parametrize("variant", supported_variants())
@pytest.mark.parametrize("form", TOLERANCE)
def test_a_value_that_only_its_page_cannot_hold_reaches_nobody_who_does_not_see_it(variant: str, form: Form) -> None:
    qkv = draw(40, 4, 64)
    qkv[22, 3, 3] = 3.4e38  # infinite in bfloat16
    found, _ = Attention(form, 2, 1, 64, variant).run(qkv, rows_of((0, 40)))
    assert found[:22].isfinite().all()
    assert form is not Form.BFLOAT16 or not found[22:].isfinite().flatten(1).all(dim=1).any()


def test_block_tables_have_one_room_for_all_steps_and_nothing_of_earlier_ones_in_it() -> None:
    pages = Attention(Form.FLOAT32, 1, 1, 16, supported_variants()[0]).pages

    def prepare(*tables: list[int]) -> tuple[int, np.ndarray]:
        rows = [RequestRows(i, 1, 0, [np.array(table, dtype=np.int32)]) for i, table in enumerate(tables)]
        step = pages.prepare(AttentionBatch(rows))
        first = ctypes.cast(step.block_tables, ctypes.POINTER(ctypes.c_int32))
        shape = step.num_groups, step.num_requests, step.max_blocks
        return step.block_tables, np.ctypeslib.as_array(first, shape).copy()

    room, _ = prepare([1, 2, 3], [4, 5, 6], [7, 8, 9])
    small = prepare([6], [1, 2])
    assert small[0] == room
    assert small[1].tolist() == [[[6, 0], [1, 2]]]
    grown = prepare(*([number] * number for number in range(1, 12)))
    assert grown[1][0, 9].tolist() == [10] * 10 + [0]
    assert prepare(*([number] * 11 for number in range(1, 12)))[0] == grown[0]
