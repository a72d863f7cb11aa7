"""The decoder on operations in C: transformers' logits in float32; in every form the same bits however rows come."""

from __future__ import annotations

import copy
import errno
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine.attention.base import AttentionBatch, RequestRows
from engine.attention.compiled import CompiledPages
from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.kernels.library import load, supported_variants
from engine.kernels.memory import zeros
from engine.kernels.operations import Form, Team
from engine.kv_cache.spec import NULL_BLOCK, KVCacheSpec, num_skipped_blocks
from engine.model_runner.model_runner import ModelRunner
from engine.models.checkpoint import read_config
from engine.models.compiled_decoder import CompiledDecoder, Forms, row_bytes, why_not
from engine.models.registry import decoder_config
from engine.models.weights import WeightReader
from engine.outputs import RequestId, ScheduledRequest, SchedulerOutput
from engine.sampling import processors
from engine.sampling_params import SamplingParams
from engine.verbs import SleepTag
from tests.models.conftest import DENSE, HEADS, wide

BLOCK_SIZE = 16
BLOCKS_A_REQUEST = 6
MAX_MODEL_LEN = 96
FLOAT32 = Forms(Form.FLOAT32, Form.FLOAT32, Form.FLOAT32)
FORMS = {
    "float32": FLOAT32,
    "bfloat16": Forms(Form.BFLOAT16, Form.BFLOAT16, Form.BFLOAT16),
    "int8": Forms(Form.INT8, Form.INT8, Form.BFLOAT16),
    "int4 with an int8 head and int8 keys": Forms(Form.INT4, Form.INT8, Form.INT8),
}


class Stack:
    """A compiled decoder and its pages; each request has blocks of its own in each group of layers."""

    def __init__(self, folder: Path, forms: Forms = FLOAT32, variant: str | None = None, num_threads: int = 1) -> None:
        config = decoder_config(read_config(folder))
        dtype = torch.float32 if forms.layers is Form.FLOAT32 else torch.bfloat16
        assert why_not(config, BLOCK_SIZE, dtype, is_quantized=False) is None
        fill = WeightReader(folder, 0, lambda done, total: None).fill
        team = Team(load(variant), num_threads, 20_000)
        self.model = CompiledDecoder(config, dtype, fill, 512, MAX_MODEL_LEN, team, forms)
        kv_dtype = torch.int8 if forms.pages is Form.INT8 else dtype
        spec = KVCacheSpec(
            num_layers=config.num_layers,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            item_size_bytes=kv_dtype.itemsize,
            scale_size_bytes=4 if kv_dtype == torch.int8 else 0,
            windows=config.windows,
        )
        self.groups = spec.groups(MAX_MODEL_LEN)
        num_blocks = 1 + 12 * BLOCKS_A_REQUEST * len(self.groups)
        self.pages = CompiledPages(spec, self.groups, config.num_heads, num_blocks, BLOCK_SIZE, kv_dtype)
        self.model.use_attention(self.pages)

    @torch.inference_mode()
    def logits(self, parts: list[tuple[int, list[int], int]]) -> list[torch.Tensor]:
        """Run (request, its tokens of this step, their start) in one step; returns the logits of every row."""
        rows, positions, first = [], [], 0
        for request, tokens, start in parts:
            rows.append(RequestRows(first, len(tokens), start, self._block_tables(request, start)))
            positions.append(np.arange(start, start + len(tokens)))
            first += len(tokens)
        batch = self.pages.prepare(AttentionBatch(rows))
        token_ids = torch.tensor([token for _, tokens, _ in parts for token in tokens])
        hidden = self.model.forward(token_ids, torch.from_numpy(np.concatenate(positions)), batch)
        return list(self.model.logits(hidden).clone().split([len(tokens) for _, tokens, _ in parts]))

    def _block_tables(self, request: int, start: int) -> list[np.ndarray]:
        tables = []
        for index in range(len(self.groups)):
            first = 1 + (request * len(self.groups) + index) * BLOCKS_A_REQUEST
            table = np.arange(first, first + BLOCKS_A_REQUEST, dtype=np.int32)
            table[: num_skipped_blocks(self.groups[index], start, BLOCK_SIZE)] = NULL_BLOCK
            tables.append(table)
        return tables


