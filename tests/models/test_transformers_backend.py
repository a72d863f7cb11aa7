"""Architectures that the guard lets through equal transformers eager, whatever the engine does to their requests."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from engine.config import EngineConfig
from engine.core import EngineCore
from engine.kv_cache.spec import max_blocks_for
from engine.metrics import SchedulerStats
from engine.model_runner.model_runner import ModelRunner
from engine.models.decoder import Decoder
from engine.models.families import DECODERS
from engine.models.transformers_backend import TransformersModel
from engine.models.transformers_loading import foretell
from engine.outputs import Capacity, RequestId
from engine.protocol import EngineCoreRequest
from engine.sampling_params import SamplingParams

MAX_TOKENS = 4
BUDGET = 24
ARCHITECTURES = (
    "apertus",
    "arcee",
    "bert",
    "biogpt",
    "bitnet",
    "codegen",
    "cohere",
    "cohere2",
    "ctrl",
    "deepseek_v2",
    "deepseek_v3",
    "dots1",
    "ernie4_5",
    "ernie4_5_moe",
    "exaone4",
    "flex_olmo",
    "gemma2",
    "gemma3n_text",
    "gemma4_text",
    "glm",
    "glm4",
    "glm4_moe",
    "gpt2",
    "gpt_bigcode",
    "gpt_neox",
    "gpt_oss",
    "gptj",
    "granitemoe",
    "granitemoeshared",
    "helium",
    "hunyuan_v1_dense",
    "hunyuan_v1_moe",
    "jetmoe",
    "minicpm3",
    "minimax_m2",
    "ministral",
    "modernbert-decoder",
    "nemotron",
    "olmo",
    "olmo3",
    "olmoe",
    "opt",
    "persimmon",
    "phi",
    "phimoe",
    "qwen2_moe",
    "seed_oss",
    "stablelm",
    "starcoder2",
    "vaultgemma",
)


def draw_prompt(length: int, seed: int) -> list[int]:
    return torch.randint(3, 199, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


PROMPTS = [draw_prompt(1 + 5 * i, seed=i) for i in range(8)]


def quiet(*_progress: Any) -> None:
    """Tell nobody."""


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
        self.capacity = self.runner.start(quiet)
        self.model = self.runner._model

    def fewest_blocks(self) -> int:
        """Blocks that hold one request of full length and half of another, and the null block."""
        groups = self.capacity.kv_cache_groups
        return 3 * max_blocks_for(groups, 64, 4, BUDGET) // 2 + 1

    def run(
        self,
        prompts: list[list[int]],
        num_kv_blocks: int | None = None,
        rounds: int = 1,
        preempts_after: int = 0,
        **settings: Any,
    ) -> tuple[list[Answer], SchedulerStats]:
        """Answer greedily, `rounds` times in one core; the answers of the last round.

        After `preempts_after` steps all that runs is preempted.
        """
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
            self._finish(core, answers, preempts_after)
        return answers, core.stats()

    def _finish(self, core: EngineCore, answers: list[Answer], preempts_after: int) -> None:
        for step in itertools.count():
            if not core.has_work:
                break
            if step and step == preempts_after:
                assert core.reset_prefix_cache(reset_running=True)
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
    model = draw_model(model_type)
    model.save_pretrained(tmp_path)
    stack = Stack(tmp_path, model_impl="transformers")
    assert isinstance(stack.model, TransformersModel)
    assert foretell(model.config, quiet) == "transformers' model, which passes the guard,"

    check(model, PROMPTS[-1], stack.run(PROMPTS[-1:])[0][0])

    together, stats = stack.run(PROMPTS, rounds=2)
    assert stats.prefix_cache_hits > 0
    for prompt, answer in zip(PROMPTS, together, strict=True):
        check(model, prompt, answer)

    chunked, stats = stack.run(
        PROMPTS,
        stack.fewest_blocks(),
        preempts_after=7,
        long_prefill_token_threshold=5,
        max_num_batched_tokens=BUDGET,
    )
    assert stats.num_preemptions > 0
    for prompt, answer in zip(PROMPTS, chunked, strict=True):
        check(model, prompt, answer)


@pytest.mark.slow
@pytest.mark.parametrize("architecture", DECODERS)
def test_our_own_decoder_and_transformers_model_agree_on_every_row(
    draw_model: Any, tmp_path: Path, architecture: str
) -> None:
    model_types = [name for name, known in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items() if known == architecture]
    model_type = next(
        name for name in model_types if name.replace("_", "") in architecture.lower() or name[-5:] == "_text"
    )
    draw_model(model_type).save_pretrained(tmp_path)
    own, other = Stack(tmp_path, model_impl="own"), Stack(tmp_path, model_impl="transformers")
    assert isinstance(own.model, Decoder)
    assert isinstance(other.model, TransformersModel)
    assert own.model.config.windows == other.model.config.windows
    for mine, theirs in zip(own.run(PROMPTS)[0], other.run(PROMPTS)[0], strict=True):
        assert mine.tokens == theirs.tokens
        torch.testing.assert_close(torch.stack(mine.logits), torch.stack(theirs.logits), rtol=0, atol=1e-4)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_in_16_bits_logits_are_close_to_those_in_32(draw_model: Any, tmp_path: Path, dtype: str) -> None:
    model = draw_model("gpt2")
    model.save_pretrained(tmp_path)
    (answer,), _ = Stack(tmp_path, model_impl="transformers", dtype=dtype).run(PROMPTS[-1:])
    with torch.inference_mode():
        expected = model(torch.tensor([PROMPTS[-1]]), use_cache=False).logits[0, -1]
    assert (answer.logits[0] - expected).abs().mean() < 0.05 * expected.std()


def edit(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    """Change the tensors of a checkpoint."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize(("model_type", "stored"), [("llama", "another"), ("gemma2", "another"), ("llama", "the same")])
def test_a_stored_head_that_is_not_the_embedding_is_not_tied_as_transformers_does(
    draw_model: Any, tmp_path: Path, model_type: str, stored: str
) -> None:
    draw_model(model_type, tie_word_embeddings=True).save_pretrained(tmp_path)

    def add_head(tensors: dict[str, torch.Tensor]) -> None:
        embedding = tensors["model.embed_tokens.weight"]
        tensors["lm_head.weight"] = embedding.clone() if stored == "the same" else embedding.flip(0)

    edit(tmp_path, add_head)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager").eval()
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == (stored == "the same")
    for implementation in ("own", "transformers"):
        stack = Stack(tmp_path, model_impl=implementation)
        check(model, PROMPTS[3], stack.run(PROMPTS[3:4])[0][0])


def test_a_tied_embedding_may_be_stored_as_the_head_alone(draw_model: Any, tmp_path: Path) -> None:
    model = draw_model("llama", tie_word_embeddings=True)
    model.save_pretrained(tmp_path)

    def rename(tensors: dict[str, torch.Tensor]) -> None:
        tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")

    edit(tmp_path, rename)
    for implementation in ("own", "transformers"):
        stack = Stack(tmp_path, model_impl=implementation)
        check(model, PROMPTS[3], stack.run(PROMPTS[3:4])[0][0])
