"""A tiny llama, its oracle, and a driver that builds plans by hand."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import transformers

from engine.config import EngineConfig
from engine.kv_cache.spec import NULL_BLOCK, num_skipped_blocks
from engine.model_runner.model_runner import ModelRunner
from engine.outputs import ModelRunnerOutput, RequestId, ScheduledRequest, SchedulerOutput
from engine.sampling_params import SamplingParams

torch.set_num_threads(1)
GREEDY = SamplingParams(temperature=0)


def make_llama(folder: Path, **sizes: Any) -> Any:
    """Write a float32 checkpoint with random norms to `folder`; return the same model in transformers eager."""
    config = transformers.LlamaConfig(
        vocab_size=199, num_hidden_layers=2, max_position_embeddings=128, initializer_range=0.15, **sizes
    )
    config._attn_implementation = "eager"
    torch.manual_seed(3)
    model = transformers.LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.normal_(1.0, 0.3)
    model.save_pretrained(folder)
    return model


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A checkpoint that only torch's operations run, and its oracle."""
    folder = tmp_path_factory.mktemp("tiny-llama")
    sizes = {"hidden_size": 48, "intermediate_size": 80, "num_attention_heads": 6, "num_key_value_heads": 2}
    return folder, make_llama(folder, **sizes, tie_word_embeddings=True)


class Oracle(NamedTuple):
    """A checkpoint, the same model in transformers eager, and settings that choose the operations to run it on."""

    folder: Path
    model: Any
    settings: dict[str, Any]


@pytest.fixture(scope="session", params=["torch", "compiled"])
def oracle(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    """One that both torch's operations and those in C run: all its sizes are multiples of 16."""
    folder = tmp_path_factory.mktemp("wide-llama")
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
    settings = {"kernels": request.param, "block_size": 16}
    return Oracle(folder, make_llama(folder, **sizes, tie_word_embeddings=True), settings)


class Driver:
    """Stands where the core will: keeps tokens and blocks, builds plans, appends what was sampled."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        self.config = EngineConfig(num_threads=1, num_gpu_blocks_override=400, block_size=4, **settings)
        self.runner = ModelRunner(self.config, folder)
        self.phases: list[tuple[str, int, int]] = []
        self.capacity = self.runner.start(lambda *call: self.phases.append(call))
        self.tokens: dict[str, list[int]] = {}
        self.num_computed: dict[str, int] = {}
        self.params: dict[str, SamplingParams] = {}
        self.num_prompt_tokens: dict[str, int] = {}
        self._blocks = np.random.default_rng(0).permutation(np.arange(1, 400)).astype(np.int32)
        self._tables: dict[str, list[np.ndarray]] = {}
        self._step = 0

    def add(self, name: str, prompt: Sequence[int], params: SamplingParams = GREEDY) -> None:
        self.tokens[name], self.num_computed[name], self.params[name] = list(prompt), 0, params
        self.num_prompt_tokens[name] = len(prompt)
        self._tables[name] = []
        for _ in self.capacity.kv_cache_groups:
            self._tables[name].append(self._blocks[:20].copy())
            self._blocks = self._blocks[20:]

    def plan(self, num_tokens: dict[str, int], late: Sequence[str] = (), **fields: Any) -> SchedulerOutput:
        """Plan `num_tokens` tokens of each named request; those in `late` end with a token not known yet."""
        self._step += 1
        rows = []
        for name, num in num_tokens.items():
            start = self.num_computed[name]
            rows.append(
                ScheduledRequest(
                    request_id=RequestId(name),
                    tokens=np.array(self.tokens[name], dtype=np.int32),
                    start=start,
                    num_tokens=num,
                    block_tables=tuple(table.copy() for table in self._tables[name]),
                    samples=start + num == len(self.tokens[name]) + (name in late),
                    sampling_params=self.params[name],
                    num_late=int(name in late),
                    num_prompt_tokens=self.num_prompt_tokens[name],
                )
            )
            self.num_computed[name] += num
        return SchedulerOutput(step=self._step, requests=tuple(rows), num_tokens=sum(num_tokens.values()), **fields)

    def commit(self, plan: SchedulerOutput, output: ModelRunnerOutput) -> None:
        assert output.step == plan.step
        for request, token_ids in zip(plan.requests, output.sampled_token_ids, strict=True):
            self.tokens[request.request_id] += token_ids

    def step(self, num_tokens: dict[str, int]) -> ModelRunnerOutput:
        plan = self.plan(num_tokens)
        self.runner.execute(plan)
        output = self.runner.sample()
        self.commit(plan, output)
        return output

    @torch.inference_mode()
    def free_skipped(self) -> None:
        """Take back the blocks that no window reaches any more, and spoil what they hold, as another's K/V would."""
        attention = self.runner.attention
        for name, tables in self._tables.items():
            for group, table in zip(self.capacity.kv_cache_groups, tables, strict=True):
                num_skipped = num_skipped_blocks(group, self.num_computed[name], self.config.block_size)
                for block in set(table[:num_skipped].tolist()) - {NULL_BLOCK}:
                    for pages in (*attention.key_pages, *attention.value_pages):
                        pages[block] = torch.nan
                table[:num_skipped] = NULL_BLOCK

    def generate(self, max_tokens: int, budget: int, spoils_freed: bool = False) -> dict[str, list[int]]:
        """Run every request to `max_tokens` new tokens, at most `budget` tokens of one request a step."""
        ends = {name: len(tokens) + max_tokens for name, tokens in self.tokens.items()}
        starts = {name: len(tokens) for name, tokens in self.tokens.items()}
        while running := [name for name in self.tokens if len(self.tokens[name]) < ends[name]]:
            self.step({name: min(budget, len(self.tokens[name]) - self.num_computed[name]) for name in running})
            if spoils_freed:
                self.free_skipped()
        return {name: self.tokens[name][start:] for name, start in starts.items()}


@pytest.fixture
def make_driver(tiny_llama: tuple[Path, Any]) -> Any:
    return lambda folder=tiny_llama[0], **settings: Driver(folder, **settings)
