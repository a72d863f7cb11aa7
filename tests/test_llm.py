"""`LLM` on the null model: order, refusals, many prompts, and what an interrupted call leaves."""

from __future__ import annotations

import pytest

import engine
from engine.errors import ConfigError, InvalidRequest, PromptTooLong
from engine.outputs import FinishReason
from engine.sampling_params import SamplingParams
from engine.testing import expected_tokens

GREEDY = SamplingParams(temperature=0, max_tokens=12)


@pytest.fixture
def llm() -> engine.LLM:
    return engine.LLM("null", max_num_seqs=4, max_num_batched_tokens=32)


def test_outputs_come_in_the_order_of_the_prompts(llm: engine.LLM) -> None:
    prompts = [[65 + i] * (40 - 3 * i) for i in range(12)]
    outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
    assert [o.outputs[0].token_ids for o in outputs] == [expected_tokens(p, GREEDY, 12) for p in prompts]
    assert all(o.finished for o in outputs)


def test_one_prompt_may_be_text_ids_or_messages(llm: engine.LLM) -> None:
    by_text = llm.generate("hello", GREEDY, use_tqdm=False)
    by_ids = llm.generate(list(b"hello"), GREEDY, use_tqdm=False)
    assert by_text[0].outputs == by_ids[0].outputs
    (chat,) = llm.chat([{"role": "user", "content": "hello"}], GREEDY, use_tqdm=False)
    assert chat.prompt == "user: hello\nassistant: "


def test_more_prompts_than_may_wait_are_fed_as_there_is_room() -> None:
    llm = engine.LLM("null", max_num_seqs=2, max_num_waiting=1)
    outputs = llm.generate([[66, i] for i in range(20)], GREEDY, use_tqdm=False)
    assert len(outputs) == 20


def test_n_completions_come_in_index_order_and_differ_by_seed(llm: engine.LLM) -> None:
    (output,) = llm.generate("x", SamplingParams(n=3, seed=5, temperature=1), use_tqdm=False)
    singles = [
        llm.generate("x", SamplingParams(seed=5 + i, temperature=1), use_tqdm=False)[0].outputs[0].text
        for i in range(3)
    ]
    assert [completion.text for completion in output.outputs] == singles
    assert [completion.index for completion in output.outputs] == [0, 1, 2]


def test_a_refused_prompt_starts_nothing(llm: engine.LLM) -> None:
    with pytest.raises(InvalidRequest, match="empty"):
        llm.generate(["fine", ""], use_tqdm=False)
    with pytest.raises(PromptTooLong):
        llm.generate([[1] * 9000], use_tqdm=False)
    assert llm.stats().num_running == llm.stats().num_waiting == 0


@pytest.mark.parametrize("prompts", [5, None, [None], [5.0], {}])
def test_what_is_no_prompt_is_refused(llm: engine.LLM, prompts: object) -> None:
    with pytest.raises(InvalidRequest, match="prompt"):
        llm.generate(prompts, use_tqdm=False)


def test_an_interrupted_call_leaves_no_request_and_no_block(llm: engine.LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    sample = type(llm.client.runner).sample
    num_steps = 0

    def interrupted(self: object, masks: object = None) -> object:
        nonlocal num_steps
        num_steps += 1
        if num_steps == 5:
            raise KeyboardInterrupt
        return sample(self, masks)

    monkeypatch.setattr(type(llm.client.runner), "sample", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate([[65] * 10, [66] * 10], SamplingParams(max_tokens=500), use_tqdm=False)
    assert llm.stats().num_used_blocks == 0
    monkeypatch.undo()
    (output,) = llm.generate([[67]], GREEDY, use_tqdm=False)
    assert output.outputs[0].token_ids == expected_tokens([67], GREEDY, 12)


def test_a_stop_string_ends_one_prompt_and_not_its_neighbour(llm: engine.LLM) -> None:
    text = bytes(expected_tokens([65], GREEDY, 12)).decode()
    params = SamplingParams(temperature=0, max_tokens=12, stop=[text[4:7]])
    stopped, other = llm.generate([[65], [66]], params, use_tqdm=False)
    assert stopped.outputs[0].text == text[: text.index(text[4:7])]
    assert stopped.outputs[0].finish_reason is FinishReason.STOP
    assert other.outputs[0].finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize(("settings", "text"), [({"max_num_seqs": 0}, "at least 1"), ({"what": 1}, "what")])
def test_wrong_settings_are_refused_by_name(settings: dict[str, object], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        engine.LLM("null", **settings)


def test_the_models_own_defaults_of_sampling_hold_where_no_parameters_are_given(llm: engine.LLM) -> None:
    llm.tokenizer.sampling_defaults["temperature"] = 0.0
    (output,) = llm.generate([[65] * 9], use_tqdm=False)
    assert output.outputs[0].token_ids == expected_tokens([65] * 9, SamplingParams(temperature=0), 16)
