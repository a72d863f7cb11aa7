"""`LLMEngine` in the caller's thread and in a process: outputs by kind, aborts, interrupts, and `LLM` on top of it."""

from __future__ import annotations

import os
import random
import signal
import uuid
from collections.abc import Iterator
from itertools import count, pairwise
from typing import Any

import pytest

import engine
from engine.errors import ConfigError, EngineDeadError, InvalidRequest, QueueFull
from engine.executor.null import NullModelRunner
from engine.outputs import FinishReason
from engine.sampling_params import OutputKind, SamplingParams
from engine.testing import expected_tokens
from tests.interrupts import InterruptAt, alarm, interrupt_after

GREEDY = SamplingParams(temperature=0, max_tokens=12)
LONG = SamplingParams(temperature=0, max_tokens=4000)
ISOLATIONS = ["none", "process"]


@pytest.fixture(params=ISOLATIONS)
def llm_engine(request: pytest.FixtureRequest) -> Iterator[engine.LLMEngine]:
    settings = {"isolation": request.param, "log_level": "error", "null_step_ms": 1}
    with engine.LLMEngine("null", max_num_seqs=4, **settings) as opened:
        yield opened


def run(llm_engine: engine.LLMEngine) -> dict[str, list[engine.RequestOutput]]:
    """Step until all have ended; the outputs of each label in order."""
    outputs: dict[str, list[engine.RequestOutput]] = {}
    while llm_engine.has_unfinished_requests():
        for output in llm_engine.step():
            outputs.setdefault(output.request_id, []).append(output)
    return outputs


def text_of(prompt: list[int], params: SamplingParams = GREEDY) -> str:
    return bytes(expected_tokens(prompt, params, params.max_tokens or 0)).decode()


def test_outputs_hold_all_so_far_unless_something_else_is_asked_for(llm_engine: engine.LLMEngine) -> None:
    kinds = {"default": None, **{kind.value: kind for kind in OutputKind}}
    for label, kind in kinds.items():
        params = SamplingParams(temperature=0, max_tokens=12, output_kind=kind)
        llm_engine.add_request(label, [65, 66], params)
    assert llm_engine.num_unfinished_requests == 4
    outputs = run(llm_engine)
    text, tokens = text_of([65, 66]), expected_tokens([65, 66], GREEDY, 12)
    for label in ("default", "cumulative"):
        texts = [output.outputs[0].text for output in outputs[label]]
        assert len(texts) == 12
        assert all(longer.startswith(shorter) for shorter, longer in pairwise(texts))
        assert texts[-1] == text
        assert outputs[label][-1].outputs[0].token_ids == tokens
    assert "".join(output.outputs[0].text for output in outputs["delta"]) == text
    assert [token for output in outputs["delta"] for token in output.outputs[0].token_ids] == tokens
    (only,) = outputs["final_only"]
    assert (only.outputs[0].text, only.finished) == (text, True)
    for of_label in outputs.values():
        assert [output.finished for output in of_label] == [False] * (len(of_label) - 1) + [True]
        assert of_label[-1].outputs[0].finish_reason is FinishReason.LENGTH
    assert llm_engine.num_unfinished_requests == 0
    assert llm_engine.step() == []


def test_n_completions_come_with_their_index_and_end_the_request_together(llm_engine: engine.LLMEngine) -> None:
    for kind in (OutputKind.FINAL_ONLY, OutputKind.DELTA):
        params = SamplingParams(temperature=1, n=3, seed=7, max_tokens=6, output_kind=kind)
        llm_engine.add_request(kind, "dice", params)
    outputs = run(llm_engine)
    (final,) = outputs["final_only"]
    assert [completion.index for completion in final.outputs] == [0, 1, 2]
    texts = ["", "", ""]
    for output in outputs["delta"]:
        for completion in output.outputs:
            texts[completion.index] += completion.text
    assert texts == [completion.text for completion in final.outputs]
    assert len(set(texts)) == 3


def test_counts_follow_requests_that_come_run_and_are_aborted(llm_engine: engine.LLMEngine) -> None:
    assert not llm_engine.has_unfinished_requests()
    for label in "abc":
        llm_engine.add_request(label, [ord(label)] * 3, LONG)
    assert llm_engine.num_unfinished_requests == 3
    while llm_engine.stats().num_running < 3:
        llm_engine.step()
    llm_engine.abort_request("a")
    llm_engine.abort_request(["b", "c", "nobody"])
    llm_engine.add_request("a", [97] * 3, GREEDY)  # the same label at once
    outputs = run(llm_engine)
    assert [outputs[label][-1].outputs[0].finish_reason for label in "bc"] == [FinishReason.ABORT] * 2
    ends = [output.outputs[0].finish_reason for output in outputs["a"] if output.finished]
    assert ends == [FinishReason.ABORT, FinishReason.LENGTH]
    assert outputs["a"][-1].outputs[0].text == text_of([97] * 3)
    assert llm_engine.stats().num_used_blocks == 0


