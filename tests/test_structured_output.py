"""Requests whose text has a form, through whole engines of the integer model: tokens are bytes, and masks are real."""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest
import trio

import engine
from engine.client.async_llm import AsyncLLM
from engine.errors import InvalidGrammar
from engine.executor.null import continuation
from engine.grammar_compiler import _MAIN, _Trial
from engine.grammar_trial import NUM_STEPS
from engine.outputs import FinishReason
from engine.sampling_params import SamplingParams
from engine.structured_output.llguidance_backend import LLGuidanceGrammar
from engine.structured_output.manager import StructuredOutputManager
from web.errors import GenerationFailed

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 9}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
ASKED: dict[str, dict[str, Any]] = {
    "json": {"json": PERSON, "disable_any_whitespace": True},
    "json_object": {"json_object": True},
    "regex": {"regex": "[a-z]{2,6}( [0-9]{1,3}){1,3}!"},
    "choice": {"choice": ["yes", "yes, really", "no"]},
    "grammar": {"grammar": 'start: (WORD | "(" start ")")+ "."\nWORD: /[a-z]{1,4}/'},
    "structural_tag": {
        "structural_tag": {"structures": [{"begin": "<f>", "schema": {"const": 1}, "end": "</f>"}], "triggers": ["<f"]}
    },
}
PROMPT = list(b"a prompt of some length, for the blocks")
MULTIPLE_OF_A_PRIME = {"json": {"type": "integer", "multipleOf": 999_983}}
"""Nine seconds of a compiler's time, were it allowed."""


def params_of(asked: dict[str, Any], **fields: Any) -> SamplingParams:
    return SamplingParams(structured_outputs=asked, **{"max_tokens": 60, "seed": 7} | fields)  # type: ignore[arg-type]


def alone(params: SamplingParams, prompt: list[int] = PROMPT) -> list[int]:
    """Return what the integer model gives by definition, with a grammar compiled here."""
    grammar = StructuredOutputManager("null", 256).compile(params)
    assert isinstance(grammar, LLGuidanceGrammar)
    tokens = []
    for token in continuation(prompt, params, grammar=grammar):
        tokens.append(token)
        if len(tokens) == params.max_tokens or token in params.stop_token_ids:
            break
    return tokens


async def collect(llm: AsyncLLM, params: SamplingParams, prompt: list[int] = PROMPT) -> engine.RequestOutput:
    async with llm.generate(prompt, params) as stream:
        return await stream.collect()


@pytest.fixture(params=["process", "thread"])
async def llm(request: pytest.FixtureRequest) -> AsyncIterator[AsyncLLM]:
    async with engine.open_engine("null", isolation=request.param, max_num_seqs=32, grammar_answer_time=60) as llm:
        yield llm


@pytest.mark.slow
async def test_each_kind_gets_its_tokens_served_and_in_this_thread_whoever_is_beside(llm: AsyncLLM) -> None:
    """A mixed batch gives each request what it gets alone: forms, plain ones, with and without seeds of their own."""
    wanted = [params_of(asked, seed=seed, max_tokens=40) for asked in ASKED.values() for seed in (1, 2)]
    plain = SamplingParams(max_tokens=40, seed=3)
    outputs: dict[int, list[int]] = {}

    async def run(index: int, params: SamplingParams) -> None:
        outputs[index] = (await collect(llm, params)).outputs[0].token_ids

    async with trio.open_nursery() as nursery:
        for index, params in enumerate([*wanted, plain]):
            nursery.start_soon(run, index, params)
    in_thread = engine.LLM("null")
    assert outputs.pop(len(wanted)) == one(in_thread, plain).token_ids
    assert outputs == {index: alone(params) for index, params in enumerate(wanted)}
    assert outputs == {index: one(in_thread, params).token_ids for index, params in enumerate(wanted)}


@pytest.mark.slow
async def test_a_hostile_form_is_refused_with_the_reason_and_the_next_one_is_served(llm: AsyncLLM) -> None:
    chain = "start: r0\n" + "\n".join(f'r{i}: "a" r{i + 1} | r{i + 1}' for i in range(2000)) + '\nr2000: "z"'
    hostile = {
        "takes more than 0.05 seconds of processor time to compile, which --grammar": MULTIPLE_OF_A_PRIME,
        "nested too deeply, or needs too much memory": {"grammar": chain},
        "unclosed character class": {"regex": "["},
        "too many expressions constructed: make it simpler": {"regex": "(a{1,1000}){1,1000}"},
    }
    for says, asked in hostile.items():
        for _ in range(2):  # the second time it is known
            (output,) = (await collect(llm, params_of(asked))).outputs
            assert (output.finish_reason, output.token_ids) == (FinishReason.ERROR, [])
            assert output.error is not None
            assert output.error.type == "InvalidGrammar"
            assert says in output.error.message
    assert (await collect(llm, params_of({"choice": ["fine"]}))).outputs[0].text == "fine"
    assert llm.is_healthy


