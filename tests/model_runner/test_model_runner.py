from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from engine.config import EngineConfig
from engine.errors import CheckpointError, ConfigError
from engine.kv_cache.spec import NULL_BLOCK
from engine.model_runner.model_runner import ModelRunner
from engine.outputs import SchedulerOutput
from engine.sampling_params import SamplingParams


def draw_prompt(length: int, seed: int) -> list[int]:
    return torch.randint(0, 199, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


@torch.inference_mode()
def greedy(model: Any, prompt: list[int], max_tokens: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(max_tokens):
        tokens.append(model(torch.tensor([tokens]), use_cache=False).logits[0, -1].argmax().item())
    return tokens[len(prompt) :]


@pytest.mark.parametrize("budget", [1000, 5])
def test_greedy_tokens_of_a_batch_equal_those_of_transformers_alone(
    tiny_llama: tuple[Path, Any], make_driver: Any, budget: int
) -> None:
    driver = make_driver()
    prompts = {f"request {i}": draw_prompt(1 + 7 * i, seed=i) for i in range(8)}
    for name, prompt in prompts.items():
        driver.add(name, prompt)
    generated = driver.generate(max_tokens=12, budget=budget)
    for name, prompt in prompts.items():
        assert generated[name] == greedy(tiny_llama[1], prompt, 12), name


def test_seeded_tokens_do_not_depend_on_batch_or_chunks(make_driver: Any) -> None:
    params = [SamplingParams(temperature=1.5, seed=i, top_p=0.95 if i % 2 else 1.0) for i in range(4)]
    prompts = [draw_prompt(20 + 3 * i, seed=10 + i) for i in range(4)]
    together = make_driver()
    for i in range(4):
        together.add(str(i), prompts[i], params[i])
    in_batch = together.generate(max_tokens=15, budget=7)
    for i in range(4):
        alone = make_driver()
        alone.add(str(i), prompts[i], params[i])
        assert alone.generate(max_tokens=15, budget=1000)[str(i)] == in_batch[str(i)]


PENALISED: list[dict[str, Any]] = [
    {"repetition_penalty": 1.4},
    {"logit_bias": {7: 4.0, 9: -3.0}},
    {"bad_words_token_ids": tuple((token_id,) for token_id in range(0, 199, 3))},
    {"allowed_token_ids": range(20, 40)},
    {"repetition_penalty": 0.8, "logit_bias": {50: 5.0}},
    {},
]


def _by_transformers(params: dict[str, Any]) -> dict[str, Any]:
    ours = {"allowed_token_ids": "prefix_allowed_tokens_fn", "bad_words_token_ids": "bad_words_ids"}
    settings = {ours.get(name, name): value for name, value in params.items()}
    if "bad_words_ids" in settings:
        settings["bad_words_ids"] = [list(word) for word in settings["bad_words_ids"]]
    if "logit_bias" in settings:
        settings["sequence_bias"] = {(token_id,): bias for token_id, bias in settings.pop("logit_bias").items()}
    if "prefix_allowed_tokens_fn" in settings:
        allowed = list(settings["prefix_allowed_tokens_fn"])
        settings["prefix_allowed_tokens_fn"] = lambda _batch, _tokens: allowed
    return settings


def test_greedy_tokens_with_processors_in_one_batch_equal_those_of_transformers_alone(
    tiny_llama: tuple[Path, Any], make_driver: Any
) -> None:
    driver = make_driver()
    prompts = [draw_prompt(5 + 3 * i, seed=20 + i) for i in range(len(PENALISED))]
    for i, (prompt, params) in enumerate(zip(prompts, PENALISED, strict=True)):
        params = {name: tuple(value) if isinstance(value, range) else value for name, value in params.items()}
        driver.add(str(i), prompt, SamplingParams(temperature=0, **params))
    generated = driver.generate(max_tokens=16, budget=6)
    for i, (prompt, params) in enumerate(zip(prompts, PENALISED, strict=True)):
        settings = {"max_new_tokens": 16, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        tokens = tiny_llama[1].generate(torch.tensor([prompt]), **settings, **_by_transformers(params))
        assert generated[str(i)] == tokens[0, len(prompt) :].tolist(), params


def test_start_reports_every_phase_in_order_and_what_fits(make_driver: Any) -> None:
    driver = make_driver(max_model_len=64)
    assert list(dict.fromkeys(phase for phase, _, _ in driver.phases)) == [
        "weights",
        "kv_specs",
        "profile",
        "kv_pages",
        "warm_up",
    ]
    assert ("weights", 20, 20) in driver.phases
    assert driver.capacity.num_kv_blocks == 401
    assert (driver.capacity.block_size, driver.capacity.max_model_len, driver.capacity.vocab_size) == (4, 64, 199)
    assert len(driver.capacity.model_digest) == 32


def test_the_context_is_the_model_s_unless_set(make_driver: Any) -> None:
    assert make_driver().capacity.max_model_len == 128


def test_a_longer_context_than_the_model_s_is_refused_with_both_numbers(make_driver: Any) -> None:
    with pytest.raises(ConfigError, match=r"--max-model-len 129 is more than the 128 positions"):
        make_driver(max_model_len=129)


def test_a_folder_without_a_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json cannot be read"):
        ModelRunner(EngineConfig(num_threads=1), tmp_path).start(lambda *call: None)


def test_a_row_that_does_not_sample_yields_nothing(make_driver: Any) -> None:
    driver = make_driver()
    driver.add("long", draw_prompt(30, 1))
    driver.add("short", draw_prompt(4, 2))
    output = driver.step({"long": 10, "short": 4})
    assert [len(token_ids) for token_ids in output.sampled_token_ids] == [0, 1]
    assert driver.step({"long": 10}).sampled_token_ids == [[]]
    assert set(output.timings) == {"flatten", "forward", "logits", "sample"}


def test_an_empty_plan_is_legal(make_driver: Any) -> None:
    runner = make_driver().runner
    runner.execute(SchedulerOutput(step=9, requests=()))
    output = runner.sample()
    assert (output.step, output.sampled_token_ids, output.failed) == (9, [], {})


def test_sampling_without_an_executed_plan_is_an_error(make_driver: Any) -> None:
    with pytest.raises(LookupError, match="without an executed plan"):
        make_driver().runner.sample()


def test_what_is_executed_and_not_sampled_is_forgotten_once_another_plan_is(make_driver: Any) -> None:
    runner = make_driver().runner
    for step in (9, 10):
        runner.execute(SchedulerOutput(step=step, requests=()))
    assert runner.sample().step == 10
    with pytest.raises(LookupError, match="without an executed plan"):
        runner.sample()


@pytest.mark.parametrize("params", [{}, {"frequency_penalty": 2.0, "repetition_penalty": 1.5}])
def test_a_late_token_is_taken_from_the_uncommitted_step_before(make_driver: Any, params: dict[str, Any]) -> None:
    prompts = {"a": draw_prompt(9, 1), "b": draw_prompt(3, 2)}
    plain, overlapped = make_driver(), make_driver()
    for name, prompt in prompts.items():
        plain.add(name, prompt, SamplingParams(temperature=0, **params))
        overlapped.add(name, prompt, SamplingParams(temperature=0, **params))
    expected = plain.generate(max_tokens=8, budget=1000)

    before = overlapped.plan({"a": 9, "b": 3})
    overlapped.runner.execute(before)
    output = overlapped.runner.sample()
    for _ in range(7):
        plan = overlapped.plan({"a": 1, "b": 1}, late=["a", "b"])
        overlapped.runner.execute(plan)
        overlapped.commit(before, output)
        before, output = plan, overlapped.runner.sample()
    overlapped.commit(before, output)
    assert {name: overlapped.tokens[name][len(prompts[name]) :] for name in prompts} == expected


def test_a_request_with_broken_numbers_fails_alone(make_driver: Any) -> None:
    driver = make_driver()
    prompt = draw_prompt(12, 3)
    driver.add("alone", prompt)
    expected = driver.step({"alone": 12}).sampled_token_ids[0]
    driver.add("good", prompt)
    driver.add("bad", draw_prompt(12, 4))
    driver.step({"bad": 5})
    with torch.inference_mode():
        driver.runner.attention.key_pages[1][driver._tables["bad"][0][0].item()] = torch.nan
    output = driver.step({"good": 12, "bad": 7})
    assert output.sampled_token_ids == [expected, []]
    assert list(output.failed) == ["bad"]
    assert output.failed["bad"].type == "BadLogits"


def test_a_mask_is_given_between_forward_and_sampling(make_driver: Any) -> None:
    driver = make_driver()
    driver.add("free", draw_prompt(5, 5))
    driver.add("bound", draw_prompt(6, 6))
    plan = driver.plan({"free": 5, "bound": 6}, grammar_rows=(1,))
    driver.runner.execute(plan)
    masks = np.zeros((1, 7), dtype=np.int32)
    masks[0, 3] = 1 << 4
    output = driver.runner.sample(masks)
    assert output.sampled_token_ids[1] == [100]
    driver.add("alone", driver.tokens["free"])
    assert driver.step({"alone": 5}).sampled_token_ids == [output.sampled_token_ids[0]]


def test_engines_of_one_front_share_cores_and_memory(
    tiny_llama: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.model_runner.model_runner.available_memory_bytes", lambda: 2**22)
    monkeypatch.setattr("engine.model_runner.model_runner.num_available_cores", lambda: 3)
    num_blocks = []
    for num_engines in (1, 2, 4):
        runner = ModelRunner(EngineConfig(data_parallel_size=num_engines), tiny_llama[0])
        num_blocks.append(runner.start(lambda *call: None).num_kv_blocks - 1)
        assert torch.get_num_threads() == max(1, 3 // num_engines)
    logits_bytes, block_bytes = 4 * 64 * 199, 4096
    assert num_blocks == [(2**22 // num_engines - logits_bytes) // 4 // block_bytes for num_engines in (1, 2, 4)]


def test_the_thread_count_is_the_one_set(make_driver: Any) -> None:
    torch.set_num_threads(2)
    make_driver()
    assert torch.get_num_threads() == 1


@pytest.fixture(scope="module")
def tiny_gemma(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """Five layers, of which all but the second have a window of 6 positions; caps on scores and logits."""
    config = transformers.Gemma2Config(
        vocab_size=199,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=5,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=128,
        sliding_window=6,
        layer_types=["sliding_attention", "full_attention", *["sliding_attention"] * 3],
    )
    config._attn_implementation = "eager"
    torch.manual_seed(4)
    model = transformers.Gemma2ForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.3)
    folder = tmp_path_factory.mktemp("tiny-gemma")
    model.save_pretrained(folder)
    return folder, model


def test_windows_make_groups_that_share_page_tensors(make_driver: Any, tiny_gemma: tuple[Path, Any]) -> None:
    driver = make_driver(tiny_gemma[0])
    assert [(group.layers, group.sliding_window) for group in driver.capacity.kv_cache_groups] == [
        ((1,), None),
        ((0,), 6),
        ((2,), 6),
        ((3,), 6),
        ((4,), 6),
    ]
    assert len(driver.runner.attention.key_pages) == 1
    assert not driver.runner.attention.key_pages[0][NULL_BLOCK].any()


def test_a_window_as_long_as_the_context_makes_no_group(make_driver: Any, tiny_gemma: tuple[Path, Any]) -> None:
    (group,) = make_driver(tiny_gemma[0], max_model_len=6).capacity.kv_cache_groups
    assert (group.layers, group.sliding_window) == ((0, 1, 2, 3, 4), None)


@pytest.mark.parametrize("budget", [1000, 5, 1])
def test_blocks_before_every_window_are_never_read(make_driver: Any, tiny_gemma: tuple[Path, Any], budget: int) -> None:
    driver = make_driver(tiny_gemma[0])
    prompts = {f"request {i}": draw_prompt(3 + 11 * i, seed=i) for i in range(4)}
    for name, prompt in prompts.items():
        driver.add(name, prompt)
    generated = driver.generate(max_tokens=8, budget=budget, spoils_freed=True)
    for name, prompt in prompts.items():
        assert generated[name] == greedy(tiny_gemma[1], prompt, 8), name