@pytest.mark.parametrize("label", [uuid.uuid4(), 12345, None])
def test_a_label_that_is_no_string_is_refused_and_the_next_request_runs(label: Any) -> None:
    llm_engine = engine.LLMEngine("null")
    with pytest.raises(TypeError, match=f"request_id must be a string, got {type(label).__name__}"):
        llm_engine.add_request(label, [1])
    llm_engine.add_request("fine", [1], GREEDY)
    assert run(llm_engine)["fine"][-1].finished


def test_what_is_refused_starts_nothing_also_of_several_completions() -> None:
    llm_engine = engine.LLMEngine("null", max_num_seqs=2, max_num_waiting=0)
    with pytest.raises(InvalidRequest, match="empty"):
        llm_engine.add_request("a", [])
    with pytest.raises(InvalidRequest, match="3 completions"):
        llm_engine.add_request("a", [1], SamplingParams(n=3))
    llm_engine.add_request("a", [1], GREEDY)
    with pytest.raises(QueueFull):
        llm_engine.add_request("b", [1], SamplingParams(n=2))
    assert llm_engine.num_unfinished_requests == 1
    assert run(llm_engine).keys() == {"a"}


def test_a_stop_string_ends_the_text_and_the_request(llm_engine: engine.LLMEngine) -> None:
    text = text_of([65])
    params = SamplingParams(temperature=0, max_tokens=4000, stop=[text[4:7]], output_kind=OutputKind.DELTA)
    llm_engine.add_request("a", [65], params)
    outputs = run(llm_engine)["a"]
    assert "".join(output.outputs[0].text for output in outputs) == text[: text.index(text[4:7])]
    assert [output.finished for output in outputs].count(True) == 1
    assert outputs[-1].outputs[0].stop_reason == text[4:7]
    assert llm_engine.stats().num_used_blocks == 0


