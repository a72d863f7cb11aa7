from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine.attention.base import AttentionBatch, RequestRows
from engine.attention.reference import ReferenceAttention
from engine.kv_cache.spec import NULL_BLOCK, KVCacheSpec, num_skipped_blocks
from engine.models.checkpoint import read_config
from engine.models.decoder import Decoder
from engine.models.registry import decoder_config
from engine.models.weights import load_weights

BLOCK_SIZE = 4
BLOCKS_A_REQUEST = 20
MAX_MODEL_LEN = 80


class Stack:
    """A loaded decoder over reference attention; each request has 20 blocks of its own in each group of layers."""

    def __init__(self, folder: Path, dtype: torch.dtype = torch.float32) -> None:
        config = decoder_config(read_config(folder))
        self.model = Decoder(config, MAX_MODEL_LEN, dtype)
        load_weights(folder, self.model.destinations(), lambda done, total: None)
        self.model.pack()
        spec = KVCacheSpec(
            num_layers=config.num_layers,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            item_size_bytes=4,
            windows=config.windows,
        )
        self.groups = spec.groups(MAX_MODEL_LEN)
        num_blocks = 1 + 12 * BLOCKS_A_REQUEST * len(self.groups)
        self.backend = ReferenceAttention(spec, self.groups, config.num_heads, num_blocks, BLOCK_SIZE, dtype)
        self.model.use_attention(self.backend)

    @torch.inference_mode()
    def logits(self, parts: list[tuple[int, list[int], int]]) -> list[torch.Tensor]:
        """Run (request, its tokens of this step, their start) in one step; returns the logits of every row."""
        rows, positions, first = [], [], 0
        for request, tokens, start in parts:
            tables = self._block_tables(request, start)
            rows.append(RequestRows(first, len(tokens), start, tables))
            positions.append(np.arange(start, start + len(tokens)))
            first += len(tokens)
        batch = self.backend.prepare(AttentionBatch(rows))
        token_ids = torch.tensor([token for _, tokens, _ in parts for token in tokens])
        hidden = self.model.forward(token_ids, torch.from_numpy(np.concatenate(positions)), batch)
        return list(self.model.logits(hidden).split([len(tokens) for _, tokens, _ in parts]))

    def _block_tables(self, request: int, start: int) -> list[np.ndarray]:
        tables = []
        for index, group in enumerate(self.groups):
            first = 1 + (request * len(self.groups) + index) * BLOCKS_A_REQUEST
            table = np.arange(first, first + BLOCKS_A_REQUEST, dtype=np.int32)
            table[: num_skipped_blocks(group, start, BLOCK_SIZE)] = NULL_BLOCK
            tables.append(table)
        return tables


def draw_prompt(length: int, seed: int) -> list[int]:
    return torch.randint(0, 199, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


@torch.inference_mode()
def oracle(model: Any, tokens: list[int]) -> torch.Tensor:
    logits: torch.Tensor = model(torch.tensor([tokens]), use_cache=False).logits[0]
    return logits


def test_logits_equal_those_of_transformers(family: str, make_checkpoint: Any) -> None:
    folder, model = make_checkpoint(family)
    tokens = draw_prompt(70, seed=1)
    (logits,) = Stack(folder).logits([(0, tokens, 0)])
    torch.testing.assert_close(logits, oracle(model, tokens), rtol=0, atol=1e-4)
    assert torch.equal(logits.argmax(-1), oracle(model, tokens).argmax(-1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_logits_are_bitwise_the_same_alone_in_chunks_and_among_others(
    family: str, make_checkpoint: Any, dtype: torch.dtype
) -> None:
    stack = Stack(make_checkpoint(family)[0], dtype)
    tokens = draw_prompt(63, seed=5)
    (whole,) = stack.logits([(0, tokens, 0)])
    assert whole.isfinite().all()
    chunks = [stack.logits([(1, tokens[i : i + 5], i)])[0] for i in range(0, 63, 5)]
    one_by_one = [stack.logits([(2, [token], i)])[0] for i, token in enumerate(tokens[:17])]
    among_others = []
    for start in range(0, 63, 9):
        others = [(3 + i, draw_prompt(1 + 3 * i, seed=start + i), start) for i in range(7)]
        among_others.append(stack.logits([*others[:2], (10, tokens[start : start + 9], start), *others[2:]])[2])
    for pieces in (chunks, one_by_one, among_others):
        assert torch.equal(torch.cat(pieces), whole[: sum(map(len, pieces))])


@pytest.mark.parametrize("name", ["llama", "gemma 2", "qwen3-moe", "granite"])
def test_two_threads_change_nothing_between_alone_and_among_others(make_checkpoint: Any, name: str) -> None:
    torch.set_num_threads(2)
    try:
        stack = Stack(make_checkpoint(name)[0])
        tokens = draw_prompt(60, seed=6)
        (whole,) = stack.logits([(0, tokens, 0)])
        batches = [stack.logits([(1, draw_prompt(40, i), 0), (2, tokens[i : i + 20], i)])[1] for i in (0, 20, 40)]
    finally:
        torch.set_num_threads(1)
    assert torch.equal(torch.cat(batches), whole)


def test_logits_in_float16_are_close_to_float32(family: str, make_checkpoint: Any) -> None:
    folder, model = make_checkpoint(family)
    tokens = draw_prompt(40, seed=7)
    (logits,) = Stack(folder, torch.float16).logits([(0, tokens, 0)])
    reference = oracle(model, tokens)
    assert logits.dtype == torch.float32
    assert (logits - reference).abs().mean() < 0.01 * reference.std()