async def test_a_form_whose_masks_take_too_long_behind_what_a_trial_walks_through_ends_its_request_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By a clock of the test's: behind the prefix, each mask and each token takes 50 ms."""
    prefix, num_looks, now_s = "x" * (NUM_STEPS + 10), itertools.count(), 0.0

    def thread_time() -> float:
        nonlocal now_s
        now_s += 0.05 if 4 * len(prefix) <= next(num_looks) < 4 * (len(prefix) + 20) else 0  # twice a mask and a token
        return now_s

    monkeypatch.setattr("engine.structured_output.timed.time", SimpleNamespace(thread_time=thread_time))
    costly = params_of({"grammar": f'start: "{prefix}" /a+/'}, max_tokens=3000)
    async with engine.open_engine("null", isolation="thread", grammar_answer_time=60, max_model_len=4096) as llm:
        (output,) = (await collect(llm, costly)).outputs
        assert output.text.startswith(prefix)
        assert output.finish_reason is FinishReason.ERROR
        assert output.error is not None
        assert output.error.type == "InvalidGrammar"
        assert "ms of processor time a token: make it simpler" in output.error.message
        assert (await collect(llm, params_of({"choice": ["fine"]}))).outputs[0].text == "fine"


async def test_an_abort_while_a_grammar_is_tried_ends_the_request_and_the_next_one_is_served() -> None:
    """That nothing is tried for those that have ended is shown by a clock of the tests, in test_grammar_compiler.py."""
    async with engine.open_engine("null", isolation="thread", grammar_answer_time=60) as llm:
        for width in range(1, 4):
            with trio.move_on_after(0.05):
                await collect(llm, params_of(MULTIPLE_OF_A_PRIME | {"whitespace_pattern": " " * width}))
        with trio.fail_after(20):
            await llm.wait_for_stats(lambda stats: stats.num_waiting == 0)
            assert (await collect(llm, params_of({"choice": ["fine"]}))).outputs[0].text == "fine"


async def test_an_honest_form_waits_for_no_hostile_one_and_of_those_no_more_than_some_may_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """None is refused for want of time here, so that only the bound on the queue is left to refuse any."""
    monkeypatch.setattr("engine.grammar_compiler.MAX_SLOW", 1)
    ended: list[str] = []

    async def ask(llm: AsyncLLM, asked: dict[str, Any]) -> None:
        (output,) = (await collect(llm, params_of(asked))).outputs
        ended.append("honest" if output.error is None else output.error.type)
        if ended[-1] == "GrammarQueueFull":
            assert output.error is not None
            assert "try again later" in output.error.message
            assert GenerationFailed(output.error).status_hint == 429

    opened = engine.open_engine("null", isolation="thread", grammar_compile_time=1, grammar_answer_time=60)
    async with opened as llm, trio.open_nursery() as nursery:
        assert (await collect(llm, params_of({"choice": ["started"]}))).outputs[0].text == "started"
        for width in range(1, 13):
            nursery.start_soon(ask, llm, MULTIPLE_OF_A_PRIME | {"whitespace_pattern": " " * width})
        await llm.wait_for_stats(lambda stats: stats.num_waiting == 12)
        nursery.start_soon(ask, llm, {"choice": ["fine"]})
        nursery.start_soon(ask, llm, {"choice": ["fine"]})
    assert ended[: ended.index("honest")].count("InvalidGrammar") <= 2
    assert ended.count("honest") == 2
    assert ended.count("GrammarQueueFull") >= 5
    assert ended.count("InvalidGrammar") >= 2
    assert ended[-1] == "InvalidGrammar"


async def test_leaving_the_engine_while_a_grammar_is_tried_leaves_nothing() -> None:
    async with engine.open_engine("null", isolation="thread") as llm, trio.open_nursery() as nursery:
        nursery.start_soon(collect, llm, params_of(MULTIPLE_OF_A_PRIME))
        await llm.wait_for_stats(lambda stats: stats.num_waiting == 1)
        nursery.cancel_scope.cancel()