def draw_prompt(length: int, seed: int) -> list[int]:
    return torch.randint(0, 199, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


@torch.inference_mode()
def test_rows_that_decode_are_scored_by_their_own_forward_and_anew_once_that_may_be_changed(
    make_checkpoint: Any,
) -> None:
    stack = Stack(make_checkpoint("llama", **HEADS)[0])

    def forward(tokens: list[int]) -> torch.Tensor:
        rows = [RequestRows(i, 1, 0, stack._block_tables(i, 0)) for i in range(len(tokens))]
        batch = stack.pages.prepare(AttentionBatch(rows))
        return stack.model.forward(torch.tensor(tokens), torch.zeros(len(tokens), dtype=torch.int64), batch)

    first = forward([5, 6, 7])
    assert stack.model.operation_seconds["logits"] > 0
    found = stack.model.logits(first)
    expected, greatest = found.clone(), processors.greatest(found)
    for mine, right in zip(stack.model.greatest(found), greatest, strict=True):
        assert torch.equal(mine, right)
    found.fill_(0)  # as sampling may
    found[:, 9] = 1
    assert stack.model.greatest(found)[1].tolist() == [9, 9, 9]
    assert torch.equal(stack.model.logits(first), expected)
    some = stack.model.logits(first[1:])
    for mine, right in zip(stack.model.greatest(some), greatest, strict=True):
        assert torch.equal(mine, right[1:])
    forward([5, 6])
    chunk = stack.pages.prepare(AttentionBatch([RequestRows(0, 2, 0, stack._block_tables(0, 0))]))
    unscored = stack.model.forward(torch.tensor([8, 9]), torch.arange(2), chunk)
    assert torch.equal(stack.model.logits(unscored).clone(), stack.model.logits(unscored.clone()))
    other = stack.model.logits(forward([8, 9]))
    assert torch.equal(stack.model.greatest(other)[1], processors.greatest(other)[1])


@pytest.mark.parametrize("family", ["llama", "gemma 2", "olmo2"])
@pytest.mark.parametrize("forms", FORMS)
def test_what_a_row_takes_is_known_before(
    make_checkpoint: Any, monkeypatch: pytest.MonkeyPatch, forms: str, family: str
) -> None:
    taken = 0

    def noted(count: int, dtype: torch.dtype, *, is_huge: bool) -> torch.Tensor:
        nonlocal taken
        taken += count * dtype.itemsize
        return zeros(count, dtype, is_huge=is_huge)

    monkeypatch.setattr("engine.models.compiled_decoder.zeros", noted)
    stack = Stack(make_checkpoint(family, **HEADS)[0], FORMS[forms])
    assert taken == 512 * row_bytes(stack.model.config, FORMS[forms])


@torch.inference_mode()
@pytest.mark.parametrize("family", DENSE)
def test_logits_equal_those_of_transformers(family: str, make_checkpoint: Any) -> None:
    folder, model = make_checkpoint(family, **wide(family))
    tokens = draw_prompt(70, seed=1)
    (logits,) = Stack(folder).logits([(0, tokens, 0)])
    expected = model(torch.tensor([tokens]), use_cache=False).logits[0]
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-4)
    assert torch.equal(logits.argmax(-1), expected.argmax(-1))


