"""Architectures that the guard lets through equal transformers eager, whatever the engine does to their requests."""

from __future__ import annotations

import itertools
import json
import re
import threading
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
from engine.errors import CheckpointError, ConfigError, UnsupportedModel
from engine.kv_cache.spec import max_blocks_for
from engine.metrics import SchedulerStats
from engine.model_runner.model_runner import ModelRunner
from engine.models.checkpoint import read_config
from engine.models.decoder import Decoder
from engine.models.families import DECODERS
from engine.models.registry import BuiltModel, build_model, choose
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


@pytest.fixture(scope="module")
def gpt2_folder(draw_model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("gpt2")
    draw_model("gpt2").save_pretrained(folder)
    return folder


def build(folder: Path, **settings: Any) -> BuiltModel:
    return build_model(folder, EngineConfig(**settings), quiet)


def copy_of(folder: Path, target: Path, change: Callable[[dict[str, Any], dict[str, torch.Tensor]], None]) -> Path:
    """Return a copy of the checkpoint, with config.json and tensors changed."""
    raw, tensors = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
    change(raw, tensors)
    (target / "config.json").write_text(json.dumps(raw))
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    return target


def test_auto_takes_our_own_decoder_where_it_can_and_transformers_where_not(
    draw_model: Any, tmp_path: Path, gpt2_folder: Path
) -> None:
    draw_model("llama").save_pretrained(tmp_path)
    assert isinstance(build(tmp_path).model, Decoder)
    assert isinstance(build(tmp_path, model_impl="transformers").model, TransformersModel)
    assert isinstance(build(gpt2_folder).model, TransformersModel)


@pytest.mark.parametrize(("model_type", "stored"), [("llama", "another"), ("gemma2", "another"), ("llama", "the same")])
def test_a_stored_head_that_is_not_the_embedding_is_not_tied_as_transformers_does(
    draw_model: Any, tmp_path: Path, model_type: str, stored: str
) -> None:
    (tmp_path / "tied").mkdir()
    draw_model(model_type, tie_word_embeddings=True).save_pretrained(tmp_path / "tied")

    def add_head(raw: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        embedding = tensors["model.embed_tokens.weight"]
        tensors["lm_head.weight"] = embedding.clone() if stored == "the same" else embedding.flip(0)

    folder = copy_of(tmp_path / "tied", tmp_path, add_head)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == (stored == "the same")
    for implementation in ("own", "transformers"):
        stack = Stack(folder, model_impl=implementation)
        check(model, PROMPTS[3], stack.run(PROMPTS[3:4])[0][0])


def test_a_tied_embedding_may_be_stored_as_the_head_alone(draw_model: Any, tmp_path: Path) -> None:
    (tmp_path / "tied").mkdir()
    model = draw_model("llama", tie_word_embeddings=True)
    model.save_pretrained(tmp_path / "tied")

    def rename(raw: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")

    folder = copy_of(tmp_path / "tied", tmp_path, rename)
    for implementation in ("own", "transformers"):
        stack = Stack(folder, model_impl=implementation)
        check(model, PROMPTS[3], stack.run(PROMPTS[3:4])[0][0])


def test_own_refuses_what_is_no_row(gpt2_folder: Path) -> None:
    with pytest.raises(UnsupportedModel, match="names GPT2LMHeadModel; our own decoder runs Gemma2"):
        build(gpt2_folder, model_impl="own")


def test_what_neither_runs_is_refused_with_both_reasons(draw_model: Any, tmp_path: Path) -> None:
    draw_model("bloom").save_pretrained(tmp_path)
    words = "^BloomForCausalLM does not .* check 'call a layer' failed: .* Our own decoder .* names BloomForCausalLM"
    with pytest.raises(UnsupportedModel, match=words):
        build(tmp_path, max_model_len=64)


@pytest.fixture(scope="module")
def llama_folder(draw_model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("llama")
    draw_model("llama").save_pretrained(folder)
    return folder


def test_a_number_that_only_our_own_decoder_refuses_is_for_transformers_to_read(
    llama_folder: Path, tmp_path: Path
) -> None:
    scaling = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": None, "original_max_position_embeddings": 32}
    folder = copy_of(llama_folder, tmp_path, lambda raw, tensors: raw.update(rope_parameters=scaling))
    with pytest.raises(CheckpointError, match="factor must be a finite number above 0, got None"):
        build(folder, model_impl="own")
    assert isinstance(build(folder).model, TransformersModel)
    assert choose(read_config(folder), None, quiet).implementation == "transformers' model, which passes the guard,"


def test_a_number_that_both_refuse_is_refused_with_both_reasons(llama_folder: Path, tmp_path: Path) -> None:
    folder = copy_of(llama_folder, tmp_path, lambda raw, tensors: raw.update(vocab_size="many"))
    words = "config.json is not accepted by transformers: .* Our own decoder .* vocab_size must be a whole number"
    for refuse in (build, lambda folder: choose(read_config(folder), None, quiet)):
        with pytest.raises(CheckpointError, match=f"(?s)^{words}"):
            refuse(folder)


@pytest.mark.parametrize(
    ("error", "words"),
    [(AssertionError(), r"AssertionError\(\)"), (KeyError(None), r"KeyError\(None\)"), (OSError("no"), "no")],
)
def test_an_error_of_transformers_without_a_text_is_named_by_its_type(
    gpt2_folder: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, words: str
) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise error

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", fail)
    with pytest.raises(CheckpointError, match=f"cannot be loaded by transformers: {words}"):
        build(gpt2_folder)
    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", fail)
    with pytest.raises(CheckpointError, match=f"is not accepted by transformers: {words}"):
        build(gpt2_folder)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"architectures": ["NovelForCausalLM"]}, "has no causal language model NovelForCausalLM$"),
        (
            {"architectures": ["NovelForCausalLM"], "auto_map": {"AutoModelForCausalLM": "novel.Novel"}},
            "code from a model folder is never run",
        ),
        ({"architectures": []}, "names no architecture"),
        ({"architectures": ["OPTForCausalLM"]}, "its model_type is one of GPT2LMHeadModel"),
        ({"quantization_config": {"quant_method": "gptq"}}, "gptq"),
    ],
)
def test_what_transformers_does_not_have_is_refused_by_name(
    gpt2_folder: Path, tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    folder = copy_of(gpt2_folder, tmp_path, lambda raw, tensors: raw.update(changes))
    with pytest.raises(UnsupportedModel, match=words):
        build(folder, model_impl="transformers")


@pytest.mark.parametrize(("model_type", "spelled"), [("phimoe", "PhiMoEForCausalLM"), ("gpt2", "GPT2LMHEADModel")])
def test_an_architecture_may_be_spelled_otherwise(
    draw_model: Any, tmp_path: Path, model_type: str, spelled: str
) -> None:
    model = draw_model(model_type)
    model.save_pretrained(tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text()) | {"architectures": [spelled]}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    assert isinstance(build(tmp_path).model, TransformersModel)
    assert choose(raw, None, quiet).architecture == type(model).__name__ != spelled


@pytest.mark.parametrize("size", [0, -5])
@pytest.mark.parametrize("folder", ["gpt2_folder", "llama_folder"])
def test_a_longest_context_of_nothing_is_refused_with_the_value(
    request: pytest.FixtureRequest, tmp_path: Path, folder: str, size: int
) -> None:
    key = "n_positions" if folder == "gpt2_folder" else "max_position_embeddings"
    changed = copy_of(request.getfixturevalue(folder), tmp_path, lambda raw, tensors: raw.update({key: size}))
    for refuse in (build, lambda folder: choose(read_config(folder), folder, quiet)):
        with pytest.raises(CheckpointError, match=f"max_position_embeddings must be above 0, got {size}"):
            refuse(changed)


def test_code_in_a_folder_is_never_run(gpt2_folder: Path, tmp_path: Path) -> None:
    def add_code(raw: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        raw["auto_map"] = {"AutoConfig": "novel.Config", "AutoModelForCausalLM": "novel.Novel"}
        (tmp_path / "novel.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nraise SystemExit\n")

    folder = copy_of(gpt2_folder, tmp_path, add_code)
    assert isinstance(build(folder).model, TransformersModel)
    assert not (tmp_path / "ran").exists()


def test_numbers_that_transformers_does_not_accept_are_the_checkpoint_s_fault(
    gpt2_folder: Path, tmp_path: Path
) -> None:
    folder = copy_of(gpt2_folder, tmp_path, lambda raw, tensors: raw.update(n_head="six"))
    with pytest.raises(CheckpointError, match=r"config\.json is not accepted by transformers"):
        build(folder)


def lose(raw: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    del tensors["transformer.h.1.mlp.c_fc.weight"]


def bend(raw: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    tensors["transformer.ln_f.weight"] = torch.ones(47)


def invent(raw: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    tensors["transformer.h.1.adapter.weight"] = torch.ones(3)


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (lose, r"1 missing: transformer\.h\.1\.mlp\.c_fc\.weight"),
        (bend, r"transformer\.ln_f\.weight is \[47\], must be \[48\]"),
        (invent, r"1 unknown: transformer\.h\.1\.adapter\.weight"),
    ],
)
def test_a_tensor_that_does_not_fit_is_named_by_the_load_and_by_what_foretells_it(
    gpt2_folder: Path, tmp_path: Path, fault: Any, words: str
) -> None:
    folder = copy_of(gpt2_folder, tmp_path, fault)
    with pytest.raises(CheckpointError, match=words):
        build(folder)
    with pytest.raises(CheckpointError, match=words):
        choose(read_config(folder), folder, quiet)


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.float8_e4m3fn, torch.int32, torch.float64])
def test_weights_of_a_type_that_is_not_read_are_refused_by_name(
    gpt2_folder: Path, tmp_path: Path, dtype: torch.dtype
) -> None:
    name = "transformer.h.1.mlp.c_fc.weight"
    folder = copy_of(gpt2_folder, tmp_path, lambda raw, tensors: tensors.update({name: tensors[name].to(dtype)}))
    with pytest.raises(UnsupportedModel, match=rf"tensor {re.escape(name)} is stored as .*; F32, BF16, F16 can be"):
        build(folder)
    with pytest.raises(UnsupportedModel, match="is stored as"):
        choose(read_config(folder), folder, quiet)


def test_tables_that_old_checkpoints_have_beside_the_weights_may_be_of_any_type(
    gpt2_folder: Path, tmp_path: Path
) -> None:
    mask = {"transformer.h.0.attn.bias": torch.ones(1, 1, 8, 8, dtype=torch.uint8)}
    folder = copy_of(gpt2_folder, tmp_path, lambda raw, tensors: tensors.update(mask))
    assert isinstance(build(folder).model, TransformersModel)
    assert "passes the guard" in choose(read_config(folder), folder, quiet).implementation


def test_a_truncated_weight_file_is_a_checkpoint_error(gpt2_folder: Path, tmp_path: Path) -> None:
    folder = copy_of(gpt2_folder, tmp_path, lambda raw, tensors: None)
    content = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(content[: len(content) // 2])
    with pytest.raises(CheckpointError, match="is truncated or corrupt"):
        build(folder)


def test_a_model_without_a_longest_context_must_be_given_one(draw_model: Any, tmp_path: Path) -> None:
    draw_model("bloom").save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="names no longest context: give --max-model-len"):
        build(tmp_path)


def test_weights_are_loaded_in_the_calling_thread(gpt2_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[threading.Thread] = []
    monkeypatch.setattr(threading.Thread, "start", threads.append)
    assert isinstance(build(gpt2_folder).model, TransformersModel)
    assert not threads


def test_what_would_run_a_model_is_said_without_its_weights() -> None:
    gpt2 = {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2"}
    assert choose(gpt2, None, quiet) == ("GPT2LMHeadModel", "transformers' model, which passes the guard,", 1024)
    words = "^transformers .* has no causal language model NovelForCausalLM. Our own decoder"
    with pytest.raises(UnsupportedModel, match=words):
        choose({"architectures": ["NovelForCausalLM"]}, None, quiet)
    with pytest.raises(UnsupportedModel, match=r"^quantized checkpoints are not supported"):
        choose(gpt2 | {"quantization_config": {"quant_method": "gptq"}}, None, quiet)