async def test_a_process_that_cannot_try_grammars_fails_the_request_that_needs_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("engine.grammar_compiler._MAIN", "raise SystemExit(3)")
    async with engine.open_engine("null", isolation="thread", grammar_answer_time=60) as llm:
        (output,) = (await collect(llm, params_of({"choice": ["a"]}))).outputs
        assert output.error is not None
        assert output.error.type == "GrammarTrialDied"
        assert "status 3" in output.error.message
        assert GenerationFailed(output.error).status_hint == 503
        assert (await collect(llm, SamplingParams(max_tokens=2))).outputs[0].error is None


@pytest.mark.parametrize("is_idle", [True, False])
async def test_a_process_that_is_killed_while_idle_or_asked_costs_no_request_anything(
    monkeypatch: pytest.MonkeyPatch, is_idle: bool
) -> None:
    asked_of: list[int] = []
    trials: list[_Trial] = []
    ask = _Trial.ask

    async def ask_one_that_may_die(self: _Trial, asked: Any) -> Any:
        trials.append(self)
        asked_of.append(self.child.pid)
        if len(trials) == 2 and not is_idle:
            self.child.signal(signal.SIGKILL)
            await self.child.wait()
        return await ask(self, asked)

    monkeypatch.setattr(_Trial, "ask", ask_one_that_may_die)
    async with engine.open_engine("null", isolation="thread", grammar_answer_time=60) as llm:
        assert (await collect(llm, params_of({"choice": ["a"]}))).outputs[0].text == "a"
        if is_idle:
            trials[0].child.signal(signal.SIGKILL)
            await trials[0].child.wait()
        assert (await collect(llm, params_of({"choice": ["b"]}))).outputs[0].text == "b"
    assert len(set(asked_of)) == 2
    assert len(asked_of) == (2 if is_idle else 3)  # one that is known to have ended is not asked


async def test_a_process_that_stands_still_fails_the_request_in_time_and_the_next_one_gets_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trials: list[_Trial] = []
    ask = _Trial.ask

    async def ask_a_stopped_one(self: _Trial, asked: Any) -> Any:
        trials.append(self)
        if len(trials) == 2:
            self.child.signal(signal.SIGSTOP)
        return await ask(self, asked)

    monkeypatch.setattr(_Trial, "ask", ask_a_stopped_one)
    async with engine.open_engine("null", isolation="thread", grammar_compile_time=0.05, grammar_answer_time=60) as llm:
        assert (await collect(llm, params_of({"choice": ["a"]}))).outputs[0].text == "a"
        monkeypatch.setattr("engine.grammar_compiler.MIN_WALL_S", 0.2)
        with trio.fail_after(5):
            (output,) = (await collect(llm, params_of({"choice": ["b"]}))).outputs
        assert output.error is not None
        assert output.error.type == "GrammarTrialStuck"
        assert "no answer within 1 seconds" in output.error.message
        assert GenerationFailed(output.error).status_hint == 503
        assert trials[1].child.returncode == -signal.SIGKILL
        monkeypatch.undo()
        assert (await collect(llm, params_of({"choice": ["b"]}))).outputs[0].text == "b"


def test_the_process_that_tries_grammars_is_tied_to_its_parent_before_it_imports_anything() -> None:
    environment = {key: value for key, value in os.environ.items() if key != "TRANSPORT_PARENT"}
    argv = [sys.executable, "-X", "importtime", "-P", "-c", _MAIN]
    run = subprocess.run(argv, env=environment, capture_output=True, text=True, timeout=30, check=False)
    assert "child_guard() is for a process" in run.stderr
    assert not re.search(r"\| +(numpy|llguidance|engine)", run.stderr)


# -- one process, this thread: what else a request may ask for


@pytest.fixture(scope="module")
def in_thread() -> engine.LLM:
    return engine.LLM("null")


def one(llm: engine.LLM, params: SamplingParams, prompt: list[int] = PROMPT) -> engine.CompletionOutput:
    return llm.generate(prompt, params, use_tqdm=False)[0].outputs[0]