def test_a_request_that_cannot_be_turned_into_text_fails_alone(
    llm_engine: engine.LLMEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm_engine.add_request("bad", [1], LONG)
    llm_engine.add_request("good", [2], GREEDY)
    bad = next(state for state in llm_engine._slots.values() if state.request_id == "bad")
    monkeypatch.setattr(bad, "add", lambda output, now_s: 1 / 0)
    outputs = run(llm_engine)
    (told,) = outputs["bad"]
    assert told.outputs[0].finish_reason is FinishReason.ERROR
    assert told.outputs[0].error is not None
    assert outputs["good"][-1].outputs[0].text == text_of([2])


def test_a_shutdown_leaves_last_outputs_to_be_read(llm_engine: engine.LLMEngine) -> None:
    llm_engine.add_request("a", [1], LONG)
    llm_engine.step()
    llm_engine.shutdown()
    assert run(llm_engine)["a"][-1].outputs[0].finish_reason is FinishReason.ABORT
    with pytest.raises(EngineDeadError, match="shut down"):
        llm_engine.add_request("b", [1])


def test_the_prefix_cache_can_be_reset(llm_engine: engine.LLMEngine) -> None:
    cached = []
    for resets in (False, False, True):
        if resets:
            assert llm_engine.reset_prefix_cache()
        llm_engine.add_request("a", [70] * 100, GREEDY)
        cached.append(run(llm_engine)["a"][-1].num_cached_tokens)
    assert cached == [0, 96, 0]


def test_interrupts_at_drawn_instants_lose_no_output_and_double_none(llm_engine: engine.LLMEngine) -> None:
    draw = random.Random(2)
    params = SamplingParams(temperature=0, max_tokens=40, output_kind=OutputKind.DELTA)
    outputs: list[engine.RequestOutput] = []
    num_interrupts = 0

    def read() -> None:
        while llm_engine.has_unfinished_requests():
            news = llm_engine.step()
            outputs.extend(news)

    with alarm(lambda: signal.raise_signal(signal.SIGINT)):
        for i in range(12):
            llm_engine.add_request(f"r{i}", [i] * (i + 1), params)
        is_done = False
        while not is_done:
            try:
                signal.setitimer(signal.ITIMER_REAL, draw.uniform(1e-4, 6e-3))
                read()
                signal.setitimer(signal.ITIMER_REAL, 0)
                is_done = True
            except KeyboardInterrupt:
                num_interrupts += 1
    assert num_interrupts > 5
    for i in range(12):
        told = [output for output in outputs if output.request_id == f"r{i}"]
        tokens = [token for output in told for token in output.outputs[0].token_ids]
        assert tokens == expected_tokens([i] * (i + 1), params, 40)
        assert [output.finished for output in told].count(True) == 1


@pytest.mark.slow
def test_an_interrupt_wherever_python_could_raise_one_in_a_step_loses_no_output_and_doubles_none() -> None:
    llm_engine = engine.LLMEngine("null", log_level="error")
    params = SamplingParams(temperature=0, max_tokens=1, output_kind=OutputKind.DELTA)
    for number in count(1):
        injection, label, prompt = InterruptAt(number), f"r{number}", [65, number % 256]
        outputs: list[engine.RequestOutput] = []

        def read(outputs: list[engine.RequestOutput] = outputs) -> None:
            while llm_engine.has_unfinished_requests():
                news = llm_engine.step()
                outputs.extend(news)

        try:
            with injection:
                llm_engine.add_request(label, prompt, params)
                read()
        except KeyboardInterrupt:
            if not llm_engine.has_unfinished_requests() and not outputs:
                continue  # it was not even added
        read()
        llm_engine.client.core.check_invariants()
        assert llm_engine.stats().num_used_blocks == 0
        tokens = [token for output in outputs for token in output.outputs[0].token_ids]
        assert tokens == expected_tokens(prompt, params, 1)
        assert [output.finished for output in outputs].count(True) == 1
        if injection.left > 0:
            break
        assert number < 5000
    assert number > 200, "there are more such points than that"


def test_an_interrupted_forward_is_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    llm_engine = engine.LLMEngine("null")
    llm_engine.add_request("a", [1, 2, 3], GREEDY)
    for name in ("execute", "sample"):
        method = getattr(NullModelRunner, name)

        def interrupted(self: NullModelRunner, *arguments: Any, method: Any = method) -> Any:
            method(self, *arguments)
            raise KeyboardInterrupt

        with monkeypatch.context() as patched:
            patched.setattr(NullModelRunner, name, interrupted)
            with pytest.raises(KeyboardInterrupt):
                llm_engine.step()
        llm_engine.client.core.check_invariants()
    assert run(llm_engine)["a"][-1].outputs[0].text == text_of([1, 2, 3])


def test_the_death_of_the_process_is_raised_by_every_further_step() -> None:
    with engine.LLMEngine("null", isolation="process", log_level="error", null_step_ms=1) as llm_engine:
        llm_engine.add_request("a", [1], LONG)
        llm_engine.step()
        os.kill(llm_engine.client.ready.pid, signal.SIGKILL)
        for _ in range(2):
            with pytest.raises(EngineDeadError, match="SIGKILL"):
                run(llm_engine)


@pytest.mark.parametrize("isolation", ["thread", "fork", None])
def test_what_isolation_there_is_not_is_refused_before_a_model_is_looked_for(isolation: Any) -> None:
    with pytest.raises(ConfigError, match=f"isolation={isolation!r}"):
        engine.LLMEngine("no-such-model", isolation=isolation)


# -- LLM on top ------------------------------------------------------------------------------------------------------


def test_llm_in_a_process_gives_what_llm_in_this_thread_gives() -> None:
    prompts = [[65 + i] * (40 - 3 * i) for i in range(12)]
    params = SamplingParams(temperature=1, seed=3, n=2, max_tokens=12)
    settings = {"max_num_seqs": 4, "max_num_waiting": 2, "max_num_batched_tokens": 32, "log_level": "error"}
    results = []
    for isolation in ISOLATIONS:
        with engine.LLM("null", isolation=isolation, **settings) as llm:
            outputs = llm.generate(prompts, params, use_tqdm=False)
            results.append([[completion.token_ids for completion in output.outputs] for output in outputs])
    assert results[0] == results[1]
    assert results[0][5][1] == expected_tokens(prompts[5], SamplingParams(temperature=1, seed=4), 12)


def test_an_interrupted_generate_leaves_no_request_in_the_process_either() -> None:
    with engine.LLM("null", isolation="process", log_level="error", null_step_ms=1) as llm:
        with interrupt_after(0.05), pytest.raises(KeyboardInterrupt):
            llm.generate([[65] * 10, [66] * 10], LONG, use_tqdm=False)
        assert llm.client.num_live == 0
        assert llm.stats().num_used_blocks == 0
        (output,) = llm.generate([[67]], GREEDY, use_tqdm=False)
        assert output.outputs[0].token_ids == expected_tokens([67], GREEDY, 12)
