"""Architectures that the guard lets through equal transformers eager, whatever the engine does to their requests."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
import torch

from engine.config import EngineConfig
from engine.core import EngineCore
from engine.kv_cache.spec import max_blocks_for
from engine.metrics import SchedulerStats
from engine.model_runner.model_runner import ModelRunner
from engine.models.transformers_backend import TransformersModel
from engine.outputs import Capacity, RequestId
from engine.protocol import EngineCoreRequest
from engine.sampling_params import SamplingParams

MAX_TOKENS = 5
BUDGET = 24
HALVES = {"layer_types": ["sliding_attention", "full_attention"] * 2}
LATENT = {"num_key_value_heads": 6, "head_dim": 4}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "apertus": {},
    "arcee": {},
    "bert": {},
    "biogpt": {},
    "bitnet": {},
    "codegen": {},
    "cohere": {},
    "cohere2": HALVES,
    "ctrl": {"dff": 80},
    "deepseek_v2": LATENT,
    "deepseek_v3": LATENT,
    "dots1": {},
    "ernie4_5": {},
    "ernie4_5_moe": {},
    "exaone4": HALVES,
    "flex_olmo": {},
    "glm": {},
    "glm4": {},
    "glm4_moe": {},
    "gpt2": {},
    "gpt_bigcode": {},
    "gpt_neox": {},
    "gptj": {},
    "granitemoe": {},
    "granitemoeshared": {},
    "helium": {},
    "hunyuan_v1_dense": {},
    "hunyuan_v1_moe": {},
    "jetmoe": {},
    "minicpm3": LATENT,
    "minimax_m2": {},
    "ministral": HALVES,
    "modernbert-decoder": {"pad_token_id": 0},
    "nemotron": {},
    "olmo": {},
    "olmo3": HALVES,
    "olmoe": {},
    "opt": {},
    "persimmon": {},
    "phi": {},
    "phimoe": {"sliding_window": None},
    "qwen2_moe": {},
    "seed_oss": {},
    "stablelm": {},
    "starcoder2": {},
}
"""model_type → how its tiny configuration differs from `SIZES`."""


def draw_prompt(length: int, seed: int) -> list[int]:
    return torch.randint(3, 199, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


PROMPTS = [draw_prompt(1 + 5 * i, seed=i) for i in range(8)]


class Recorder:
    """A model whose logits are kept."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self.kept: list[torch.Tensor] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        self.kept.append(self._model.logits(hidden))
        return self.kept[-1]


class Answer(NamedTuple):
    tokens: list[int]
    logits: list[torch.Tensor]


class Stack:
    """A started runner, and a core of its own for every run."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        self.settings = {"max_num_batched_tokens": 512, "max_num_seqs": 16, "block_size": 4, "max_model_len": 64}
        self.settings |= {"num_gpu_blocks_override": 600, "num_threads": 1} | settings
        self.runner = ModelRunner(EngineConfig(**self.settings), folder)
        self.capacity = self.runner.start(lambda *call: None)
        self.model = self.runner._model

    def fewest_blocks(self) -> int:
        """Blocks that hold one request of full length, twice, and the null block."""
        groups = self.capacity.kv_cache_groups
        return 3 * max_blocks_for(groups, 64, 4, BUDGET) // 2 + 1

    def run(
        self, prompts: list[list[int]], num_kv_blocks: int | None = None, rounds: int = 1, **settings: Any
    ) -> tuple[list[Answer], SchedulerStats]:
        """Answer greedily, `rounds` times in one core; the answers of the last round."""
        capacity: Capacity = msgspec.structs.replace(
            self.capacity, num_kv_blocks=num_kv_blocks or self.capacity.num_kv_blocks
        )
        core = EngineCore(EngineConfig(**(self.settings | settings)), capacity)
        params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True)
        answers: list[Answer] = []
        for turn in range(rounds):
            answers = [Answer([], []) for _ in prompts]
            for i, prompt in enumerate(prompts):
                name = f"{turn}-{i}"
                core.add(EngineCoreRequest(RequestId(name), name, prompt, params, arrival_time=0.0), now=0.0)
            self._finish(core, answers)
        return answers, core.stats()

    def _finish(self, core: EngineCore, answers: list[Answer]) -> None:
        while core.has_work:
            plan = core.plan(0.0)
            assert plan is not None
            self.runner.execute(plan)
            recorder = self.runner._model = Recorder(self.model)
            output = self.runner.sample()
            sampled = [request for request in plan.requests if request.samples]
            for request, row in zip(sampled, itertools.chain.from_iterable(recorder.kept), strict=True):
                answers[int(request.request_id.split("-")[1])].logits.append(row)
            core.commit(plan, output, 0.0)
            core.check_invariants()
            for given in core.take_outputs():
                answers[int(given.request_id.split("-")[1])].tokens.extend(given.new_token_ids)


@torch.inference_mode()
def check(model: Any, prompt: list[int], answer: Answer) -> None:
    """The answer's tokens are the greedy ones of `model`, its logits those of `model` within 1e-4."""
    tokens = torch.tensor([prompt + answer.tokens[:-1]])
    expected = model(tokens, use_cache=False).logits[0, len(prompt) - 1 :]
    assert len(answer.tokens) == MAX_TOKENS
    torch.testing.assert_close(torch.stack(answer.logits), expected, rtol=0, atol=1e-4)
    assert answer.tokens == expected.argmax(-1).tolist()


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ARCHITECTURES)
def test_tokens_and_logits_equal_eager_alone_batched_chunked_preempted_and_with_prefix_hits(
    draw_model: Any, tmp_path: Path, model_type: str
) -> None:
    model = draw_model(model_type, **ARCHITECTURES[model_type])
    model.save_pretrained(tmp_path)
    stack = Stack(tmp_path, model_impl="transformers")
    assert isinstance(stack.model, TransformersModel)

    check(model, PROMPTS[-1], stack.run(PROMPTS[-1:])[0][0])

    together, stats = stack.run(PROMPTS, rounds=2)
    assert stats.prefix_cache_hits > 0
    for prompt, answer in zip(PROMPTS, together, strict=True):
        check(model, prompt, answer)

    chunked, stats = stack.run(
        PROMPTS, stack.fewest_blocks(), long_prefill_token_threshold=5, max_num_batched_tokens=BUDGET
    )
    assert stats.num_preemptions > 0
    for prompt, answer in zip(PROMPTS, chunked, strict=True):
        check(model, prompt, answer)