@pytest.mark.parametrize("family", ["llama", "gemma 2", "olmo2", "smollm3 with windows"])
@pytest.mark.parametrize("forms", FORMS)
@pytest.mark.parametrize("variant", supported_variants())
def test_bits_do_not_depend_on_chunks_neighbours_or_threads(
    make_checkpoint: Any, variant: str, forms: str, family: str
) -> None:
    folder, _ = make_checkpoint(family, **HEADS)
    stack = Stack(folder, FORMS[forms], variant)
    tokens = draw_prompt(83, seed=5)
    (whole,) = stack.logits([(0, tokens, 0)])
    assert whole.isfinite().all()
    chunks = [stack.logits([(1, tokens[i : i + 5], i)])[0] for i in range(0, 83, 5)]
    one_by_one = [stack.logits([(2, [token], i)])[0] for i, token in enumerate(tokens[:19])]
    among_others = []
    for start in range(0, 83, 9):
        others = [(3 + i, draw_prompt(1 + 2 * i, seed=start + i), min(start, 80 - 2 * i)) for i in range(7)]
        among_others.append(stack.logits([*others[:2], (10, tokens[start : start + 9], start), *others[2:]])[2])
    threads = [Stack(folder, FORMS[forms], variant, num_threads).logits([(0, tokens, 0)])[0] for num_threads in (2, 3)]
    for pieces in (chunks, one_by_one, among_others, threads[:1], threads[1:]):
        assert torch.equal(torch.cat(pieces), whole[: sum(map(len, pieces))])


@pytest.mark.parametrize("forms", [forms for forms in FORMS if forms != "float32"])
def test_quantized_logits_are_near_those_of_float32(make_checkpoint: Any, forms: str) -> None:
    folder, _ = make_checkpoint("llama", **HEADS)
    tokens = draw_prompt(60, seed=2)
    (exact,), (found,) = Stack(folder).logits([(0, tokens, 0)]), Stack(folder, FORMS[forms]).logits([(0, tokens, 0)])
    error = (found - exact).norm() / exact.norm()
    assert error < {"bfloat16": 0.03, "int8": 0.05}.get(forms, 0.3), error


def start(folder: Path, **settings: Any) -> ModelRunner:
    config = EngineConfig(num_threads=1, num_gpu_blocks_override=40, max_model_len=64, **settings)
    runner = ModelRunner(config, folder)
    runner.start(lambda *call: None)
    return runner


def first_token(runner: ModelRunner, step: int) -> int:
    request = ScheduledRequest(
        request_id=RequestId("a"),
        tokens=np.arange(5, 25, dtype=np.int32),
        start=0,
        num_tokens=20,
        block_tables=(np.array([3, 7], dtype=np.int32),) * len(runner.capacity.kv_cache_groups),
        samples=True,
        sampling_params=SamplingParams(temperature=0),
    )
    runner.execute(SchedulerOutput(step=step, requests=(request,), num_tokens=20))
    return runner.sample().sampled_token_ids[0][0]


@pytest.mark.parametrize("quantization", ["none", "int4"])
def test_it_wakes_up_in_any_order_and_answers_as_before(make_checkpoint: Any, quantization: str) -> None:
    runner = start(make_checkpoint("llama", **HEADS)[0], kernels="compiled", quantization=quantization)
    expected = first_token(runner, 1)
    weights, pages = [SleepTag.WEIGHTS], [SleepTag.KV_CACHE]
    orders: list[tuple[int, list[list[SleepTag]]]] = [
        (1, [pages]),
        (2, [weights + pages]),
        (2, [weights, pages]),
        (2, [pages, weights]),
    ]
    for step, (level, tags) in enumerate(orders, start=2):
        runner.sleep(level)
        for some in tags:
            runner.wake_up(some)
        assert first_token(runner, step) == expected