@pytest.mark.parametrize(
    "fields", [{}, {"min_tokens": 30}, {"ignore_eos": True}, {"min_tokens": 5, "ignore_eos": True}]
)
def test_a_complete_text_ends_its_request_with_stop_whatever_asks_for_more(
    in_thread: engine.LLM, fields: dict[str, Any]
) -> None:
    output = one(in_thread, params_of({"json": {"type": "boolean"}}, **fields))
    assert output.text in {"true", "false"}
    assert (output.finish_reason, output.stop_reason, output.error) == (FinishReason.STOP, None, None)


def test_a_text_that_is_complete_with_the_last_token_it_may_have_is_a_stop(in_thread: engine.LLM) -> None:
    assert one(in_thread, params_of({"choice": ["abc"]}, max_tokens=3)).finish_reason == FinishReason.STOP
    assert one(in_thread, params_of({"choice": ["abc"]}, max_tokens=2)).finish_reason == FinishReason.LENGTH
    assert one(in_thread, params_of({"regex": "a+"}, max_tokens=2)).finish_reason == FinishReason.LENGTH


def test_stop_tokens_end_a_text_where_the_grammar_lets_it_end(in_thread: engine.LLM) -> None:
    params = params_of({"regex": "[ab]+"}, stop_token_ids=[0, 1], min_tokens=3)
    output = one(in_thread, params)
    assert re.fullmatch("[ab]{2,}", output.text)
    assert (output.finish_reason, output.stop_reason) == (FinishReason.STOP, output.token_ids[-1])
    assert output.token_ids[-1] in {0, 1}
    assert len(output.token_ids) >= 3


def test_a_stop_string_ends_a_text_before_its_grammar_does(in_thread: engine.LLM) -> None:
    output = one(in_thread, params_of(ASKED["json"], stop=['"age']))
    assert re.fullmatch(r'\{"name":".*",', output.text)
    assert (output.finish_reason, output.stop_reason) == (FinishReason.STOP, '"age')


def test_children_are_compiled_each_and_draw_by_their_seeds(in_thread: engine.LLM) -> None:
    (output,) = in_thread.generate(PROMPT, params_of(ASKED["regex"], n=4), use_tqdm=False)
    assert [child.token_ids for child in output.outputs] == [
        alone(params_of(ASKED["regex"], seed=7 + index)) for index in range(4)
    ]
    assert len({child.text for child in output.outputs}) > 1


def test_preempted_and_chunked_requests_get_the_tokens_they_get_alone() -> None:
    llm = engine.LLM("null", block_size=4, num_gpu_blocks_override=30, max_num_seqs=8, max_num_batched_tokens=16)
    prompts = [[65 + index] * (8 + index) for index in range(8)]
    params = params_of({"regex": "[a-z]{20,60}!"}, max_tokens=50)
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert llm.stats().num_preemptions > 0
    assert [output.outputs[0].token_ids for output in outputs] == [alone(params, prompt) for prompt in prompts]


def test_repetition_and_a_complete_text_are_a_stop(in_thread: engine.LLM) -> None:
    detection = {"max_pattern_size": 1, "min_pattern_size": 1, "min_count": 3}
    complete = params_of({"regex": "aaa"}, repetition_detection=detection)
    assert (one(in_thread, complete).finish_reason, one(in_thread, complete).stop_reason) == (FinishReason.STOP, None)
    going_on = params_of({"regex": "a{3,9}b"}, repetition_detection=detection)
    assert one(in_thread, going_on).finish_reason == FinishReason.REPETITION


def test_a_form_that_is_refused_ends_its_request_alone_with_the_reason(in_thread: engine.LLM) -> None:
    refused = one(in_thread, params_of({"regex": "["}))
    assert refused.finish_reason == FinishReason.ERROR
    assert refused.error is not None
    assert refused.error.type == InvalidGrammar.__name__
    assert one(in_thread, params_of({"choice": ["a"]})).text == "a"


def test_a_grammar_that_takes_too_much_work_midway_ends_its_request_with_the_reason(in_thread: engine.LLM) -> None:
    output = one(in_thread, params_of({"regex": r"(\w{1,100}){1,100}"}, max_tokens=400))
    assert output.finish_reason == FinishReason.ERROR
    assert output.error is not None
    assert output.error.type == "GrammarFailed"
    assert "lexer error" in output.error.message


def test_json_of_the_integer_model_is_json(in_thread: engine.LLM) -> None:
    texts = [one(in_thread, params_of(ASKED["json"], seed=seed, max_tokens=300)).text for seed in range(20)]
    assert all(json.loads(text).keys() == {"name", "age"} for text in texts)