@pytest.mark.parametrize(
    ("family", "settings", "reason"),
    [
        ("llama", {"kernels": "compiled", "dtype": "float16"}, "float16"),
        ("llama", {"quantization": "int8", "block_size": 8}, "--block-size 8"),
        ("mixtral", {"quantization": "int8"}, "experts"),
        ("llama", {"kernels": "compiled", "model_impl": "transformers"}, "only our own decoder"),
        ("llama", {"quantization": "int4", "model_impl": "transformers"}, "only our own decoder"),
        ("llama", {"kernels": "torch", "kv_cache_dtype": "int8"}, "--kv-cache-dtype int8"),
        ("llama", {"kernels": "torch", "head_quantization": "int8"}, "--head-quantization int8"),
    ],
)
def test_what_the_operations_in_c_cannot_do_is_refused_where_it_is_asked_for(
    make_checkpoint: Any, family: str, settings: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ConfigError, match=reason):
        start(make_checkpoint(family, **HEADS)[0], **settings)


def test_a_step_too_large_for_the_memory_is_refused_before_anything_is_loaded(
    make_checkpoint: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, _ = make_checkpoint("llama", **HEADS)
    settings: dict[str, Any] = {"max_num_seqs": 16, "max_model_len": 64, "num_threads": 1, "kernels": "compiled"}
    monkeypatch.setattr("engine.model_runner.model_runner.available_memory_bytes", lambda: 2**20)
    phases = []
    runner = ModelRunner(EngineConfig(max_num_batched_tokens=4096, **settings), folder)
    with pytest.raises(ConfigError, match=r"--max-num-batched-tokens 4096 to at most \d+, or free memory") as refusal:
        runner.start(lambda phase, done, total: phases.append((done, total)))
    assert phases == [(0, 0)]
    (most,) = re.findall(r"at most (\d+)", str(refusal.value))
    ModelRunner(EngineConfig(max_num_batched_tokens=int(most), **settings), folder).start(lambda *call: None)
    all_of_it = EngineConfig(max_num_batched_tokens=int(most), kv_cache_memory_bytes=2**20, **settings)
    with pytest.raises(ConfigError, match=r"--kv-cache-memory-bytes 1048576 takes .* lower it to at most"):
        ModelRunner(all_of_it, folder).start(lambda *call: None)


def test_what_they_cannot_do_runs_on_torch_and_the_log_says_why(
    make_checkpoint: Any, caplog: pytest.LogCaptureFixture
) -> None:
    start(make_checkpoint("mixtral", **HEADS)[0])
    assert "torch's operations" in caplog.text
    assert "experts" in caplog.text


def test_a_checkpoint_in_float16_is_taken_for_bfloat16_unless_float16_is_asked_for(
    make_checkpoint: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder, model = make_checkpoint("llama", **HEADS)
    copy.deepcopy(model).half().save_pretrained(tmp_path)
    with caplog.at_level("INFO"):
        runner = start(tmp_path)
    assert "layers bfloat16, head" in caplog.text
    assert "engines share" not in caplog.text
    assert first_token(runner, 1) == first_token(start(folder, dtype="bfloat16"), 1)
    start(tmp_path, dtype="float16")
    assert "they have no float16" in caplog.text


def test_it_has_as_many_threads_after_it_has_slept(make_checkpoint: Any) -> None:
    config = EngineConfig(num_threads=2, num_gpu_blocks_override=40, max_model_len=64, kernels="compiled")
    runner = ModelRunner(config, make_checkpoint("llama", **HEADS)[0])
    runner.start(lambda *call: None)
    runner.sleep(2)
    runner.wake_up([SleepTag.WEIGHTS, SleepTag.KV_CACHE])
    assert isinstance(runner._model, CompiledDecoder)
    assert runner._model._team.num_threads == 2


def test_threads_without_memory_for_their_stacks_are_refused_with_what_to_do(
    make_checkpoint: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> torch.Tensor:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr("engine.kernels.operations.zeros", full)
    config = EngineConfig(num_threads=2, num_gpu_blocks_override=40, max_model_len=64)
    runner = ModelRunner(config, make_checkpoint("llama", **HEADS)[0])
    with pytest.raises(ConfigError, match=r"stacks of 2 threads \(.*Cannot allocate memory\): lower --num-threads"):
        runner.start(lambda *call: None)
